"""Drafts without a head: lookup in the request's own text (prompt lookup decoding).

Find the longest end of prompt and answer that also occurs earlier, and propose the tokens that followed it at its
latest place:

    text     the cat sat on the mat . the cat ...        "the cat", found at the start
    drafts                                    sat on the mat
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter, DraftRanks
from toolkit.infer.drafters.lookup import MatchRates, SuffixLookup
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, chain_tree, root_only
from toolkit.infer.request.request import Request
from toolkit.infer.request.upload import upload


@dataclass(frozen=True)
class NgramLookup:
    """The settings of n-gram lookup, given in place of a head. min_n: tokens of the shortest match."""

    min_n: int = 2

    @property
    def kind(self) -> str:
        return "ngram"


class NgramDrafter(Drafter):
    """Drafts chains as deep as the shape from the requests' own tokens. A row without a match gets its root only."""

    def __init__(self, lookup: NgramLookup, shape: DraftShape, device: torch.device) -> None:
        self._least, self._device, self._rates = lookup.min_n, device, [MatchRates()]
        self._texts: list[SuffixLookup] = []  # by row
        self.set_shape(shape)

    def set_shape(self, shape: DraftShape) -> None:
        self.shape = shape

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        self._texts[first_row:] = [SuffixLookup(self._rates, least=self._least) for _ in requests]

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        """Looks up every token since the last probe or draft, with the text before it."""
        ranks = []
        for request, text in zip(requests, self._texts, strict=False):
            drafted = text.read(request) if request.speculative else []
            # A single row without a match runs a plain round.
            ranks.append([0 if right else width for right in drafted if right is not None or len(requests) > 1])
        return root_only(rows.roots), ranks

    def move_row(self, destination: int, source: int) -> None:
        self._texts[destination] = self._texts[source]

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        drafts = [self._draft(*one) for one in zip(requests, self._texts, strict=False)]
        longest = max(map(len, drafts))
        if longest == 0:
            return root_only(rows.roots)
        tokens = upload([draft + [0] * (longest - len(draft)) for draft in drafts], self._device)
        return chain_tree(rows.roots, tokens, [len(draft) for draft in drafts])

    def _draft(self, request: Request, text: SuffixLookup) -> list[int]:
        if not request.speculative:
            return []
        text.read(request)
        shape = self.shape if request.shape is None else request.shape.within(self.shape)
        return text.draft(shape.num_steps)[0]
