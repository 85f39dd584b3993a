"""What a head would have drafted at positions whose next token is known by now.

Shapes: B rows, P pending positions a row, L positions looked at in all, H head hidden size, D ids drafted from.

    pending (token)   x5   x6   x7        the head at x5 predicts x6, at x6 x7, at x7 what nobody knows yet
    right token       x6   x7   -

Drafts drawn from the head's law (rejection sampling) are judged by their most probable tokens here, an approximation
that only decides when drafting is tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.infer.drafters.draft_rollout import DraftRollout
from toolkit.infer.drafters.drafter import Ranks

PROBED = 32  # positions drafted from, of all rows together (but at least one a row): the output matrix may be large


def shadow_ranks(nodes: DraftRollout, counts: Sequence[int], to_target: Tensor, width: int) -> Ranks:
    """nodes: the pending positions as stage 0 has just read them, counts[b] of row b. to_target [D]: target ids."""
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
