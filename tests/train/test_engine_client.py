"""`generate` with the engine yields each request once and keeps the batch full; an engine frees its memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from toolkit.data.generation import GenerationRequest
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_engine import LoadedEngine, build_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.target import Target
from toolkit.train import engine_client
from toolkit.train.engine_client import engine_generate


def requests_for(target: Target, lengths: list[int]) -> list[GenerationRequest]:
    ids = target.tokenizer("the quick brown fox jumps over the lazy dog")["input_ids"]
    return [GenerationRequest(ids[: 3 + i % 4], 1.0, 0.9, length, seed=i) for i, length in enumerate(lengths)]


@pytest.fixture
def engine(tiny_target: Target):
    engine = Engine(tiny_target, max_running_requests=3)
    yield engine
    engine.close()


def test_answers_equal_the_engines_own(engine: Engine, tiny_target: Target) -> None:
    """A request mixed up with its neighbour, or a seed that is lost, would spoil every rollout in silence."""
    requests = requests_for(tiny_target, [5, 1, 9, 2, 7, 4, 3])
    results = dict(engine_generate(engine, draft_used="d")(requests))
    assert sorted(results) == list(range(7)) and not engine.has_work()
    for index, wanted in enumerate(requests):
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=wanted.max_tokens, seed=wanted.seed)
        alone = engine.generate([wanted.prompt_ids], params)[0]
        assert results[index].output_ids == alone.output_ids
        assert (results[index].finish_reason, results[index].draft_used) == (alone.finish_reason, "d")


def test_short_answers_come_before_long_ones_end(engine: Engine, tiny_target: Target) -> None:
    """Were results held back to the end of the batch, a kill would lose all of them."""
    order = [index for index, _ in engine_generate(engine)(requests_for(tiny_target, [40, 1, 1, 1, 1]))]
    assert order[0] != 0 and sorted(order) == list(range(5))


def test_leaving_early_frees_the_engine(engine: Engine, tiny_target: Target) -> None:
    """After Ctrl-C or an error in the caller, the engine must not go on with abandoned requests."""
    answers = iter(engine_generate(engine)(requests_for(tiny_target, [1, 60, 60, 60, 60])))
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert not engine.has_work()


@pytest.mark.parametrize("fails", [False, True])
def test_memory_goes_back_to_the_device(tiny_target, tiny_draft, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """On a GPU, memory that torch caches, or an engine that is still referenced, leaves too little for the next step.
    So the cache is emptied before the engine is built and again after it is freed."""
    alive: list[weakref.ref] = []
    emptied: list[list[bool]] = []

    def build(*arguments, **options) -> LoadedEngine:
        loaded = build_engine(*arguments, **options)
        alive.append(weakref.ref(loaded.engine))
        return loaded

    monkeypatch.setattr(engine_client, "build_engine", build)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([one() is not None for one in alive]))

    def use(engine: Engine) -> list[int]:
        (request,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        if fails:
            raise RuntimeError(f"after {len(request.output_ids)} tokens")
        return list(request.output_ids)

    gc.disable()
    try:
        config = EngineConfig(max_running_requests=1, context_length=64)
        written = engine_client.with_engine(use, config, tiny_target, tiny_draft)
        assert len(written) == 4 and not fails and emptied == [[], [False]]
    except RuntimeError as error:
        assert str(error) == "after 4 tokens" and fails and len(emptied) == 2
    finally:
        gc.enable()
