"""Choose the next draft of a chain: the most probable token, or a token drawn from the head's distribution q.

Shapes: B rows, R of them draw, D size of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.request.draft_tree import Proposal
from toolkit.infer.request.request import Request
from toolkit.infer.request.upload import upload
from toolkit.infer.verify.token_distribution import RowDistributions, Stream, draw_from

Draws = Callable[[Request], bool]  # whether a request's drafts are drawn


class DraftSampling(Protocol):
    """Chooses the drafts of one round. Call it once per level, then ask for the distributions drawn from."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns draft vocabulary ids [B, 1] for logits [B, 1, D]."""
        ...

    def proposal(self) -> Proposal | None:
        """Returns the distributions; None if nothing was drawn."""
        ...


class BestTokens:
    """Chooses the most probable token in every row."""

    def __call__(self, logits: Tensor) -> Tensor:
        return ops_for(logits.device.type).argmax(logits)

    def proposal(self) -> None:
        return None


class DrawnTokens:
    """Draws the drafts of requests for which `draws` is true; other rows take the most probable token.

    ids [D]: the target ids of the draft vocabulary. The request's temperature, top-k, top-p and min-p shape q too. The
    output distribution is exact for any q, but this q is nearer to the target's p. The random numbers are independent
    of the target's and of other rounds'.
    """

    def __init__(self, requests: Sequence[Request], ids: Tensor, draws: Draws) -> None:
        hot = [row for row, request in enumerate(requests) if draws(request)]
        self._ids, self._batch = ids, len(requests)
        self._all = not any(request.params.temperature > 0 and not draws(request) for request in requests)
        self._hot = upload(hot, ids.device, torch.long)
        self._distributions = RowDistributions.of([requests[row].params for row in hot], ids.device)
        self._roots = upload([requests[row].length for row in hot], ids.device, torch.long)[:, None]
        self._drawn_from: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        best = logits.max(dim=-1).indices
        q = self._distributions.probs(logits[self._hot])
        q = torch.where(q[..., :1].isnan(), 1 / q.shape[-1], q)  # a head with broken weights: all of a row is nan
        positions = self._roots + len(self._drawn_from)
        self._drawn_from.append(q)
        drawn = draw_from(q[:, 0], self._distributions.round_uniform(self._roots, positions, Stream.DRAFT)[:, 0])
        return best.index_copy(0, self._hot, drawn[:, None])

    def proposal(self) -> Proposal:
        q = torch.cat(self._drawn_from, dim=1)
        drawn = None if self._all else torch.zeros(self._batch, dtype=torch.bool, device=q.device)
        if drawn is not None:
            drawn[self._hot] = True
        return Proposal(q.new_zeros(self._batch, *q.shape[1:]).index_copy(0, self._hot, q), self._ids, drawn)


def draft_sampling_for(requests: Sequence[Request], ids: Tensor, draws: Draws | None) -> DraftSampling:
    """Returns the sampling of one round: `BestTokens` if no request draws. draws None: no request ever draws."""
    if draws is None or not any(map(draws, requests)):
        return BestTokens()
    return DrawnTokens(requests, ids, draws)
