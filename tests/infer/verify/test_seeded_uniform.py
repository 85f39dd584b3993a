"""The hash behind every draw."""

from __future__ import annotations

import torch

from toolkit.infer.verify.seeded_uniform import Stream, round_uniform, uniform

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
