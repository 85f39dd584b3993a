"""Random numbers as pure functions of where they are used: no state, the same on every device.

Two kinds. The target's own draw depends on (seed, position) alone, so that a plain and a speculative run share it. What
a round of drafting and verifying needs beside it must be new in every round, also at a position that an earlier round
drafted and did not reach: block verification looks at all drafts of a round before it says how many it keeps, so drafts
that it did not keep say something about the tokens that it did commit. Drawn again, they would bend the law:

    round 1   root x0    drafts a b c     one kept: x0 a y
    round 2   root y            . d e     d stands where c stood, and has to be independent of c
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

GOLDEN = -7046029254386353131


class Stream(IntEnum):
    """What a number that belongs to one round is used for; the values are arbitrary 64-bit numbers."""

    DRAFT = 0x5851F42D4C957F2D  # drawing a draft token
    COIN = 0x14057B7EF767814F  # accepting it


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """SplitMix64 (Steele et al., OOPSLA 2014) of (seed, position): int64 tensors of one shape -> float64 in [0, 1)."""
    x = _mix(seeds) + positions * GOLDEN
    return _shift(_mix(x), 11).double() * 2.0**-53


def round_uniform(seeds: Tensor, roots: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Likewise of (seed, stream, round, position). roots: index in the sequence of the first token the round chooses,
    which no other round has; int64 tensors that broadcast."""
    return uniform(_mix(_mix(seeds ^ stream) + roots * GOLDEN), positions)


def _mix(x: Tensor) -> Tensor:
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64 (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
