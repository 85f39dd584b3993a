"""What adaptive drafting knows of a round: the expected accept_length of drafts, and the seconds of a round.

Acceptance is counted by tree level and by rank class of the accepted child. A wide tree also shows what a narrower one
would have accepted: the rank of every accepted node among its siblings is known. With the widths 1, 2, 4 the ranks form
three classes. A class is tested only if the classes before it failed:

    class 0: is it the best child?   class 1: the second?   class 2: the third or fourth?

With q_c the rate of class c, a shape of width 2 passes a level with probability 1 - (1 - q0)(1 - q1). Chains update q0
for the trees too. That is the same for trees that differ by their number of nodes alone, so each tree has a factor: its
accepted tokens over those that the rates let expect.

    seconds of a round = drafting, by the head's shape  +  verification, by the nodes a row (WIDTHS)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import Request

# What a row may draft: ascending numbers of nodes, root included, each with the expected accept_length of as many.
Steps = list[tuple[int, float]]
FIRST_GUESS = (0.6, 0.3)  # rates before any try: of class 0, and of every other class
GUESS_WEIGHT, REQUEST_WEIGHT = 2.0, 6.0  # weight, in tries, of the guess, and of the engine's rates in a request's
ENGINE_MEMORY, REQUEST_MEMORY = 128, 48  # number of tries in which an old try loses 63 % of its weight
TREE_WEIGHT = 8.0  # weight, in tokens, of the guess that a tree's factor is 1
WINDOW = 9  # times kept of each part of a round
LEVEL_GUESS = 0.1  # estimated time to draft one level, in plain rounds, before any was measured
# Verified nodes a row that are told apart, root included. Other numbers have the time of the next larger one.
WIDTHS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Rates:
    """Share of right drafts by cell (a class and level, or a length of matches), with exponential decay.

    start: the rates before any try, worth `weight` tries: numbers, or the rates of all requests, which learn too.
    memory: the number of tries in which an old try loses 63 % of its weight.
    """

    def __init__(self, start: Rates | Sequence[float], weight: float, memory: int) -> None:
        self._start, self._weight, self._keep = start, weight, 1 - 1 / memory
        cells = len(start.tries) if isinstance(start, Rates) else len(start)
        self._correct = [0.0] * cells
        self.tries: list[float] = [0.0] * cells

    def add(self, cell: int, right: bool) -> None:
        self._correct[cell] = self._correct[cell] * self._keep + right
        self.tries[cell] = self.tries[cell] * self._keep + 1
        if isinstance(self._start, Rates):
            self._start.add(cell, right)

    def now(self) -> list[float]:
        """Returns the rates by cell."""
        start, weight = self._start.now() if isinstance(self._start, Rates) else self._start, self._weight
        columns = zip(start, self._correct, self.tries, strict=True)
        return [(weight * guess + correct) / (weight + tries) for guess, correct, tries in columns]


class RunningAcceptance:
    """The rates of the engine and of each running request. A request's rates start from the engine's.

    top_ks: the values to distinguish, ascending from 1. levels: num_steps of the deepest shape.
    """

    def __init__(self, top_ks: Sequence[int], levels: int) -> None:
        self._top_ks, self._levels = top_ks, levels
        guesses = [FIRST_GUESS[min(one, 1)] for one in range(len(top_ks)) for _ in range(levels)]
        self._engine = Rates(guesses, GUESS_WEIGHT, ENGINE_MEMORY)
        self._requests: WeakKeyDictionary[Request, Rates] = WeakKeyDictionary()
        self._trees: dict[DraftShape, tuple[float, float]] = {}  # accepted and expected tokens; old rounds fade

    def knows(self, request: Request) -> bool:
        return request in self._requests

    def add(
        self, request: Request, ranks: Sequence[int], levels: int, top_k: int, tree: DraftShape | None = None
    ) -> None:
        """Adds a draft of `levels` levels. ranks: of its right nodes among their siblings, by level from the first.
        tree: its shape, if it is no chain."""
        rates = self._requests.setdefault(request, Rates(self._engine, REQUEST_WEIGHT, REQUEST_MEMORY))
        if tree is not None:
            keep, (accepted, expected) = 1 - 1 / ENGINE_MEMORY, self._trees.get(tree, (0.0, 0.0))
            now = self._lengths(rates.now())[bisect_left(self._top_ks, top_k)][levels]
            self._trees[tree] = accepted * keep + 1 + len(ranks), expected * keep + now
        classes = bisect_left(self._top_ks, top_k) + 1
        for level in range(min(len(ranks) + 1, levels)):
            right = bisect_right(self._top_ks, ranks[level]) if level < len(ranks) else classes
            for asked in range(min(right + 1, classes)):
                rates.add(asked * self._levels + level, asked == right)

    def steps(self, requests: Sequence[Request], shapes: Sequence[DraftShape]) -> list[list[Steps]]:
        """Returns the steps of every row by shape. A chain can be cut after each node; of a tree a row keeps all."""
        found: list[list[Steps]] = [[] for _ in shapes]
        for request in requests:
            by_class = self._lengths(self._requests.get(request, self._engine).now())
            for of_shape, shape in zip(found, shapes, strict=True):
                own = shape if request.shape is None else request.shape.within(shape)
                lengths = by_class[bisect_left(self._top_ks, own.top_k)][: own.num_steps + 1]
                steps = list(enumerate(lengths, start=1))[1:]
                if not own.is_chain:
                    accepted, expected = self._trees.get(own, (0.0, 0.0))
                    factor = (TREE_WEIGHT + accepted) / (TREE_WEIGHT + expected)
                    steps = [(own.num_draft_tokens, min(max(1.0, lengths[-1] * factor), own.num_steps + 1))]
                of_shape.append(steps if request.speculative else [])
        return found

    def _lengths(self, rates: Sequence[float]) -> list[list[float]]:
        """Returns the expected accept_length by class (siblings up to it are drafted) and number of levels, from 0."""
        failed = [1.0] * self._levels
        lengths = []
        for first in range(0, len(rates), self._levels):
            failed = [before * (1 - rates[first + level]) for level, before in enumerate(failed)]
            lengths.append(list(accumulate(accumulate((1 - one for one in failed), mul), initial=1.0)))
        return lengths


class StepCosts:
    """Seconds of the parts of a round by batch size. Batch sizes up to the next power of two share one entry.

    The load of a machine changes: a part is kept with the time of a plain round at that moment, if one ran shortly
    before, and is rescaled by it. Width 1 is a plain round.
    """

    def __init__(self) -> None:
        # By batch size and part (a shape's drafting, a width's verification): seconds, and those of a plain round then.
        self._seen: dict[int, dict[DraftShape | float, deque[tuple[float, float | None]]]] = {}
        self._since_plain: dict[int, int] = {}  # drafting rounds since the last plain one, by batch size

    def add(self, batch: int, shape: DraftShape | None, width: float, draft: float, verify: float) -> None:
        """Adds a round. shape: that the head drafted; None: it rested. width: verified nodes a row."""
        size = batch_bucket(batch)
        since = self._since_plain[size] = 0 if width == 1 else self._since_plain.get(size, WINDOW) + 1
        plain = self.plain(batch) if 0 < since < WINDOW else None
        parts: dict[DraftShape | float, float] = {covering_width(width): verify if shape else verify + draft}
        if shape is not None:
            parts[shape] = draft
        for part, seconds in parts.items():
            self._seen.setdefault(size, {}).setdefault(part, deque(maxlen=WINDOW)).append((seconds, plain))

    @property
    def shapes(self) -> list[DraftShape]:
        """Those whose drafting was measured."""
        return [part for seen in self._seen.values() for part in seen if isinstance(part, DraftShape)]

    def plain(self, batch: int) -> float | None:
        """Returns the seconds of a plain round; None if none was measured at this batch size."""
        size = batch_bucket(batch)
        return self._typical(size, 1, None) if 1 in self._seen.get(size, {}) else None

    def forget_plain(self) -> None:
        """Forgets the plain rounds, which rescale all other times when they are measured again. For a change that makes
        all rounds slower or faster, as that of the number of threads."""
        for size, parts in self._seen.items():
            if 1 in parts:
                plain, self._since_plain[size] = self._typical(size, 1, None), WINDOW
                for part, times in parts.items():
                    parts[part] = deque(((seconds, then or plain) for seconds, then in times), maxlen=WINDOW)
                del parts[1]

    def verify(self, batch: int, nodes: Sequence[int]) -> dict[float, float]:
        """Returns the seconds of verification by width, measured or estimated. A plain round must have been measured.
        nodes: of the shapes to choose from.

        The largest width is twice the largest one run at this batch size, or the next of `nodes`: twice the nodes take
        at most twice as long. Between two measured widths the time is interpolated, beyond the last one it grows on.
        Lower bound: to verify more nodes is never faster, so that noise does not make a useless draft appear free.
        Upper bound: n nodes take at most n plain rounds, so that one delayed round does not end drafting.
        """
        plain, known = self._parts(batch, drafts=False)
        largest = max(known, default=1)
        slope = (known[largest] - plain) / (largest - 1) if known else plain
        known |= {1: plain, 2 * WIDTHS[-1]: plain + slope * (2 * WIDTHS[-1] - 1)}
        times = np.interp(WIDTHS, sorted(known), [known[width] for width in sorted(known)])
        run = max(part for part in self._seen[batch_bucket(batch)] if not isinstance(part, DraftShape))
        limit = covering_width(max(2 * run, min((one for one in nodes if one > run), default=1)))
        bounded = np.clip(times, plain, plain * np.array(WIDTHS)).tolist()
        return {width: seconds for width, seconds in zip(WIDTHS, bounded, strict=True) if width <= limit}

    def draft(self, batch: int, shapes: Sequence[DraftShape]) -> list[float]:
        """Returns the seconds of drafting by shape: measured, else those a level of the nearest shape."""
        plain, known = self._parts(batch, drafts=True)
        found = []
        for shape in shapes:
            distances = {(abs(one.num_steps - shape.num_steps), abs(one.top_k - shape.top_k)): one for one in known}
            like = distances[min(distances)] if known else None
            level = LEVEL_GUESS * plain if like is None else known[like] / like.num_steps
            found.append(min(level, plain) * shape.num_steps)
        return found

    def _parts(self, batch: int, *, drafts: bool) -> tuple[float, dict[Any, float]]:
        """Returns the seconds of a plain round, and of drafting by shape or of verification by width above 1. Where
        none was measured at this batch size, those of the nearest one that has some, in relation to its plain rounds.
        """
        here, plain = batch_bucket(batch), self.plain(batch)
        assert plain is not None, "no plain round was measured"
        for size in sorted(self._seen, key=lambda one: abs(one - here)):
            parts = [part for part in self._seen[size] if isinstance(part, DraftShape) == drafts and part != 1]
            if parts and 1 in self._seen[size]:
                there = self._typical(size, 1, None)
                return plain, {part: self._typical(size, part, there) * plain / there for part in parts}
        return plain, {}

    def _typical(self, size: int, part: DraftShape | float, plain: float | None) -> float:
        """Returns the lower median of a part: a busy machine makes a round slower, never faster.

        plain: the current seconds of a plain round, which rescale the times; None: as they were measured."""
        times = sorted(one * (plain / then if plain and then else 1.0) for one, then in self._seen[size][part])
        return times[(len(times) - 1) // 2]


def covering_width(nodes: float) -> float:
    """Returns the smallest of WIDTHS that is at least `nodes`; of more nodes their number."""
    at = bisect_left(WIDTHS, nodes)
    return WIDTHS[at] if at < len(WIDTHS) else nodes


def batch_bucket(batch: int) -> int:
    """Returns the bucket of a batch size: 1, 2, 3-4, 5-8, ... rows share one each."""
    return (batch - 1).bit_length()
