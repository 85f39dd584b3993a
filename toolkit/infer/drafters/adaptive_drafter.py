"""A drafter whose shape is chosen in every round (`adaptive.py`), and whose rounds are timed for that choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.composed_drafter import ComposedDrafter
from toolkit.infer.drafters.drafter import Drafter, DraftRanks, WrappedDrafter
from toolkit.infer.drafters.step_costs import Arm, ArmTime, LookupArm
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult


class AdaptiveDrafter(WrappedDrafter):
    """Drafts with `inner`, nothing deeper, wider or larger than `shape`. clock: seconds, as time.perf_counter.

    A round lasts from propose to observe, when the target's choices have reached the host. The engine's work between
    observe and the next propose (host work, other prompts) is the same for all shapes.
    """

    def __init__(self, inner: Drafter, shape: DraftShape, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self._clock = clock
        self._make_chooser: Callable[[DraftShape], AdaptiveShape] = AdaptiveShape
        self.set_shape(shape)

    def start_from(self, known: Sequence[ArmTime]) -> None:
        """Begins with these times of rounds, measured on this machine, in place of plain rounds and trials."""
        self.choose_by(lambda most: AdaptiveShape(most, known))

    def choose_by(self, make_chooser: Callable[[DraftShape], AdaptiveShape]) -> None:
        """Replaces the chooser. make_chooser: returns a chooser for the largest shape."""
        self._make_chooser = make_chooser
        self.set_shape(self._shape)

    def set_shape(self, shape: DraftShape) -> None:
        self.inner.set_shape(shape)
        self._shape, self.chooser = shape, self._make_chooser(shape)
        self._round: tuple[Arm, DraftTree, float, float] | None = None

    def weights_changed(self) -> None:
        self.inner.weights_changed()
        self.chooser.forget_acceptance()

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        return self.inner.reach(shape, skips=True)

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        self._round = None
        if not any(request.speculative for request in requests):
            return self.inner.propose(requests, rows)
        started = self._clock()
        composed = self.inner if isinstance(self.inner, ComposedDrafter) else None
        drafts = [] if composed is None else composed.lookups(requests)
        arm = self.chooser.choose(requests, [lengths for _, lengths in drafts])
        shape = arm.shape if isinstance(arm, LookupArm) else arm
        if shape is not None:
            self.inner.set_shape(shape)
        if composed is not None and isinstance(arm, LookupArm):
            cut = [tokens[:depth] for (tokens, _), depth in zip(drafts, self.chooser.depths, strict=True)]
            tree = composed.compose(requests, rows, cut, head=shape is not None)
        elif shape is None and self.chooser.probe_due:
            tree, ranks = self.inner.probe(requests, rows, self.chooser.widest)
            self.chooser.probed(requests, ranks)
            started = self._clock()  # the time of a plain round excludes the probe
        elif shape is None:
            tree = self.inner.skip(requests, rows)
        else:
            tree = (self.inner if composed is None else composed.inner).propose(requests, rows)
        self._round = (arm, tree, started, self._clock())
        return tree

    def skip(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        self._round = None
        return self.inner.skip(requests, rows)

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        self._round = None
        return self.inner.probe(requests, rows, width)

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        self.inner.observe(requests, result)
        if self._round is None:
            return
        arm, tree, started, proposed = self._round
        self._round = None
        ran = arm if tree.nodes > 1 else None  # n-gram lookup may have found nothing for any row
        self.chooser.record(requests, ran, result.ranks, proposed - started, self._clock() - proposed)
