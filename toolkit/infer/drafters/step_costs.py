"""Seconds of a round by drafted shape and batch size: measured, or estimated if not measured yet.

The time of a drafting round is stored with the time of a plain round at that moment, if one ran shortly before. The
load of a machine changes, so only times of the same moment are comparable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from toolkit.infer.request.draft_tree import DraftShape


@dataclass(frozen=True)
class LookupArm:
    """A round in which lookup drafts up to `depth` tokens, and the head `shape` in the other rows (None: nothing)."""

    shape: DraftShape | None
    depth: int

    @property
    def num_steps(self) -> int:
        """Levels that the head drafts."""
        return 0 if self.shape is None else self.shape.num_steps

    @property
    def num_draft_tokens(self) -> int:
        """Verified nodes a row, root included."""
        return max(self.depth + 1, 0 if self.shape is None else self.shape.num_draft_tokens)


Shape = DraftShape | None  # the shape that the head drafts; None: a plain round
Arm = Shape | LookupArm
A = TypeVar("A", bound=Arm)
WINDOW = 9  # rounds kept per arm and batch size
LEVEL_GUESS = 0.1  # estimated time to draft one level, in plain rounds, before any was measured


class ArmTime(NamedTuple):
    """Measured seconds of a round: drafting, and from the end of drafting until the target's choices are known."""

    batch: int
    arm: Shape
    draft_s: float
    verify_s: float


class Seconds:
    """Times of the last WINDOW rounds of one arm, in two parts: drafting, and the rest of the round."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float, float | None]] = deque(maxlen=WINDOW)
        self._known: tuple[float | None, tuple[float, float]] | None = None  # cache of `parts`; None after `add`

    def add(self, draft: float, verify: float, plain: float | None = None) -> None:
        """Adds a round, in seconds. plain: time of a plain round at that moment; None if unknown."""
        self._rounds.append((draft, verify, plain))
        self._known = None

    def measured_beside(self, plain: float | None) -> None:
        """Gives rounds without a time of a plain round this one."""
        rounds = [(draft, verify, then or plain) for draft, verify, then in self._rounds]
        self._rounds, self._known = deque(rounds, maxlen=WINDOW), None

    def parts(self, plain: float | None = None) -> tuple[float, float]:
        """Returns the seconds of a typical round: drafting, and the rest.

        plain: the current time of a plain round without its draft part; it rescales the measured times.
        """
        if self._known is None or self._known[0] != plain:
            factors = [plain / then if plain and then else 1.0 for _, _, then in self._rounds]
            draft = _typical([draft * by for (draft, _, _), by in zip(self._rounds, factors, strict=True)])
            verify = _typical([verify * by for (_, verify, _), by in zip(self._rounds, factors, strict=True)])
            self._known = (plain, (draft, verify))
        return self._known[1]


class StepCosts:
    """Seconds of a round by arm and batch size. Batch sizes up to the next power of two share one entry."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[Arm, Seconds]] = {}
        self._since_plain: dict[int, int] = {}  # drafting rounds since the last plain one, by batch size

    def add(self, batch: int, arm: Arm, draft: float, verify: float) -> None:
        size = batch_bucket(batch)
        seen = self._seen.setdefault(size, {})
        if arm is None:
            self._since_plain[size] = 0
            seen.setdefault(None, Seconds()).add(draft, verify)
        else:
            self._since_plain[size] = since = self._since_plain.get(size, WINDOW) + 1
            seen.setdefault(arm, Seconds()).add(draft, verify, _plain(seen) if since < WINDOW else None)

    def forget_plain(self) -> None:
        """Forgets the times of plain rounds. Once measured again, they rescale the times of the drafting rounds.

        For a change that makes all rounds slower or faster, as that of the number of threads.
        """
        for size, seen in list(self._seen.items()):
            plain, self._since_plain[size] = _plain(seen), WINDOW
            seen.pop(None, None)
            for times in seen.values():
                times.measured_beside(plain)
            if not seen:
                del self._seen[size]

    def needs_plain(self, batch: int) -> bool:
        """Returns whether no plain round of this batch size was measured, or none since `forget_plain`."""
        return None not in self._seen.get(batch_bucket(batch), {})

    def all(self, batch: int, arms: Sequence[A]) -> dict[A, float]:
        """Returns the seconds of a round for each arm not much larger than the largest one run at this batch size.

        The limit is twice the nodes of the largest arm run, or the nodes of the next larger arm if these are more.
        """
        run = max(map(_nodes, self._seen.get(batch_bucket(batch), {None: None})))
        reach = max(2 * run, min((n for n in map(_nodes, arms) if n > run), default=run))
        return {arm: self.seconds(batch, arm) for arm in arms if _nodes(arm) <= reach}

    def seconds(self, batch: int, arm: Arm) -> float:
        """Returns the seconds of one round: measured, or estimated. A plain round must have been measured."""
        wanted = batch_bucket(batch)
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
        # Nothing was ever drafted: assume the upper bound of the time to verify.
        plain = self.seconds(batch, None)
        return plain * (_nodes(arm) + LEVEL_GUESS * arm.num_steps)


def _of_one_size(seen: dict[Arm, Seconds], arm: Arm) -> float | None:
    """Returns measured seconds, else those of the nearest shape: drafting scaled by levels, the rest by drafted nodes.

    Lower bound: to verify more nodes is never faster, so that noise does not make a useless draft appear free. Upper
    bound: n nodes take at most n plain rounds, so that one delayed round does not end drafting.
    Returns None if no shape or no plain round was measured to scale from.
    """
    plain = _plain(seen)
    if arm in seen:
        draft, verify = _parts(seen, arm)
        if plain is not None and arm is not None:
            verify = min(max(verify, plain), _nodes(arm) * plain)
            draft = min(draft, max(1, arm.num_steps) * plain)
        return draft + verify
    shapes = [one for one in seen if one is not None]
    if arm is None or plain is None or not shapes:
        return None
    like = min(shapes, key=lambda one: abs(one.num_draft_tokens - arm.num_draft_tokens))
    extra = min(max(0.0, _parts(seen, like)[1] - plain), (_nodes(like) - 1) * plain)
    more = (_nodes(arm) - 1) / (_nodes(like) - 1)
    drafted = [one for one in shapes if one.num_steps]
    level = LEVEL_GUESS * plain
    if drafted:
        like = min(drafted, key=lambda one: abs(one.num_draft_tokens - arm.num_draft_tokens))
        level = _parts(seen, like)[0] / like.num_steps
    return level * arm.num_steps + plain + extra * more


def _parts(seen: dict[Arm, Seconds], arm: Arm) -> tuple[float, float]:
    return seen[arm].parts(None if arm is None else _plain(seen))


def _plain(seen: dict[Arm, Seconds]) -> float | None:
    """Returns the seconds of a plain round from its forward on; None if none was measured."""
    return seen[None].parts()[1] if None in seen else None


def _nodes(arm: Arm) -> int:
    """Returns the number of verified nodes, root included."""
    return 1 if arm is None else arm.num_draft_tokens


def _typical(seconds: Sequence[float]) -> float:
    """Returns the lower median: a busy machine makes a round slower, never faster."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


def batch_bucket(batch: int) -> int:
    """Returns the bucket of a batch size: 1, 2, 3-4, 5-8, ... rows share one each."""
    return (batch - 1).bit_length()
