"""The table: every head, chain and tree, one request and a ragged sixteen, greedy in fp32: the target's own tokens."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

HEADS = ["eagle3", "eagle2", "eagle2-two-layers", "mtp", "mtp-three-layers", "mtp-hidden-first", "ngram"]
LENGTHS = [5, 9, 1, 17, 3, 30, 2, 12, 21, 4, 8, 26, 6, 14, 11, 19]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", HEADS)
def test_greedy_tokens_are_the_targets(small_target, build, reference, name, batch):
    """A position, a mask or a cache place that is off by one in any of them changes tokens; drafts have to be accepted,
    else nothing but roots was looked at."""
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(1, 24, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts = prompts if batch == 16 else prompts[:3]  # one after the other
    params = SamplingParams(max_tokens=24)
    wanted = [reference(small_target, prompt, 24) for prompt in prompts]
    for shape in ("4,1,5", "3,3,10"):
        engine = Engine(small_target, build(name), DraftShape.parse(shape), max_running_requests=batch)
        requests = engine.generate(prompts, params)
        engine.close()
        assert [request.output_ids for request in requests] == wanted
        events = [event for request in requests for event in request.events]
        assert max(event.batch for event in events) == batch and sum(event.accepted for event in events) > 0
