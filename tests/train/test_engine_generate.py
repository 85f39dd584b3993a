"""`generate` with the engine: it yields each request once, as soon as it ends, and keeps the batch full."""

from __future__ import annotations

import pytest

from toolkit.data.generation import GenerationRequest
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.target import Target
from toolkit.train.engine_generate import engine_generate


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
