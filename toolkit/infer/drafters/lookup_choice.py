"""Choose in every round how deep lookup drafts, and whether the head drafts too (`composed_drafter.py`).

    tokens per second of a row = harmonic mean over the rows of max(lookup's expected accept_length, the head's)
                                 / seconds of the round

The harmonic mean, because it is the time of a token that counts: rows without a match wait for a round with more nodes,
and rows that get ahead leave a batch that is not full. Closed batches of 16 rows took 5 % longer than plain decoding
with the mean, up to 7 % with the median.

The head's shape is the one that adaptive drafting has just chosen, or None. Lookup's expected lengths differ in every
round, because the matches do; they are learned from every token, so lookup needs no probes. Its costs are those of
verifying its nodes (step_costs.py). Where depth 1 seems not to pay, it runs once in RETRY rounds that search the texts,
so that one slow round does not end lookup; deeper drafts follow when a shallower one has been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.infer.drafters.step_costs import Arm, LookupArm, Shape, StepCosts

DEPTHS = (1, 2, 3, 4, 6, 8, 11, 15)
RETRY, RETRY_LENGTH = 128, 1.4  # rounds between retries of depth 1, and the expected accept_length that allows one


Lengths = Sequence[Sequence[float]]  # by row, the expected accept_length by depth from 0


class LookupChoice:
    """Compares lookup's drafts with the choice for the head."""

    def __init__(self) -> None:
        self._rounds, self._last = 0, -RETRY

    def choose(
        self,
        lookup: Lengths,
        shape: Shape,
        head: Sequence[float],
        costs: StepCosts,
        margin: float,
    ) -> tuple[list[int], LookupArm] | None:
        """Returns the depth of lookup by row (0: none) and the round to run; None: draft `shape` in all rows.

        lookup: expected accept_length of lookup's drafts. head: by row, that of `shape`. margin: the least factor by
        which drafting must be faster than plain decoding.
        """
        self._rounds += 1
        if all(len(one) == 1 for one in lookup):
            return None
        batch, deepest = len(lookup), max(map(len, lookup)) - 1
        shapes: list[Shape] = [None, *([] if shape is None else [shape])]
        rounds = {LookupArm(one, depth): depth for one in shapes for depth in DEPTHS if depth <= deepest}
        arms: list[Arm] = [None, shape, *rounds]
        known = costs.all(batch, arms)
        current = _mean(head) / known[shape] if shape in known else 0.0
        floor = max(current, margin / known[None])
        speeds = {
            arm: _mean(_lengths(lookup, rounds[arm], head if arm.shape else None)) / seconds
            for arm, seconds in known.items()
            if isinstance(arm, LookupArm)
        }
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] <= floor:
            least = LookupArm(None, 1)
            due = self._rounds - self._last >= RETRY and _mean(_lengths(lookup, 1, None)) >= RETRY_LENGTH
            if not due:
                return None
            best = least
        self._last = self._rounds
        depth = rounds[best]
        mine = _lengths(lookup, depth, None)
        theirs = head if best.shape else [1.0] * batch
        depths = [min(depth, len(one) - 1) if a > b else 0 for one, a, b in zip(lookup, mine, theirs, strict=True)]
        if not any(depths):
            return None
        # Without a row for the head, the round is one of lookup alone: its time says nothing of the head.
        left = best.shape is not None and any(b > 1 for own, b in zip(depths, theirs, strict=True) if own == 0)
        return depths, LookupArm(best.shape if left else None, max(depths))


def _mean(lengths: Sequence[float]) -> float:
    """Returns the harmonic mean; statistics.harmonic_mean takes ten times as long."""
    return len(lengths) / sum(1 / one for one in lengths)


def _lengths(lookup: Lengths, depth: int, head: Sequence[float] | None) -> list[float]:
    """Returns the expected accept_length of each row if lookup drafts `depth` tokens and the head the other rows."""
    mine = [one[min(depth, len(one) - 1)] for one in lookup]
    return mine if head is None else [max(pair) for pair in zip(mine, head, strict=True)]
