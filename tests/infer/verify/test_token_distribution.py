"""Draws and probabilities against a brute-force definition of the sampling settings, and the hash of every draw."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify.token_distribution import (
    RowDistributions,
    Stream,
    draw_from,
    round_uniform,
    uniform,
    weights_left,
    widths_for,
)


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


def columns(settings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top_k, top_p, min_p = zip(*settings, strict=True)
    return torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p, dtype=torch.float32)


def drawn_with(logits: torch.Tensor, top_k: int, top_p: float, min_p: float, u: torch.Tensor) -> torch.Tensor:
    """Draws with one setting for all rows. A GPU looks at as many tokens, and finds the same ones left."""
    rows, size = logits.shape
    settings = columns([(top_k, top_p, min_p)] * rows)
    lazy, at_once = (
        weights_left(logits, *settings, widths_for(size, top_k, top_p < 1 and not top_k, torch.device(name)))
        for name in ("cpu", "cuda")
    )
    assert torch.equal(lazy, at_once)
    return draw_from(lazy, u)


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
    """Flat distributions need the wide passes, peaked ones the narrow: all must equal sorting the whole vocabulary."""
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
    """u = 0 and u just below 1 at distributions with zeros at both ends, in one piece and over several blocks."""
    for size, first in ((700, 300), (1700, 1300)):
        never_outside(size, first)


def never_outside(size: int, first: int) -> None:
    logits = torch.full((2, size), -torch.inf)
    logits[:, first : first + 10] = 0.0
    u = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for k, p, floor in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.99, 0.0), (0, 1.0, 0.1)):
        assert drawn_with(logits, k, p, floor, u).tolist() == [first, first + 9]


def test_distribution_equals_brute_force():
    """The verifiers' p and q: as `probs`, every setting must give the distribution that `draw` draws from."""
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(3)) * 2
    settings = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (300, 0.99, 0.0), (0, 1.0, 0.2), (0, 0.999, 0.05)]
    got = weights_left(logits, *columns(settings), widths_for(1500, 300, True, torch.device("cpu")))
    got = got / got.sum(dim=-1, keepdim=True)
    for row, setting in enumerate(settings):
        wanted = filtered(logits[row], *setting)
        assert torch.equal(got[row] > 0, wanted.float() > 0)
        assert torch.allclose(got[row].double(), wanted, atol=1e-6)
    assert torch.allclose(got.sum(dim=-1), torch.ones(6), atol=1e-5)


def test_a_rows_draw_does_not_depend_on_its_neighbours():
    """Else a seed's text would depend on what else runs: rows that cut nothing, and rows that need a wider look."""
    logits = torch.randn(4, 1, 3000, generator=torch.Generator().manual_seed(5))
    logits[2] *= 6
    params = [SamplingParams(temperature=1.0, seed=i, **more) for i, more in enumerate(
        ({}, {"top_p": 0.9}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.5, "min_p": 0.01})
    )]  # fmt: skip
    positions = torch.arange(7, 11)[:, None]
    together = RowDistributions(params, torch.device("cpu"))
    for row, one in enumerate(params):
        alone = RowDistributions([one], torch.device("cpu"))
        here = slice(row, row + 1)
        assert torch.equal(alone.probs(logits[here]) > 0, (together.probs(logits) > 0)[here])
        assert torch.equal(alone.draw(logits[here], positions[here]), together.draw(logits, positions)[here])


def test_every_request_has_its_own_distribution():
    """A batch of requests: the temperature and filters of one must not reach another's nodes."""
    params = [SamplingParams(temperature=0.5, top_k=3, seed=0), SamplingParams(temperature=2.0, seed=4)]
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(4))
    distributions = RowDistributions(params, torch.device("cpu"))
    got = distributions.probs(logits)
    for node in range(3):
        assert torch.allclose(got[0, node].double(), filtered(logits[0, node] / 0.5, 3, 1.0, 0.0), atol=1e-6)
        assert torch.allclose(got[1, node].double(), filtered(logits[1, node] / 2.0, 0, 1.0, 0.0), atol=1e-6)
    positions = torch.tensor([[5, 6, 7], [9, 10, 11]])
    again = draw_from(got.flatten(0, 1), distributions.target_uniform(positions).flatten()).view(2, 3)
    assert torch.equal(distributions.draw(logits, positions), again)


MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """SplitMix64's output function as its authors print it."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


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


def test_numbers_of_rounds_share_nothing():
    """Two rounds of two streams at two positions, and the target's own draws there: ten columns of 2000 seeds.

    A correlation of independent columns is normal with deviation 1 / sqrt(2000) = 0.0224; one of the 45 exceeds 0.125
    with probability 1e-6.
    """
    seeds = torch.arange(2000)[:, None]
    at = torch.tensor([[7, 8]])
    columns = [uniform(seeds.expand(-1, 2), at.expand(2000, -1))]
    for root in (6, 7):
        roots = torch.tensor([[root]])
        columns += [round_uniform(seeds, roots, at, stream) for stream in Stream]
    table = torch.cat(columns, dim=1)
    correlations = torch.corrcoef(table.T) - torch.eye(10)
    assert table.shape == (2000, 10) and correlations.abs().max() < 0.125
    assert 0 <= table.min() and table.max() < 1
