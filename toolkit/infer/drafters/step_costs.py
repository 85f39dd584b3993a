"""What a round costs, by what is drafted in it and for how many rows: measured, and guessed where it is not yet."""

from __future__ import annotations

from collections import deque

from toolkit.infer.draft_tree import DraftShape

Arm = DraftShape | None  # what a round may draft; None: nothing, a plain step
WINDOW = 9  # rounds remembered of each kind


class Seconds:
    """The last rounds of one kind, in two parts: drafting, and all that follows it."""

    def __init__(self) -> None:
        self._rounds: tuple[deque[float], deque[float]] = (deque(maxlen=WINDOW), deque(maxlen=WINDOW))
        self.draft = self.verify = 0.0

    def add(self, draft: float, verify: float) -> None:
        for seen, seconds in zip(self._rounds, (draft, verify), strict=True):
            seen.append(seconds)
        self.draft, self.verify = map(_typical, self._rounds)

    @property
    def total(self) -> float:
        return self.draft + self.verify


class StepCosts:
    """Seconds by arm and size of batch; sizes up to the next power of two count as one."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[Arm, Seconds]] = {}

    def add(self, batch: int, arm: Arm, draft: float, verify: float) -> None:
        self._seen.setdefault(_bucket(batch), {}).setdefault(arm, Seconds()).add(draft, verify)

    def seconds(self, batch: int, arm: Arm) -> float | None:
        """Of one round. None as long as there is nothing to guess from: a plain round and a drafted one are."""
        wanted = _bucket(batch)
        here = self._seen.get(wanted, {})
        found = _of_one_size(here, arm)
        if found is not None:
            return found
        for size in sorted(self._seen, key=lambda size: abs(size - wanted)):
            there = self._seen[size]
            found = _of_one_size(there, arm)
            if found is not None:
                both = here.keys() & there.keys()
                return found * (sum(here[one].total / there[one].total for one in both) / len(both) if both else 1.0)
        return None


def _of_one_size(seen: dict[Arm, Seconds], arm: Arm) -> float | None:
    """Measured, else in proportion to a shape that was: drafting by its levels, verifying by nodes beyond the root.

    More nodes are never verified faster: on a noisy machine a useless draft must not look free.
    """
    plain = seen.get(None)
    if arm in seen:
        return seen[arm].draft + max(seen[arm].verify, 0.0 if plain is None else plain.verify)
    shapes = [one for one in seen if one is not None]
    if arm is None or plain is None or not shapes:
        return None
    like = min(shapes, key=lambda one: abs(one.num_draft_tokens - arm.num_draft_tokens))
    extra = max(0.0, seen[like].verify - plain.verify)
    more = (arm.num_draft_tokens - 1) / (like.num_draft_tokens - 1)
    return seen[like].draft * arm.num_steps / like.num_steps + plain.verify + extra * more


def _typical(seconds: deque[float]) -> float:
    """The lower median: a machine that is busy for a moment makes a round slower, never faster."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


def _bucket(batch: int) -> int:
    """1, 2, 3-4, 5-8, ... rows."""
    return (batch - 1).bit_length()
