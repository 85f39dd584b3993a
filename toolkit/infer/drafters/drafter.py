"""What the engine asks of anything that drafts.

Shapes: B running rows, the engine's rows 0..B-1; `requests[row]` runs in each. `rows` are their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, root_only
from toolkit.infer.request.errors import EngineError
from toolkit.infer.request.request import Request
from toolkit.infer.verify.walk import VerifyResult

Ranks = list[list[int]]  # by row and position: the right token's rank among the drafts, their number if it is not there


class Drafter(Protocol):
    """Proposes trees. It sees the target only through what the engine's forwards left in its own hooks."""

    @property
    def lookahead(self) -> int:
        """Tokens behind a position that its entry in the drafter's cache depends on; 0 without a cache."""
        ...

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        """Positions behind a row's tokens that drafting `shape` may write in the drafter's cache. skips: with rounds of
        skip or probe between those of propose."""
        ...

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        """The target has just read the next `tokens` tokens (right-padded) of the requests in rows first_row ..

        Those from n_read on, of context_ids: to its end for all of them, or (a chunk) for none.
        """
        ...

    def positions_read(self, row: int, request: Request) -> int:
        """How many of the row's first positions its cache holds as reading the tokens anew would leave them."""
        ...

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        """A tree for every running row: of the request's own shape where it has one, as far as the drafter's allows.

        A request that is not speculative gets its root only, and so does one for which there is nothing to propose.
        """
        ...

    def skip(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        """Roots only, in the place of propose. The drafter goes on following the target, so it may propose again."""
        ...

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, Ranks]:
        """As skip; and what one level of `width` drafts would have been worth at recent positions, whose successors
        are known: nothing is verified for it. A row without such positions gets an empty list."""
        ...

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        """The host has read what the target accepted of the trees last proposed; the requests have not got it yet."""
        ...

    def move_row(self, destination: int, source: int) -> None:
        """Row `source` takes the place of the finished row `destination`."""
        ...

    def set_shape(self, shape: DraftShape) -> None:
        """Propose trees of this shape, at most, from now on."""
        ...

    def close(self) -> None:
        """Let go of the target (hooks)."""
        ...


def unread_tokens(requests: Sequence[Request], count: int, device: torch.device) -> Tensor:
    """[B, count]: the next tokens of the texts being read, padded on the right with 0."""
    parts = (request.context_ids[request.n_read : request.n_read + count] for request in requests)
    return torch.tensor([part + [0] * (count - len(part)) for part in parts], device=device)


class NoDrafter:
    """Plain decoding as a drafter: every tree is its root."""

    lookahead = 0

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        return 0

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        pass

    def positions_read(self, row: int, request: Request) -> int:
        return request.length

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        return root_only(rows.roots)

    def skip(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        return root_only(rows.roots)

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, Ranks]:
        return root_only(rows.roots), [[] for _ in requests]

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        pass

    def move_row(self, destination: int, source: int) -> None:
        pass

    def set_shape(self, shape: DraftShape) -> None:
        raise EngineError(f"draft shape {shape.name} was asked for, but the engine has no draft head; give it one")

    def close(self) -> None:
        pass
