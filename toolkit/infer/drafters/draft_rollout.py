"""One round of drafting: the head reads the unread positions, then the drafted nodes, level by level.

Shapes: B rows, P unread positions a row, M nodes a row (unread positions first, then drafted nodes as they are added),
n nodes added at a time, H head hidden size, S stages of the head, D size of the draft vocabulary.

A node is a token; the head reads it with the hidden state of the position before. With L tokens committed, x_{L-1} the
root, and k the stage (MTP layer) from 0:

    node (token)     ..  x_{L-2}   x_{L-1}   level 1   level 2
    position         ..  L-3-k     L-2-k     L-1-k     L-k       in stage k
    hidden           stage 0: the target's feature, for nodes up to x_{L-1}
                     stage k > 0: the output of stage k-1 at the parent
                     levels beyond the number of stages: the output of the last stage at the parent
    predicts         ..  level 1+k of the chain after it

Stage 0 drafts level 1 at x_{L-1}; stage 1 drafts level 2 at the nodes of level 1. Stage 1 must first read all nodes
that stage 0 has read. A head of one stage reads each node once.

A probe measures acceptance without a verification. It compares the drafts at unread positions with the tokens that
followed:

    unread token     x5   x6   x7        the head at x5 predicts x6, at x6 x7; the token after x7 is not known yet
    right token      x6   x7   -

Its drafts are the most probable tokens, also for requests that draw their drafts (rejection sampling). This is an
approximation. It only decides when drafting is tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import tree_metadata
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import DraftRanks
from toolkit.infer.drafters.drafting_head import HeadReader


class DraftRollout:
    """The nodes of one round.

    tokens, positions (those of stage 0) and parents (node numbers; -1: the position before the first node): [B, M].
    sees [B, M, M]: which nodes each node attends to, besides all positions read before the round.
    states [B, M, H]: the output of the current stage at each node. stage: the number of that stage.
    """

    def __init__(
        self, reader: HeadReader, rows: RoundRows, tokens: Tensor, hidden: Tensor, carry: Tensor, room: int
    ) -> None:
        """tokens [B, P] and hidden [B, P, H]: the unread positions; the first rows.unread[b] of row b are valid.

        carry [B, S-1, H]: see `DraftInputs`. room: the most nodes that will be added.
        """
        (batch, unread), device = tokens.shape, tokens.device
        self._reader, self._table, self._old_carry = reader, rows.table, carry
        self._reach = rows.span(unread + room)
        self.nodes, self.depth, self.stage = unread, 0, 0
        self.tokens = torch.nn.functional.pad(tokens, (0, room))
        at = torch.arange(unread + room, device=device)
        self._begin = rows.lengths - rows.unread  # [B]: positions that stage 0 has read before
        self.positions = self._begin[:, None] + at
        self.parents = (at - 1).repeat(batch, 1)
        # A row with fewer unread positions has padding after them. No drafted node descends from padding.
        self.sees = torch.zeros(batch, unread + room, unread + room, dtype=torch.bool, device=device)
        self.sees[:, :unread, :unread] = torch.ones(unread, unread, dtype=torch.bool, device=device).tril()
        self.roots = rows.unread[:, None] - 1  # [B, 1]: the node of each row's last token
        self._carries: list[Tensor] = []
        self.states = self._read(hidden, unread)

    def grow(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Adds a level: tokens [B, n] below the nodes `parents` [B, n]. Returns the head's states there, [B, n, H]."""
        added, start = tokens.shape[1], self.nodes
        new = slice(start, start + added)
        self.tokens[:, new] = tokens
        self.parents[:, new] = parents
        self.positions[:, new] = self.positions.gather(1, parents) + 1
        self.sees[:, new] = self.sees.gather(1, parents[:, :, None].expand(-1, -1, self.sees.shape[2]))
        self.sees[:, new, new] |= torch.eye(added, dtype=torch.bool, device=tokens.device)
        self.nodes, self.depth = start + added, self.depth + 1
        if self.stage + 1 < self._reader.head.stages:
            self._next_stage()
        else:
            out = self._read(_rows_of(self.states, parents), added)
            self.states = torch.cat((self.states, out), dim=1)
        return self.states[:, new]

    def at_roots(self) -> Tensor:
        """Returns the current stage's states at each row's last committed token, [B, H]."""
        return _rows_of(self.states, self.roots)[:, 0]

    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits [..., D] of the next token for `states` [..., H] of the current stage."""
        return self._reader.head.logits(self.stage, states)

    def finish(self) -> Tensor:
        """Lets the remaining stages read the nodes too. Returns the carry of the next round, [B, S-1, H]."""
        while self.stage + 1 < self._reader.head.stages:
            self._next_stage()
        return torch.stack(self._carries, dim=1) if self._carries else self._old_carry

    def _next_stage(self) -> None:
        """Lets the next stage read all nodes so far."""
        self._carries.append(self.at_roots())
        below = torch.cat((self._old_carry[:, self.stage, None], self.states), dim=1)
        hidden = _rows_of(below, self.parents[:, : self.nodes] + 1)
        self.stage += 1
        self.states = self._read(hidden, self.nodes)

    def _read(self, hidden: Tensor, new: int) -> Tensor:
        """Runs the current stage over the newest `new` nodes with hidden [B, new, H]."""
        newest, depths = slice(self.nodes - new, self.nodes), self.positions[:, : self.nodes] - self._begin[:, None]
        # Stage k has read k positions fewer. (A row that is too short for that gets no drafts.)
        begin = (self._begin - self.stage).clamp(min=0)
        sees = self.sees[:, newest, : self.nodes]
        metadata = tree_metadata(self._reader.caches[self.stage], self._table, begin, self._reach, sees, depths)
        positions = (self.positions[:, newest] - self.stage).clamp(min=0)
        return self._reader.read(self.stage, self.tokens[:, newest], hidden, positions, metadata, self._reach)


def _rows_of(states: Tensor, numbers: Tensor) -> Tensor:
    """Returns states [B, M, H] at the node numbers [B, n]: [B, n, H]."""
    return states.gather(1, numbers[:, :, None].expand(-1, -1, states.shape[2]))


PROBED = 32  # most positions probed in all rows (at least one a row): the output matrix may be large


def shadow_ranks(nodes: DraftRollout, counts: Sequence[int], to_target: Tensor, width: int) -> DraftRanks:
    """Returns the rank of each right token among the `width` most probable drafts; `width` if it is absent.

    nodes: the unread positions, just read by stage 0; counts[b] of row b. to_target [D]: target ids of the draft
    vocabulary.
    """
    each = max(1, PROBED // len(counts))
    places = [(row, at) for row, held in enumerate(counts) for at in range(max(0, held - 1 - each), held - 1)]
    ranks: DraftRanks = [[] for _ in counts]
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
