"""The hidden states that the engine computes while it writes rollouts, kept for a training with offline features.

A drafter is called for every position that the target reads: `admit` for prompts, `observe` for committed tokens. The
recorder wraps the engine's drafter, stores the states in these two calls, and delegates all drafting.

Shapes: B rows, N tokens per row, A layers, H target hidden size, W = (A+1)*H: the inputs of the layers concatenated,
then the last hidden state after the final norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from toolkit.data.chat_template import prompt_ids
from toolkit.data.conversations import Conversation, user_turns
from toolkit.data.feature_store import FeatureSpec, FeatureStore, FeatureWriter
from toolkit.data.generation import GenerationRequest
from toolkit.infer.drafters.drafter import Drafter, WrappedDrafter
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult
from toolkit.targets.features import AuxCapture, LastCapture
from toolkit.targets.target import Target
from toolkit.train.training_data import stored_layer_ids
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


@dataclass
class _Recorded:
    """Hidden states of a request's first `positions` positions, in order."""

    positions: int = 0
    parts: list[Tensor] = field(default_factory=list)

    def append(self, states: Tensor) -> None:
        self.parts.append(states)
        self.positions += len(states)


class FeatureRecorder(WrappedDrafter):
    """A drafter that delegates to `inner` and records states. `take` returns the states of a request.

    States that are not taken are freed with their request. A request with a prefix-cache hit has no complete states.
    """

    def __init__(self, inner: Drafter, target: Target, layer_ids: Sequence[int]) -> None:
        super().__init__(inner)
        self._layers, self._last = AuxCapture(target, tuple(layer_ids)), LastCapture(target)
        self._recorded: weakref.WeakKeyDictionary[Request, _Recorded] = weakref.WeakKeyDictionary()

    def take(self, request: Request) -> Tensor | None:
        """States [L-1, W] on the CPU of a request with L tokens; None if some positions were not recorded."""
        recorded = self._recorded.pop(request, None)
        if recorded is None or recorded.positions < request.length - 1:
            return None
        return torch.cat(recorded.parts)[: request.length - 1]  # a stop may have truncated the last step

    def _states(self) -> Tensor:
        """States [B, N, W] of the last forward."""
        return torch.cat([*self._layers.take_each(), self._last.take()], dim=-1)

    # -- recording -----------------------------------------------------------------------------------------------------

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        self.inner.admit(first_row, requests, tokens)
        counts = [min(tokens, request.unread) for request in requests]
        for own, request in zip(self._states()[0].split(counts), requests, strict=True):
            if request.n_read == 0:  # new, or recomputed after preemption
                self._recorded[request] = _Recorded()
            recorded = self._recorded.get(request)
            if recorded is None or recorded.positions != request.n_read:
                self._recorded.pop(request, None)
                continue
            recorded.append(own.to("cpu", copy=True))  # a view would keep the other rows in memory

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        self.inner.observe(requests, result)
        states = self._states()
        if states.shape[1] > 1:
            states = states.gather(1, result.path[:, :, None].expand(-1, -1, states.shape[2]))
        states = states.cpu()
        for row, (request, accepted) in enumerate(zip(requests, result.accepted, strict=True)):
            recorded = self._recorded.get(request)
            if recorded is not None:
                assert recorded.positions == request.length - 1, "a forward of the target was not recorded"
                recorded.append(
                    states[row, : accepted + 1].clone()
                )  # a view would keep rejected nodes and other rows in memory

    def close(self) -> None:
        self._layers.remove()
        self._last.remove()
        super().close()


def record_features(engine: Engine, layer_ids: Sequence[int]) -> FeatureRecorder:
    """Wrap the engine's drafter in a FeatureRecorder. Closing the engine closes the recorder.

    layer_ids: indices into HF `hidden_states`, ascending. Disable the engine's prefix cache: see FeatureRecorder.
    """
    assert not engine.has_graphs, "a replay of CUDA graphs calls no module hooks, so states would be missing"
    assert not engine.has_work(), "the engine has requests whose first states were not recorded"
    engine.drafter = recorder = FeatureRecorder(engine.drafter, engine.target, layer_ids)
    return recorder
