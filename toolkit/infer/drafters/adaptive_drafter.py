"""A drafter that wraps another one, times its rounds and lets `AdaptiveShape` choose the next shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.drafter import Drafter, Ranks
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult


class AdaptiveDrafter:
    """Drafts with `inner`, nothing deeper, wider or larger than `shape`. clock: seconds, as time.perf_counter.

    A round lasts from propose to observe, when the target's choices have reached the host. The engine's work between
    observe and the next propose (host work, other prompts) is the same for all shapes.
    """

    def __init__(self, inner: Drafter, shape: DraftShape, clock: Callable[[], float] = time.perf_counter) -> None:
        self.inner = inner
        self._clock = clock
        self._make_chooser: Callable[[DraftShape], AdaptiveShape] = AdaptiveShape
        self.set_shape(shape)

    def choose_by(self, make_chooser: Callable[[DraftShape], AdaptiveShape]) -> None:
        """Replaces the chooser. make_chooser: returns a chooser for the largest shape."""
        self._make_chooser = make_chooser
        self.set_shape(self._shape)

    def set_shape(self, shape: DraftShape) -> None:
        self.inner.set_shape(shape)
        self._shape, self.chooser = shape, self._make_chooser(shape)
        self._round: tuple[DraftShape | None, DraftTree, float, float] | None = None

    @property
    def lookahead(self) -> int:
        return self.inner.lookahead

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        return self.inner.reach(shape, skips=True)

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        self.inner.admit(first_row, requests, tokens)

    def positions_read(self, row: int, request: Request) -> int:
        return self.inner.positions_read(row, request)

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        self._round = None
        if not any(request.speculative for request in requests):
            return self.inner.propose(requests, rows)
        started = self._clock()
        shape = self.chooser.choose(requests)
        if shape is None and self.chooser.probe_due:
            tree, ranks = self.inner.probe(requests, rows, self.chooser.widest)
            self.chooser.probed(requests, ranks)
            started = self._clock()  # the time of a plain round excludes the probe
        elif shape is None:
            tree = self.inner.skip(requests, rows)
        else:
            self.inner.set_shape(shape)
            tree = self.inner.propose(requests, rows)
        self._round = (shape, tree, started, self._clock())
        return tree

    def skip(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        self._round = None
        return self.inner.skip(requests, rows)

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, Ranks]:
        self._round = None
        return self.inner.probe(requests, rows, width)

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        self.inner.observe(requests, result)
        if self._round is None:
            return
        shape, tree, started, proposed = self._round
        self._round = None
        ran = shape if tree.nodes > 1 else None  # n-gram lookup may have found nothing for any row
        self.chooser.record(requests, ran, result.ranks, proposed - started, self._clock() - proposed)

    def move_row(self, destination: int, source: int) -> None:
        self.inner.move_row(destination, source)

    def close(self) -> None:
        self.inner.close()
