"""Rounds with another number of threads: the same tokens, with drafts and without."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.thread_limit import ThreadLimit

PROMPTS = [[3, 7, 11, 2, 9], [5, 1, 8], [13, 2, 2, 6, 17, 21, 4]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def changing_limit(engine: Engine) -> list[int]:
    """Let the engine's threads go from 2 to 1 and back every few rounds; returns the numbers of threads as it runs."""
    seen: list[int] = []
    clock = itertools.count()
    load = itertools.accumulate(itertools.cycle([0.0] * 6 + [1.0] * 6))
    engine._limited = ThreadLimit(2, lambda: next(load), lambda: 0.2 * next(clock)).limited
    step = engine._schedule

    def schedule() -> list:
        seen.append(torch.get_num_threads())
        return step()

    engine._schedule = schedule  # type: ignore[method-assign]
    return seen


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_threads(small_target, small_draft):
    parts = (small_draft, DraftShape.parse("4,4,16"))
    wanted = Engine(small_target, *parts).generate(PROMPTS, PARAMS, speculative=False)
    engine = Engine(small_target, *parts, adaptive=True)
    seen = changing_limit(engine)
    got = engine.generate(PROMPTS, PARAMS)
    engine.close()
    assert [one.output_ids for one in got] == [one.output_ids for one in wanted]
    assert {1, 2} == set(seen) and torch.get_num_threads() == 2
