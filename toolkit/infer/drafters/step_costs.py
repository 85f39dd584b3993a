"""What a round costs, by what is drafted in it and for how many rows: measured, and guessed where it is not yet.

What drafts cost is kept beside what plain rounds cost at that time, where some ran shortly before: on a machine that is
busy now and free a moment later, only the two of one time can be compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from toolkit.infer.request.draft_tree import DraftShape

Arm = DraftShape | None  # what a round may draft; None: nothing, a plain step
WINDOW = 9  # rounds remembered of each kind
LEVEL_GUESS = 0.1  # of a plain round, for drafting a level, before any was


class Seconds:
    """The last rounds of one kind, in two parts: drafting, and all that follows it."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float, float | None]] = deque(maxlen=WINDOW)
        self._known: tuple[float | None, tuple[float, float]] | None = None  # the last answer; None: rounds came since

    def add(self, draft: float, verify: float, plain: float | None = None) -> None:
        """plain: what a plain round takes at that time; None: nothing says so."""
        self._rounds.append((draft, verify, plain))
        self._known = None

    def parts(self, plain: float | None = None) -> tuple[float, float]:
        """Seconds of a typical round: drafting, and the rest; where a plain one's rest takes `plain` by now."""
        if self._known is None or self._known[0] != plain:
            factors = [plain / then if plain and then else 1.0 for _, _, then in self._rounds]
            draft = _typical([draft * by for (draft, _, _), by in zip(self._rounds, factors, strict=True)])
            verify = _typical([verify * by for (_, verify, _), by in zip(self._rounds, factors, strict=True)])
            self._known = (plain, (draft, verify))
        return self._known[1]


class StepCosts:
    """Seconds by arm and size of batch; sizes up to the next power of two count as one."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[Arm, Seconds]] = {}
        self._since_plain: dict[int, int] = {}  # rounds with so many rows

    def add(self, batch: int, arm: Arm, draft: float, verify: float) -> None:
        size = _bucket(batch)
        seen = self._seen.setdefault(size, {})
        if arm is None:
            self._since_plain[size] = 0
            seen.setdefault(None, Seconds()).add(draft, verify)
        else:
            self._since_plain[size] = since = self._since_plain.get(size, WINDOW) + 1
            seen.setdefault(arm, Seconds()).add(draft, verify, _plain(seen) if since < WINDOW else None)

    def all(self, batch: int, arms: Sequence[Arm]) -> dict[Arm, float]:
        """Seconds of a round for those arms that are not much larger than what ran with so many rows: of twice its
        nodes, or the next larger one where arms lie further apart."""
        run = max(map(_nodes, self._seen.get(_bucket(batch), {None: None})))
        reach = max(2 * run, min((n for n in map(_nodes, arms) if n > run), default=run))
        return {arm: self.seconds(batch, arm) for arm in arms if _nodes(arm) <= reach}

    def seconds(self, batch: int, arm: Arm) -> float:
        """Of one round: measured, or guessed from what was. A plain round must have been measured."""
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
                ratios = [sum(_parts(here, one)) / sum(_parts(there, one)) for one in both]
                return found * (sum(ratios) / len(ratios) if ratios else 1.0)
        assert arm is not None, "no plain round was measured"
        # Nothing was ever drafted: the most that verifying takes.
        plain = self.seconds(batch, None)
        return plain * (_nodes(arm) + LEVEL_GUESS * arm.num_steps)


def _of_one_size(seen: dict[Arm, Seconds], arm: Arm) -> float | None:
    """Measured, else in proportion to a shape that was: drafting by its levels, verifying by nodes beyond the root.

    More nodes are never verified faster: on a noisy machine a useless draft must not look free. Nor do n nodes take
    longer than n plain rounds: one round that something held up must not end drafting.
    """
    plain = _plain(seen)
    if arm in seen:
        draft, verify = _parts(seen, arm)
        if plain is not None and arm is not None:
            verify = min(max(verify, plain), _nodes(arm) * plain)
            draft = min(draft, arm.num_steps * plain)
        return draft + verify
    shapes = [one for one in seen if one is not None]
    if arm is None or plain is None or not shapes:
        return None
    like = min(shapes, key=lambda one: abs(one.num_draft_tokens - arm.num_draft_tokens))
    draft, verify = _parts(seen, like)
    extra = min(max(0.0, verify - plain), (_nodes(like) - 1) * plain)
    more = (_nodes(arm) - 1) / (_nodes(like) - 1)
    return draft * arm.num_steps / like.num_steps + plain + extra * more


def _parts(seen: dict[Arm, Seconds], arm: Arm) -> tuple[float, float]:
    return seen[arm].parts(None if arm is None else _plain(seen))


def _plain(seen: dict[Arm, Seconds]) -> float | None:
    """Seconds of a plain round, without what comes before its forward; None: none was measured."""
    return seen[None].parts()[1] if None in seen else None


def _nodes(arm: Arm) -> int:
    """Verified, root included."""
    return 1 if arm is None else arm.num_draft_tokens


def _typical(seconds: Sequence[float]) -> float:
    """The lower median: a machine that is busy for a moment makes a round slower, never faster."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


def _bucket(batch: int) -> int:
    """1, 2, 3-4, 5-8, ... rows."""
    return (batch - 1).bit_length()
