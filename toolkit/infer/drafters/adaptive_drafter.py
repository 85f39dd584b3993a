"""A drafter whose shape is chosen in every round (`adaptive.py`), and whose rounds are timed for that choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.composed_drafter import ComposedDrafter
from toolkit.infer.drafters.drafter import Drafter, DraftRanks, WrappedDrafter
from toolkit.infer.drafters.step_costs import Arm, ArmTime, LookupArm, batch_bucket
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult

# With several rows, after so many rounds in which lookup did not draft, only every so many-th round searches the texts.
IDLE_ROUNDS, SEARCH_EVERY = 16, 8


class AdaptiveDrafter(WrappedDrafter):
    """Drafts with `inner`, nothing deeper, wider or larger than `shape`. clock: seconds, as time.perf_counter.

    A round lasts from propose to observe, when the target's choices have reached the host. The engine's work between
    observe and the next propose (host work, other prompts) is the same for all shapes.

    first_is_slow: the first round of an arm at a batch size is not timed. On a GPU it compiles or loads kernels and
    allocates memory; as the only time of an arm it would keep the arm from being tried again for hundreds of rounds. On
    a CPU nothing is compiled in a round (torch.compile does it at the engine's start), and the second round of every
    arm would be one more that a useless head costs.
    """

    def __init__(
        self,
        inner: Drafter,
        shape: DraftShape,
        clock: Callable[[], float] = time.perf_counter,
        *,
        first_is_slow: bool = False,
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._first_is_slow = first_is_slow
        self._idle = 0  # rounds since lookup drafted
        self._ran: set[tuple[int, Arm]] = set()  # batch size and arm of earlier rounds
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
        drafts = [] if composed is None or self._lookup_rests(len(requests)) else composed.lookups(requests)
        arm = self.chooser.choose(requests, [lengths for _, lengths in drafts])
        self._idle = 0 if isinstance(arm, LookupArm) else self._idle + 1
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

    def _lookup_rests(self, rows: int) -> bool:
        return rows > 1 and self._idle >= IDLE_ROUNDS and self._idle % SEARCH_EVERY > 0

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
        headed = self.inner.ends_chains and not isinstance(arm, LookupArm)
        ran = arm if tree.nodes > 1 or headed else None  # n-gram lookup may have found nothing for any row
        kind = batch_bucket(len(requests)), ran
        timed = not self._first_is_slow or kind in self._ran
        self._ran.add(kind)
        self.chooser.record(requests, ran, result.ranks, proposed - started, self._clock() - proposed, timed)
