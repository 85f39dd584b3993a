"""Acceptance of drafts that were never verified: compare them with committed tokens.

Shapes: B rows, L positions probed in all rows, D size of the draft vocabulary.

    unread token     x5   x6   x7        the head at x5 predicts x6, at x6 x7; the token after x7 is not known yet
    right token      x6   x7   -

The drafts here are the most probable tokens, also for requests that draw their drafts (rejection sampling). This is an
approximation. It only decides when drafting is tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.infer.drafters.draft_rollout import DraftRollout
from toolkit.infer.drafters.drafter import Ranks

PROBED = 32  # most positions probed in all rows (at least one a row): the output matrix may be large


def shadow_ranks(nodes: DraftRollout, counts: Sequence[int], to_target: Tensor, width: int) -> Ranks:
    """Returns the rank of each right token among the `width` most probable drafts; `width` if it is absent.

    nodes: the unread positions, just read by stage 0; counts[b] of row b. to_target [D]: target ids of the draft
    vocabulary.
    """
    each = max(1, PROBED // len(counts))
    places = [(row, at) for row, held in enumerate(counts) for at in range(max(0, held - 1 - each), held - 1)]
    ranks: Ranks = [[] for _ in counts]
    if not places:
        return ranks
    rows, at = torch.tensor(places, device=to_target.device).T
    scores = nodes.logits(nodes.states[rows, at])  # [L, D]
    drafts = to_target[scores.topk(min(width, len(to_target)), dim=-1).indices]
    right = drafts == nodes.tokens[rows, at + 1][:, None]
    found = torch.where(right.any(dim=1), right.int().argmax(dim=1), width)
    for (row, _), rank in zip(places, found.tolist(), strict=True):
        ranks[row].append(rank)
    return ranks
