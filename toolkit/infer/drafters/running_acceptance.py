"""Running estimates of draft acceptance, by tree level and by rank class of the accepted child.

A wide tree also shows what a narrower one would have accepted: the rank of every accepted node among its siblings is
known. With the widths 1, 2, 4 the ranks form three classes. A class is tested only if the classes before it failed:

    class 0: is it the best child?   class 1: the second?   class 2: the third or fourth?

With q_c the rate of class c, a shape of width 2 passes a level with probability 1 - (1 - q0)(1 - q1). Chains update q0
for the trees too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import Request

Table = list[list[float]]  # by class, then by level
FIRST_GUESS = (0.6, 0.3)  # rates before any try: of class 0, and of every other class
GUESS_WEIGHT = 2.0  # weight of the guess, in tries
REQUEST_WEIGHT = 6.0  # weight of the engine's rates in a request's rates, in tries
ENGINE_MEMORY, REQUEST_MEMORY = 128, 48  # number of tries in which an old try loses 63 % of its weight


class Rates:
    """Hits and tries by class and level, with exponential decay."""

    def __init__(self, classes: int, levels: int, memory: int) -> None:
        self._keep = 1 - 1 / memory
        self._hits: Table = [[0.0] * levels for _ in range(classes)]
        self._tries: Table = [[0.0] * levels for _ in range(classes)]

    def add(self, hits: Sequence[int], levels: int, classes: int) -> None:
        """Adds one row. hits: class of the accepted child, by level passed. levels, classes: of the drafted shape."""
        for level in range(min(len(hits) + 1, levels)):
            hit = hits[level] if level < len(hits) else classes
            for asked in range(min(hit + 1, classes)):
                self._tries[asked][level] = self._tries[asked][level] * self._keep + 1
                self._hits[asked][level] = self._hits[asked][level] * self._keep + (asked == hit)

    def estimates(self, above: Table | None = None) -> Table:
        """Returns the rates, smoothed towards a prior.

        The prior is `above`, or without it the rate of the level before (FIRST_GUESS for the first level).
        """
        found: Table = []
        for asked, (hits, tries) in enumerate(zip(self._hits, self._tries, strict=True)):
            guess, rates = FIRST_GUESS[min(asked, 1)], []
            for level, (hit, tried) in enumerate(zip(hits, tries, strict=True)):
                weight = GUESS_WEIGHT if above is None else REQUEST_WEIGHT
                guess = guess if above is None else above[asked][level]
                guess = (weight * guess + hit) / (weight + tried)
                rates.append(guess)
            found.append(rates)
        return found


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
        hits = [bisect_right(self._widths, rank) for rank in ranks]
        for rates in (self._engine, self._of(request)):
            rates.add(hits, shape.num_steps, self._classes(shape))

    def probe(self, request: Request, ranks: Sequence[int]) -> None:
        """Adds unverified drafts of one level of the widest shape.

        ranks: by position, the rank of the right token; the width if it is absent.
        """
        classes, own = len(self._widths), self._of(request)
        for rank in ranks:
            hit = bisect_right(self._widths, rank)
            for rates in (self._engine, own):
                rates.add([hit] if hit < classes else [], 1, classes)

    def known_share(self, requests: Sequence[Request]) -> float:
        """Returns the share of requests that were drafted for or probed, or are not speculative."""
        return sum(request in self._requests or not request.speculative for request in requests) / len(requests)

    def expected(self, requests: Sequence[Request], shapes: Sequence[DraftShape]) -> list[float]:
        """Returns the expected accept_length of each shape (bonus token included), mean over the requests."""
        return [sum(lengths) / len(requests) for lengths in self.by_request(requests, shapes)]

    def by_request(self, requests: Sequence[Request], shapes: Sequence[DraftShape]) -> list[list[float]]:
        """Returns the expected accept_length by shape and request."""
        engine = self._engine.estimates()
        usual = _lengths(engine)
        found: list[list[float]] = [[] for _ in shapes]
        for request in requests:
            rates = self._requests.get(request)
            lengths = usual if rates is None else _lengths(rates.estimates(engine))
            for of_shape, shape in zip(found, shapes, strict=True):
                own = shape if request.shape is None else request.shape.within(shape)
                of_shape.append(lengths[self._classes(own) - 1][own.num_steps] if request.speculative else 1.0)
        return found

    def _of(self, request: Request) -> Rates:
        found = self._requests.get(request)
        if found is None:
            found = self._requests[request] = Rates(len(self._widths), self._levels, REQUEST_MEMORY)
        return found

    def _classes(self, shape: DraftShape) -> int:
        """Returns how many classes a shape covers."""
        return bisect_left(self._widths, shape.top_k) + 1


def _lengths(estimates: Table) -> Table:
    """Returns the expected accept_length by class (siblings up to it are drafted) and number of levels, from 0."""
    failed = [1.0] * len(estimates[0])
    found: Table = []
    for rates in estimates:
        failed = [before * (1 - rate) for before, rate in zip(failed, rates, strict=True)]
        reached = accumulate((1 - one for one in failed), mul)
        found.append(list(accumulate(reached, initial=1.0)))
    return found
