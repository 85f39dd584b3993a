"""What an engine launches at its start leaves no trace."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

ROWS = 3


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("none", None, {}),
        ("mtp-three-layers", "3,1,4", {"capture": lambda run: (run(), run)[1]}),
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
            max_running_requests=ROWS, chunked_prefill_size=16, **options,
        )  # fmt: skip
        if warm:
            engine.warm_up()
            engine.check_integrity()
        requests = engine.generate(prompts, params)
        timed = "adaptive" in options  # what it drafts depends on the clock
        accepted = [None if timed else [event.accepted for event in one.events] for one in requests]
        found.append(([one.output_ids for one in requests], accepted))
        engine.check_integrity()
        engine.close()
    assert found[0] == found[1]
