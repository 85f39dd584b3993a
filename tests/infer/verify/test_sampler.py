"""The tokens of mixed batches, and the law of what an engine that follows the target's draws writes."""

from __future__ import annotations

import math

import pytest
import torch

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape, chain_tree
from toolkit.infer.request.errors import SamplingError
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.infer.verify.sampler import Sampler, greedy


def choose(params: list[SamplingParams], logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The sampler over nodes that stand alone, for requests without an answer yet."""
    requests = [Request("r", [1], one) for one in params]
    nodes = torch.zeros_like(positions)
    tree = chain_tree(nodes[:, 0], nodes[:, 1:], [True] * len(params))
    return Sampler(requests, logits.shape[-1], torch.device("cpu"))(logits, positions, tree).tokens


def test_greedy_rows_beside_drawn_ones():
    """Rows keep their places, and temperature 0 takes the lowest id among equals."""
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0)).round()
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams()]
    positions = torch.tensor([[4, 5], [4, 5], [6, 7]])
    mixed = choose(params, logits, positions)
    alone = choose(params[1:2], logits[1:2], positions[1:2])
    assert torch.equal(mixed[[0, 2]], greedy(logits[[0, 2]])) and torch.equal(mixed[1:2], alone)
    assert greedy(torch.zeros(1, 1, 9)).item() == 0


def test_settings_outside_their_range_are_refused():
    """A server passes a client's numbers on."""
    for wrong in (
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_tokens": 0},
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.nan},
        {"repetition_penalty": 1e-40},
        {"temperature": 1e-40},
        {"logit_bias": {3: 1e308}},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -3},
        {"logit_bias": {3: math.inf}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": [(3, 1.0), (3, 2.0)]},
        {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"stop": ["a", ""]},
        {"logprobs": 21},
        {"logprobs": -1},
    ):
        with pytest.raises(SamplingError, match=next(iter(wrong))) as caught:
            SamplingParams(**wrong)
        assert caught.value.field == next(iter(wrong))
    with pytest.raises(SamplingError, match="seed"):
        SamplingParams(seed=2**64)


def test_law_of_sampled_continuations(small_target, small_draft):
    """G-test of two-token continuations over 3000 seeds, drafted by a tree, against the exact law of the target.

    Seeds are fixed, so the outcome is too; were they fresh, chance alone would fail this once in 1e5 runs.
    """
    prompt, runs, temperature = [3, 4, 5], 3000, 1.5
    model = small_target.model
    first = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)
    nexts = torch.softmax(
        model(input_ids=torch.tensor([[*prompt, t] for t in range(24)])).logits[:, -1].double() / temperature, -1
    )
    law = (first[:, None] * nexts).flatten()
    engine = Engine(small_target, small_draft, DraftShape.parse("2,4,12"), max_running_requests=64)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=3, ignore_eos=True) for i in range(runs)]
    counts = torch.zeros(24 * 24, dtype=torch.float64)
    accepted = 0
    for request in engine.generate([prompt] * runs, params):
        counts[request.output_ids[0] * 24 + request.output_ids[1]] += 1
        accepted += request.token_from_draft[1]
    engine.close()
    assert accepted > runs / 20  # the second token was often a draft, or the test would say nothing
    common = law * runs >= 5
    seen = torch.cat((counts[common], counts[~common].sum()[None]))
    wanted = torch.cat((law[common], law[~common].sum()[None])) * runs
    g = 2 * torch.where(seen > 0, seen * (seen / wanted).log(), 0.0).sum().item()
    freedom = len(seen) - 1
    # Wilson-Hilferty: the chi-square quantile at 1 - 1e-5 (z = 4.265).
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    assert g < limit, f"G = {g:.1f} over {freedom} degrees of freedom, limit {limit:.1f}"
