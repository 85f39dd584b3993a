"""Draws: the hash, the filters, and the law."""

from __future__ import annotations

import math

import pytest
import torch

from toolkit.infer.draft_tree import DraftShape, chain_tree
from toolkit.infer.engine import Engine
from toolkit.infer.errors import SamplingError
from toolkit.infer.request import Request
from toolkit.infer.sampler import Sampler, draw, greedy, uniform
from toolkit.infer.sampling_params import SamplingParams

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """SplitMix64's output function as its authors print it."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def filtered(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The law after top-k, top-p and min-p by plain sorting, in float64."""
    law = torch.softmax(logits.double(), dim=-1)
    if top_k:
        law[law < law.sort(descending=True).values[min(top_k, len(law)) - 1]] = 0
        law /= law.sum()
    if top_p < 1:
        ordered = law.sort(descending=True).values
        law[law < ordered[int((ordered.cumsum(0) < top_p).sum())]] = 0
        law /= law.sum()
    law[law < min_p * law.max()] = 0
    return law / law.sum()


def drawn_with(logits: torch.Tensor, top_k: int, top_p: float, min_p: float, u: torch.Tensor) -> torch.Tensor:
    """`draw` with one setting for all rows."""
    rows = len(logits)
    floor = torch.full((rows,), min_p)
    return draw(logits, torch.full((rows,), top_k), torch.full((rows,), top_p, dtype=torch.float64), floor, u)


def test_uniform_is_splitmix64():
    """The same numbers in any torch build and on any device; negative seeds included."""
    for seed in (0, 1, -5, 2**63 - 1):
        for position in (0, 1, 77):
            wanted = splitmix((splitmix(seed & MASK) + position * 0x9E3779B97F4A7C15) & MASK) >> 11
            assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == wanted * 2.0**-53


def test_uniform_is_uniform():
    """200k draws over neighbouring seeds and positions; a chi-square over 64 cells above 141.5 has p < 1e-7."""
    seeds = torch.arange(400)[:, None].expand(400, 500)
    u = uniform(seeds, torch.arange(500).expand(400, 500)).flatten()
    counts = torch.histc(u.float(), 64, 0, 1)
    assert ((counts - 3125) ** 2 / 3125).sum() < 141.5


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (9, 0.6, 0.0), (0, 0.9999, 0.0), (300, 0.99, 0.0),
        (2000, 1.0, 0.0), (0, 1.0, 0.2), (0, 1.0, 0.001), (5, 1.0, 0.5), (0, 0.7, 0.3), (0, 0.999, 0.05),
        (300, 0.99, 0.01), (900, 1.0, 0.4), (0, 1.0, 1.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_draw_equals_brute_force(top_k, top_p, min_p, spread):
    """Flat laws need the wide passes, peaked ones the narrow: all must equal sorting the whole vocabulary."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(24, 1500, generator=generator) * spread
    u = torch.rand(24, generator=generator, dtype=torch.float64)
    drawn = drawn_with(logits, top_k, top_p, min_p, u)
    for row in range(24):
        sums = filtered(logits[row], top_k, top_p, min_p).cumsum(0)
        assert drawn[row].item() == int((sums <= u[row] * sums[-1]).sum())


def test_tokens_equal_to_the_last_kept_are_kept():
    """With ties the kept set does not depend on how a sort breaks them."""
    u = torch.linspace(0, 1 - 1e-9, 64, dtype=torch.float64)
    for k, p, floor in ((3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 1.0)):
        assert drawn_with(torch.zeros(64, 300), k, p, floor, u).tolist() == (u * 300).long().tolist()


def test_impossible_tokens_are_never_drawn():
    """u = 0 and u just below 1 at laws with zeros at both ends, over several blocks."""
    logits = torch.full((2, 700), -torch.inf)
    logits[:, 300:310] = 0.0
    u = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for k, p, floor in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.99, 0.0), (0, 1.0, 0.1)):
        assert drawn_with(logits, k, p, floor, u).tolist() == [300, 309]


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
    engine = Engine(small_target, small_draft, DraftShape.parse("2,4,12"), max_batch=64)
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
