"""Draws and probabilities against a brute-force definition of the sampling settings, and the hash of every draw."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from toolkit.infer.cpu import sampling
from toolkit.infer.kernels import dispatch
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify.token_distribution import RowDistributions, draw_from, uniform

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["torch", "native", "no compiler"])
def ops(request, monkeypatch):
    """Every test runs on plain torch, on the C++ that an engine on a CPU installs, and on what it does without."""
    native = {} if request.param == "torch" else {"least_kept": sampling.least_kept}
    if request.param == "no compiler":
        monkeypatch.setattr(sampling, "load_library", lambda: None)
    monkeypatch.setitem(dispatch._chosen, "cpu", replace(dispatch.REFERENCE, **native))


def filtered(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The distribution after top-k, top-p and min-p by plain sorting, in float64."""
    probs = torch.softmax(logits.double(), dim=-1)
    if top_k:
        probs[probs < probs.sort(descending=True).values[min(top_k, len(probs)) - 1]] = 0
        probs /= probs.sum()
    if top_p < 1:
        ordered = probs.sort(descending=True).values
        probs[probs < ordered[int((ordered.cumsum(0) < top_p).sum())]] = 0
        probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


def distributions_of(rows: int, top_k: int, top_p: float, min_p: float) -> RowDistributions:
    settings = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return RowDistributions.of([SamplingParams(temperature=1.0, seed=0, **settings)] * rows, CPU)


def probs_of(logits: torch.Tensor, *settings: float) -> torch.Tensor:
    """Probabilities [M, V] with one setting for all rows."""
    return distributions_of(len(logits), *settings).probs(logits[:, None])[:, 0]


@pytest.mark.parametrize(
    "settings",
    [(0, 1.0, 0.0), (5, 1.0, 0.5), (0, 0.7, 0.0), (2000, 1.0, 0.0), (300, 0.99, 0.01)],
)
@pytest.mark.parametrize("spread", [0.3, 3.0, 11.0])
def test_probabilities_and_draws_equal_brute_force(settings, spread):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(12, 1500, generator=generator) * spread
    u = torch.rand(12, generator=generator, dtype=torch.float64)
    probs = probs_of(logits, *settings)
    drawn = draw_from(probs, u)
    for row in range(12):
        wanted = filtered(logits[row], *settings)
        assert torch.equal(probs[row] > 0, wanted.float() > 0)
        assert torch.allclose(probs[row].double(), wanted, atol=1e-6)
        sums = wanted.cumsum(0)
        assert drawn[row].item() == int((sums <= u[row] * sums[-1]).sum())


def test_a_share_that_the_best_tokens_have_exactly_keeps_no_more():
    """Rounding decides on which side of top-p their sum falls: never may the whole tail be kept."""
    generator = torch.Generator().manual_seed(1)
    for head in range(1, 20):
        best, rest = (torch.rand(100, many, generator=generator, dtype=torch.float64) + 1 for many in (head, 2000))
        best, rest = best * (0.9 / best.sum(dim=1, keepdim=True)), rest * (0.1 / rest.sum(dim=1, keepdim=True))
        kept = (probs_of(torch.cat((best, rest), dim=1).log().float(), 0, 0.9, 0.0) > 0).sum(dim=1)
        assert kept.min() >= head and kept.max() <= head + 2


def test_tokens_equal_to_the_last_kept_are_kept():
    """With ties the kept set does not depend on how a sort breaks them."""
    for settings in ((3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 1.0)):
        assert (probs_of(torch.zeros(2, 300), *settings) > 0).all()


@pytest.mark.parametrize(("size", "first"), [(700, 300), (1700, 1300)])
def test_impossible_tokens_are_never_drawn(size, first):
    """u = 0 and u just below 1 at distributions with zeros at both ends, in one piece and over several blocks."""
    logits = torch.full((2, size), -torch.inf)
    logits[:, first : first + 10] = 0.0
    u = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for settings in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.99, 0.0), (0, 1.0, 0.1)):
        assert draw_from(probs_of(logits, *settings), u).tolist() == [first, first + 9]


def test_a_row_has_its_own_distribution_and_draws_whatever_stands_beside_it():
    """Else a seed's text would depend on what else runs: rows that cut nothing, and rows that cut in another
    place. There are more nodes than a CPU draws at once."""
    logits = torch.randn(4, 9, 3000, generator=torch.Generator().manual_seed(5))
    logits[2] *= 6
    settings = ({}, {"top_p": 0.9}, {"top_p": 0.9, "temperature": 0.5}, {"top_k": 40, "top_p": 0.5, "min_p": 0.01})
    params = [SamplingParams(**{"temperature": 1.0, "seed": i, **one}) for i, one in enumerate(settings)]
    positions = torch.arange(7, 11)[:, None] + torch.arange(9)
    together = RowDistributions.of(params, CPU)
    for row, one in enumerate(params):
        alone, here = RowDistributions.of([one], CPU), slice(row, row + 1)
        wanted = filtered(logits[row, 1] / one.temperature, one.top_k, one.top_p, one.min_p)
        assert torch.allclose(together.probs(logits)[row, 1].double(), wanted, atol=1e-6)
        for same in (alone, together.part(here)):
            assert torch.equal(same.draw(logits[here], positions[here]), together.draw(logits, positions)[here])


MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """SplitMix64's output function as its authors print it."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_uniform_is_splitmix64():
    """The same numbers in any torch build and on any device; negative seeds included."""
    for seed in (0, -5, 2**63 - 1):
        for position in (0, 77):
            wanted = splitmix((splitmix(seed & MASK) + position * 0x9E3779B97F4A7C15) & MASK) >> 11
            assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == wanted * 2.0**-53
