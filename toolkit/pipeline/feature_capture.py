"""The hidden states that the engine computes while it writes rollouts, kept for a training with offline features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.data.chat_template import prompt_ids
from toolkit.data.conversations import Conversation, user_turns
from toolkit.data.feature_store import FeatureSpec, FeatureStore, FeatureWriter
from toolkit.data.generation import GenerationRequest
from toolkit.infer.engine.engine import Engine
from toolkit.infer.engine.feature_recorder import record_features
from toolkit.infer.request.request import Request
from toolkit.targets.target import Target
from toolkit.train.offline_features import stored_layer_ids
from toolkit.train_settings import TrainSettings

OnEnd = Callable[[GenerationRequest, Request], None]


@contextmanager
def captured_features(
    engine: Engine, conversations: Sequence[Conversation], settings: TrainSettings, max_tokens: int, folder: Path
) -> Iterator[OnEnd]:
    """Yields the callback of `engine_generate` that stores the features of every whole text, cut as training cuts it.

    max_tokens: of an answer. Of a conversation only the last turn's text is stored. What is not stored in the end the
    training makes itself: texts that lay in memory when the process was killed, conversations that ended before their
    last turn, and those of several turns that are longer than train.data.max_length (they end at the border of a turn).
    Raises `FeatureStoreError` when the disk has no room for the longest texts there can be, or fills up.
    """
    target = engine.target
    spec = FeatureSpec.of(target, stored_layer_ids(settings, target))
    longest = min(settings.data.max_length, engine.context_length)
    most = sorted(most_positions(target, one, max_tokens, longest) for one in conversations)
    store = FeatureStore.start(folder, spec, sum(most))
    # Which texts are stored is known when they are written: the shortest are taken to be.
    store.check_room(sum(most[len(store) :]), "at most ")
    recorder = record_features(engine, spec.layer_ids)
    with FeatureWriter(store) as writer:

        def keep(wanted: GenerationRequest, request: Request) -> None:
            features = recorder.take(request)
            text = request.prompt_ids + request.output_ids
            last = wanted.last or request.finish_reason == "length"  # a cut answer ends its conversation
            if features is None or not last or (wanted.turn > 1 and len(text) > settings.data.max_length):
                return
            ids = text[: settings.data.max_length]
            writer.add(ids, features[: len(ids) - 1])

        yield keep


def most_positions(target: Target, conversation: Conversation, max_tokens: int, longest: int) -> int:
    """Stored positions at most: of one turn its prompt and a whole answer, of several as many as training reads."""
    asked = user_turns(conversation).messages
    if sum(message["role"] == "user" for message in asked) > 1:
        return longest - 1  # earlier answers are part of the prompt, rendered anew
    return min(longest, len(prompt_ids(target.tokenizer, asked)) + max_tokens) - 1
