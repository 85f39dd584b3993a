"""What adaptive drafting knows of a round: the expected accept_length of a drafted shape, and the seconds of a round.

Acceptance is counted by tree level and by rank class of the accepted child. A wide tree also shows what a narrower one
would have accepted: the rank of every accepted node among its siblings is known. With the widths 1, 2, 4 the ranks form
three classes. A class is tested only if the classes before it failed:

    class 0: is it the best child?   class 1: the second?   class 2: the third or fourth?

With q_c the rate of class c, a shape of width 2 passes a level with probability 1 - (1 - q0)(1 - q1). Chains update q0
for the trees too.

The time of a drafting round is stored with the time of a plain round at that moment, if one ran shortly before. The
load of a machine changes, so only times of the same moment are comparable.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import Request

Table = list[list[float]]  # by class, then by level
FIRST_GUESS = (0.6, 0.3)  # rates before any try: of class 0, and of every other class
GUESS_WEIGHT = 2.0  # weight of the guess, in tries
REQUEST_WEIGHT = 6.0  # weight of the engine's rates in a request's rates, in tries
ENGINE_MEMORY, REQUEST_MEMORY = 128, 48  # number of tries in which an old try loses 63 % of its weight
WINDOW = 9  # rounds kept per arm and batch size
LEVEL_GUESS = 0.1  # estimated time to draft one level, in plain rounds, before any was measured


class Rates:
    """Correct drafts and tries by class and level, with exponential decay."""

    def __init__(self, classes: int, levels: int, memory: int) -> None:
        self._keep = 1 - 1 / memory
        self._correct: Table = [[0.0] * levels for _ in range(classes)]
        self._tries: Table = [[0.0] * levels for _ in range(classes)]

    def add(self, passed: Sequence[int], levels: int, classes: int) -> None:
        """Adds one row. passed: class of the accepted child, by level. levels, classes: of the drafted shape."""
        for level in range(min(len(passed) + 1, levels)):
            right = passed[level] if level < len(passed) else classes
            for asked in range(min(right + 1, classes)):
                self._tries[asked][level] = self._tries[asked][level] * self._keep + 1
                self._correct[asked][level] = self._correct[asked][level] * self._keep + (asked == right)

    def estimates(self, above: Table | None = None) -> Table:
        """Returns the rates, smoothed towards a prior.

        The prior is `above`, or without it the rate of the level before (FIRST_GUESS for the first level).
        """
        rates: Table = []
        for asked, columns in enumerate(zip(self._correct, self._tries, strict=True)):
            guess, weight = FIRST_GUESS[min(asked, 1)], GUESS_WEIGHT if above is None else REQUEST_WEIGHT
            rates.append([])
            for level, (correct, tried) in enumerate(zip(*columns, strict=True)):
                guess = guess if above is None else above[asked][level]
                guess = (weight * guess + correct) / (weight + tried)
                rates[-1].append(guess)
        return rates


class RunningAcceptance:
    """The rates of the engine and of each running request. A request's rates start from the engine's.

    widths: the values of top_k to distinguish, ascending from 1. levels: num_steps of the deepest shape.
    """

    def __init__(self, widths: Sequence[int], levels: int) -> None:
        self._widths, self._levels = widths, levels
        self._engine = Rates(len(widths), levels, ENGINE_MEMORY)
        self._requests: WeakKeyDictionary[Request, Rates] = WeakKeyDictionary()

    def add(self, request: Request, shape: DraftShape, ranks: Sequence[int]) -> None:
        """Adds a verified draft. shape: as drafted. ranks: of the accepted nodes among their siblings, by level."""
        self._add(request, [bisect_right(self._widths, rank) for rank in ranks], shape.num_steps, self._classes(shape))

    def probe(self, request: Request, ranks: Sequence[int]) -> None:
        """Adds unverified drafts of one level of the widest shape.

        ranks: by position, the rank of the right token; the width if it is absent. Without any, the request counts as
        known all the same.
        """
        classes = len(self._widths)
        self._of(request)
        for rank in ranks:
            right = bisect_right(self._widths, rank)
            self._add(request, [right] if right < classes else [], 1, classes)

    def known_share(self, requests: Sequence[Request]) -> float:
        """Returns the share of requests that were drafted for or probed, or are not speculative."""
        return sum(request in self._requests or not request.speculative for request in requests) / len(requests)

    def by_request(self, requests: Sequence[Request], shapes: Sequence[DraftShape]) -> list[list[float]]:
        """Returns the expected accept_length (bonus token included) by shape and request."""
        engine = self._engine.estimates()
        usual = _lengths(engine)
        expected: list[list[float]] = [[] for _ in shapes]
        for request in requests:
            rates = self._requests.get(request)
            lengths = usual if rates is None else _lengths(rates.estimates(engine))
            for of_shape, shape in zip(expected, shapes, strict=True):
                own = shape if request.shape is None else request.shape.within(shape)
                of_shape.append(lengths[self._classes(own) - 1][own.num_steps] if request.speculative else 1.0)
        return expected

    def _add(self, request: Request, passed: Sequence[int], levels: int, classes: int) -> None:
        for rates in (self._engine, self._of(request)):
            rates.add(passed, levels, classes)

    def _of(self, request: Request) -> Rates:
        if request not in self._requests:
            self._requests[request] = Rates(len(self._widths), self._levels, REQUEST_MEMORY)
        return self._requests[request]

    def _classes(self, shape: DraftShape) -> int:
        """Returns how many classes a shape covers."""
        return bisect_left(self._widths, shape.top_k) + 1


def _lengths(estimates: Table) -> Table:
    """Returns the expected accept_length by class (siblings up to it are drafted) and number of levels, from 0."""
    failed = [1.0] * len(estimates[0])
    lengths: Table = []
    for rates in estimates:
        failed = [before * (1 - rate) for before, rate in zip(failed, rates, strict=True)]
        reached = accumulate((1 - rate for rate in failed), mul)
        lengths.append(list(accumulate(reached, initial=1.0)))
    return lengths


# -- seconds ----------------------------------------------------------------------------------------------------------


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
            rescaled = [(plain / then if plain and then else 1.0, parts) for *parts, then in self._rounds]
            draft, verify = (sorted(parts[i] * factor for factor, parts in rescaled) for i in (0, 1))
            middle = (len(draft) - 1) // 2  # the lower median: a busy machine makes a round slower, never faster
            self._known = (plain, (draft[middle], verify[middle]))
        return self._known[1]


class StepCosts:
    """Seconds of a round by arm and batch size. Batch sizes up to the next power of two share one entry."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[Arm, Seconds]] = {}
        self._since_plain: dict[int, int] = {}  # drafting rounds since the last plain one, by batch size

    def add(self, batch: int, arm: Arm, draft: float, verify: float) -> None:
        size = batch_bucket(batch)
        seen = self._seen.setdefault(size, {})
        since = self._since_plain[size] = 0 if arm is None else self._since_plain.get(size, WINDOW) + 1
        plain = _plain(seen) if arm is not None and since < WINDOW else None
        seen.setdefault(arm, Seconds()).add(draft, verify, plain)

    def forget_plain(self) -> None:
        """Forgets the times of plain rounds. Once measured again, they rescale the times of the drafting rounds.

        For a change that makes all rounds slower or faster, as that of the number of threads.
        """
        for size, seen in self._seen.items():
            plain, self._since_plain[size] = _plain(seen), WINDOW
            seen.pop(None, None)
            for times in seen.values():
                times.measured_beside(plain)
        self._seen = {size: seen for size, seen in self._seen.items() if seen}

    def needs_plain(self, batch: int) -> bool:
        """Returns whether no plain round of this batch size was measured, or none since `forget_plain`."""
        return None not in self._seen.get(batch_bucket(batch), {})

    def all(self, batch: int, arms: Sequence[A]) -> dict[A, float]:
        """Returns the seconds of a round for each arm not much larger than the largest one run at this batch size.

        The limit is twice the nodes of the largest arm run, or the nodes of the next larger arm if these are more.
        """
        run = max(map(_nodes, self._seen.get(batch_bucket(batch), {None: None})))
        limit = max(2 * run, min((n for n in map(_nodes, arms) if n > run), default=run))
        return {arm: self.seconds(batch, arm) for arm in arms if _nodes(arm) <= limit}

    def seconds(self, batch: int, arm: Arm) -> float:
        """Returns the seconds of one round: measured, or estimated. A plain round must have been measured."""
        wanted = batch_bucket(batch)
        here = self._seen.get(wanted, {})
        for size in sorted(self._seen, key=lambda size: abs(size - wanted)):  # this size first, if it was measured
            there = self._seen[size]
            seconds = _of_one_size(there, arm)
            if seconds is not None:
                ratios = [sum(_parts(here, one)) / sum(_parts(there, one)) for one in here.keys() & there.keys()]
                return seconds * (sum(ratios) / len(ratios) if ratios and size != wanted else 1.0)
        assert arm is not None, "no plain round was measured"
        # Nothing was ever drafted: assume the upper bound of the time to verify.
        return self.seconds(batch, None) * (_nodes(arm) + LEVEL_GUESS * arm.num_steps)


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

    def nearest(measured: Sequence[DraftShape | LookupArm]) -> DraftShape | LookupArm:
        return min(measured, key=lambda one: abs(one.num_draft_tokens - arm.num_draft_tokens))

    like = nearest(shapes)
    extra = min(max(0.0, _parts(seen, like)[1] - plain), (_nodes(like) - 1) * plain)
    drafted, level = [one for one in shapes if one.num_steps], LEVEL_GUESS * plain
    if drafted:
        by_head = nearest(drafted)
        level = _parts(seen, by_head)[0] / by_head.num_steps
    return level * arm.num_steps + plain + extra * (_nodes(arm) - 1) / (_nodes(like) - 1)


def _parts(seen: dict[Arm, Seconds], arm: Arm) -> tuple[float, float]:
    return seen[arm].parts(None if arm is None else _plain(seen))


def _plain(seen: dict[Arm, Seconds]) -> float | None:
    """Returns the seconds of a plain round from its forward on; None if none was measured."""
    return seen[None].parts()[1] if None in seen else None


def _nodes(arm: Arm) -> int:
    """Returns the number of verified nodes, root included."""
    return 1 if arm is None else arm.num_draft_tokens


def batch_bucket(batch: int) -> int:
    """Returns the bucket of a batch size: 1, 2, 3-4, 5-8, ... rows share one each."""
    return (batch - 1).bit_length()
