"""Draft in every round what a search found fastest for that many running rows (`toolkit search`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.lookup import Lengths
from toolkit.infer.drafters.step_costs import Arm, ArmTime
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.request.request import Request


class SearchedShape(AdaptiveShape):
    """Takes the winner of the smallest searched batch size that the running rows do not exceed.

    Where adaptive drafting won, and with more rows than were searched, it chooses as AdaptiveShape does.

    winners: by batch size a shape as text, PLAIN or ADAPTIVE. lookup: lookup may draft in place of a winner too. A
    search measures shapes and plain decoding without it, so this is for users who ask for lookup.
    """

    def __init__(
        self, most: DraftShape, known: Sequence[ArmTime], winners: Mapping[int, str], *, lookup: bool = False
    ) -> None:
        shapes = {one: DraftShape.parse(one).within(most) for one in winners.values() if one not in (PLAIN, ADAPTIVE)}
        super().__init__(most, known, shapes.values())
        self._winners, self._lookup_too = winners, lookup
        self._arms: Mapping[str, DraftShape | None] = {PLAIN: None, **shapes}

    def choose(self, requests: Sequence[Request], lookup: Lengths = ()) -> Arm:
        size = min((one for one in self._winners if one >= len(requests)), default=None)
        if size is None or self._winners[size] == ADAPTIVE:
            return super().choose(requests, lookup)
        self._begin()
        self.probe_due = False
        return self._run(requests, self._arms[self._winners[size]], lookup if self._lookup_too else ())
