"""The interface between the engine and its drafters.

Shapes: B running rows, the engine's rows 0..B-1. `requests[row]` is the request in a row; `rows` holds their tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, root_only, upload
from toolkit.infer.request.params import EngineError
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult

DraftRanks = list[
    list[int]
]  # by row and position: rank of the right token among the drafts; their number if it is absent


class Drafter(ABC):
    """Proposes draft trees. It reads the target only through its own hooks on the engine's forwards.

    The methods that are not abstract are those of a drafter without a cache and without hooks.
    ends_chains: a head may run and leave out all its drafts, by its confidence, on the host.
    """

    ends_chains = False

    @property
    def lookahead(self) -> int:
        """Number of tokens after a position that its entry in the drafter's cache depends on; 0 without a cache."""
        return 0

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        """Returns how many positions after a row's tokens drafting `shape` may write in the drafter's cache.

        skips: rounds of skip or probe may run between those of propose.
        """
        return 0

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        """Reads the prompt tokens that the target has just read: at most `tokens` a request, in rows first_row ..

        They are context_ids[n_read : n_read + tokens] of each request, one request after another in [1, T]. They reach
        the end of context_ids for all requests, or (a chunk) for none.
        """
        return  # no cache

    def positions_read(self, row: int, request: Request) -> int:
        """Returns the length of the row's prefix whose cache entries equal those of a new prefill."""
        return request.length

    @abstractmethod
    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        """Returns a tree for every running row. A request's own shape applies within the drafter's shape.

        A request gets its root only if it is not speculative or if the drafter has no draft for it.
        """

    def skip(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        """Returns roots only, in place of propose. The drafter keeps up with the target, so it can propose later."""
        return root_only(rows.roots)

    @abstractmethod
    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        """Returns roots only, as skip, and the ranks of known tokens among `width` drafts at recent positions.

        The next tokens of these positions are committed already, so nothing is verified. A row without such positions
        gets an empty list.
        """

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        """Takes what the target accepted of the last trees. The tokens are not yet appended to the requests."""
        return  # a drafter that reads the requests sees these tokens later

    def move_row(self, destination: int, source: int) -> None:
        """Moves row `source` to the place of the finished row `destination`."""
        return  # nothing by row

    @abstractmethod
    def set_shape(self, shape: DraftShape) -> None:
        """Sets the largest shape to propose.

        Raises `DraftShapeError` if the head cannot draft it, `EngineError` if there is no head.
        """

    def weights_changed(self) -> None:
        """Takes over new weights of the target and the head, which were copied into their modules; no request runs.

        Forgets what was learned with the old weights."""
        return  # no weights

    def close(self) -> None:
        """Removes the hooks from the target."""
        return  # no hooks


def unread_tokens(requests: Sequence[Request], counts: Sequence[int], device: torch.device, ahead: int = 0) -> Tensor:
    """Returns the next counts[b] unread tokens of each request's context_ids, one request after another, [1, T].

    ahead: of each token the one so many places after it, 0 after the end of the text."""
    found: list[int] = []
    for request, count in zip(requests, counts, strict=True):
        begin = request.n_read + ahead
        part = request.context_ids[begin : begin + count]
        found += [*part, *[0] * (count - len(part))]
    return upload([found], device)


class NoDrafter(Drafter):
    """A drafter for plain decoding: every tree is a root only."""

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        return root_only(rows.roots)

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        return root_only(rows.roots), [[] for _ in requests]

    def set_shape(self, shape: DraftShape) -> None:
        raise EngineError(f"draft shape {shape.name} is given, but the engine has no draft head; give it one")


class WrappedDrafter(Drafter):
    """A drafter that passes every call on to `inner`; subclasses change some."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.ends_chains = inner, inner.ends_chains

    @property
    def lookahead(self) -> int:
        return self.inner.lookahead

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        return self.inner.reach(shape, skips=skips)

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        self.inner.admit(first_row, requests, tokens)

    def positions_read(self, row: int, request: Request) -> int:
        return self.inner.positions_read(row, request)

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        return self.inner.propose(requests, rows)

    def skip(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        return self.inner.skip(requests, rows)

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        return self.inner.probe(requests, rows, width)

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        self.inner.observe(requests, result)

    def move_row(self, destination: int, source: int) -> None:
        self.inner.move_row(destination, source)

    def set_shape(self, shape: DraftShape) -> None:
        self.inner.set_shape(shape)

    def weights_changed(self) -> None:
        self.inner.weights_changed()

    def close(self) -> None:
        self.inner.close()
