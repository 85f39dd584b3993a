"""One round of drafting: the head reads the unread positions, then the drafted nodes, level by level.

Shapes: B rows, P unread positions a row, M nodes a row (unread positions first, then drafted nodes as they are added),
n nodes added at a time, H head hidden size, S stages of the head.

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
"""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor, nn

from toolkit.infer.attention.metadata import AttentionMetadata, tree_metadata
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafting_head import DraftingHead, head_scoring, stage_shape


class HeadReader:
    """A head with one KV cache per stage; `read` writes to them."""

    def __init__(
        self, head: DraftingHead, embed: nn.Module, dtype: torch.dtype, device: torch.device, pool: PagePool
    ) -> None:
        self.head = head
        self._embed = embed
        self._scoring = head_scoring(head)
        self.dtype = dtype
        shape = stage_shape(head, torch.empty(0, dtype=dtype, device=device))
        self.caches = [KVCache(shape, pool) for _ in range(head.stages)]

    def read(
        self, stage: int, tokens: Tensor, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata, reach: int
    ) -> Tensor:
        """Runs a stage over tokens [B, n], hidden [B, n, H], positions [B, n] < reach -> [B, n, H]."""
        rows, new = tokens.shape
        layers = count()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(rows, new, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            return metadata.attend(next(layers), q, k, v, self._scoring).flatten(0, 1)

        embeds = self._embed(tokens).to(self.dtype).flatten(0, 1)
        out = self.head.step(stage, embeds, hidden.flatten(0, 1), positions.flatten(), attend, reach)
        return out.view(rows, new, -1)


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
