"""Draft in every round what a search found fastest for its requests and that many running rows (`toolkit search`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.lookup import Lengths
from toolkit.infer.drafters.step_costs import Arm, ArmTime
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.infer.request.request import Request

GREEDY, SAMPLED = "greedy", "sampled"  # kinds of requests: at temperature 0, and above


class SearchedShape(AdaptiveShape):
    """Takes the winner of the smallest searched batch size that the running rows do not exceed.

    It chooses as AdaptiveShape does where adaptive drafting won, with more rows than were searched, for a kind of
    requests that was not searched, and for rows of both kinds whose winners differ.

    winners: by kind of requests and batch size a shape as text, PLAIN or ADAPTIVE. lookup: lookup may draft in place of
    a winner too. A search measures shapes and plain decoding without it, so this is for users who ask for lookup.
    """

    def __init__(
        self,
        most: DraftShape,
        known: Sequence[ArmTime],
        winners: Mapping[str, Mapping[int, str]],
        *,
        lookup: bool = False,
    ) -> None:
        settings = {one for of_kind in winners.values() for one in of_kind.values()} - {PLAIN, ADAPTIVE}
        shapes = {one: DraftShape.parse(one).within(most) for one in settings}
        super().__init__(most, known, shapes.values())
        self._winners, self._lookup_too = winners, lookup
        self._arms: Mapping[str, DraftShape | None] = {PLAIN: None, **shapes}

    def choose(self, requests: Sequence[Request], lookup: Lengths = ()) -> Arm:
        kinds = {SAMPLED if one.params.temperature > 0 else GREEDY for one in requests if one.speculative}
        settings = {self._winner(kind, len(requests)) for kind in kinds}
        setting = settings.pop() if len(settings) == 1 else ADAPTIVE
        if setting == ADAPTIVE:
            return super().choose(requests, lookup)
        self._begin()
        self.probe_due = False
        return self._run(requests, self._arms[setting], lookup if self._lookup_too else ())

    def _winner(self, kind: str, rows: int) -> str:
        sizes = self._winners.get(kind, {})
        size = min((one for one in sizes if one >= rows), default=None)
        return ADAPTIVE if size is None else sizes[size]
