"""What an engine launches at its start leaves no trace."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine.engine import Engine
from toolkit.infer.engine.first_launches import sizes_up_to
from toolkit.infer.graphs.recordings import GraphSettings
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

ROWS = 3


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("none", None, {}),
        ("eagle3", "3,1,4", {}),
        ("eagle3", "3,3,8", {"graphs": GraphSettings(ROWS, lambda run: run)}),
        ("mtp-three-layers", "3,1,4", {"graphs": GraphSettings(ROWS, lambda run: run)}),
        ("ngram", "3,1,4", {}),
        ("eagle3", "4,3,12", {"adaptive": True}),
    ],
)
def test_answers_are_those_of_an_engine_without_it(small_target, build, name, shape, options):
    """It runs on padding rows: a row's state, its unread positions or a page that it wrote would change a draft, or a
    token."""
    prompts = [torch.randint(1, 24, (length,)).tolist() for length in (5, 40, 2, 17, 9)]
    params = [SamplingParams(max_tokens=20, temperature=i % 2 * 0.8, seed=i, ignore_eos=True) for i in range(5)]
    found = []
    for warm in (False, True):
        engine = Engine(
            small_target, None if shape is None else build(name), None if shape is None else DraftShape.parse(shape),
            max_running_requests=ROWS, memory=MemorySettings(chunked_prefill_size=16), **options,
        )  # fmt: skip
        if warm:
            engine.first_launches.run(engine.drafter, engine.shape)
            engine.check_integrity()
        requests = engine.generate(prompts, params)
        timed = "adaptive" in options  # what it drafts depends on the clock
        accepted = [None if timed else [event.accepted for event in one.events] for one in requests]
        found.append(([one.output_ids for one in requests], accepted))
        engine.check_integrity()
        engine.close()
    assert found[0] == found[1]


def test_sizes_reach_every_power_of_two():
    """Kernels have a variant for each next power of two of a size times a number of heads."""
    for heads in (1, 3, 4, 7):
        for most in (1, 2, 16, 33, 200):
            powers = {(size * heads - 1).bit_length() for size in range(1, most + 1)}
            assert {(size * heads - 1).bit_length() for size in sizes_up_to(most)} >= powers
