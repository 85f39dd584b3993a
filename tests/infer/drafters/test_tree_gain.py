"""What a tree is for: with as many verified nodes it commits more than a chain."""

from __future__ import annotations

import pytest
import torch

from tests.train.conftest import answered
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.step import TrainedHead, micro_step, supervised_counts
from toolkit.train.target_side import TargetSide

STEPS = 3


def sampled(seed: int, count: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, 24, (6,), generator=generator).tolist() for _ in range(count)]
    return prompts, [
        SamplingParams(max_tokens=tokens, temperature=0.5, seed=seed + i, ignore_eos=True) for i in range(count)
    ]


@pytest.fixture(scope="module")
def trained_draft(small_target, small_draft) -> DraftCheckpoint:
    """A head that has learnt the small target's distribution from what it wrote at temperature 0.5."""
    token_map = TokenMap.from_ids(range(24), 24)
    torch.manual_seed(5)
    head = Eagle3Head(Eagle3Config.from_dict({**small_draft.head.config.to_dict(), "draft_vocab_size": 24}))
    prompts, params = sampled(0, 96, 48)
    engine = Engine(small_target, max_running_requests=96)
    answers = [request.output_ids for request in engine.generate(prompts, params)]
    engine.close()
    model, side = TrainedHead(head, 0.8), TargetSide(small_target, token_map, (1, 2, 3), "fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        some = slice(step * 16 % 96, step * 16 % 96 + 16)
        batch = answered(prompts[some], answers[some])
        loss, *_ = micro_step(model, side, batch, supervised_counts(batch, STEPS), STEPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    side.capture.remove()
    return DraftCheckpoint(head=head.eval().requires_grad_(False), token_map=token_map)


@pytest.mark.slow
def test_a_tree_commits_more_than_a_chain_of_as_many_nodes(small_target, trained_draft):
    """Eight verified nodes either way, drawn at temperature 0.5 from prompts that were not trained on.

    Measured: 0.48 accepted drafts a step against 0.21, with a standard error of 0.02 over 1,700 steps and more, so a
    false alarm has a probability below 1e-30.
    """
    prompts, params = sampled(1000, 64, 40)
    accepted = []
    for shape in ("7,1,8", "3,4,8"):
        engine = Engine(small_target, trained_draft, DraftShape.parse(shape), max_running_requests=64)
        requests = engine.generate(prompts, params)
        engine.close()
        accepted.append([float(e.accepted) for one in requests for e in one.events if not e.truncated])
    chain, tree = map(torch.tensor, accepted)
    assert tree.mean() > chain.mean() > 0.1
