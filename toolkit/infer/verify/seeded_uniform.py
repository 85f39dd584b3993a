"""Uniform random numbers without state: pure functions of seed and position, the same on every device.

There are two kinds. The target's draw depends on (seed, position) only, so a plain and a speculative run share it. The
other numbers of a round of drafting and verification must be new in every round, also at a position that an earlier
round drafted and rejected. Block verification uses all drafts of a round to decide how many it keeps, so the rejected
drafts depend on the committed tokens. The same draws in a later round would bias the distribution:

    round 1   root x0    drafts a b c     one kept: x0 a y
    round 2   root y            . d e     d has the position of c, and must be independent of c
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

GOLDEN = -7046029254386353131


class Stream(IntEnum):
    """The use of a number of one round. The values are arbitrary 64-bit numbers."""

    DRAFT = 0x5851F42D4C957F2D  # draws a draft token
    COIN = 0x14057B7EF767814F  # decides whether a draft is accepted


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns SplitMix64 (Steele et al., OOPSLA 2014) of (seed, position): int64 of one shape -> float64 in [0, 1)."""
    x = _mix(seeds) + positions * GOLDEN
    return _shift(_mix(x), 11).double() * 2.0**-53


def round_uniform(seeds: Tensor, roots: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Returns uniform numbers of (seed, stream, round, position), float64 in [0, 1). int64 tensors that broadcast.

    roots: index in the sequence of the first token that the round chooses. It identifies the round.
    """
    return uniform(_mix(_mix(seeds ^ stream) + roots * GOLDEN), positions)


def _mix(x: Tensor) -> Tensor:
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Returns the logical right shift of int64 (the shift of torch keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
