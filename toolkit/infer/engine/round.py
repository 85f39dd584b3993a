"""One round as a function of static buffers: draft, build, verify, choose, walk, compact, and what the next one needs.

Between its first kernel and its last the host decides nothing: sequence lengths, pages, tokens and settings are read
from `RoundState`, shapes are those of the bucket. So the same function runs as it is, or is recorded once and run again
on whatever the buffers hold by then. Every part is the eager engine's own.

Shapes: B rows of the bucket, N nodes a row, A longest accepted path (root included), W feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import AttentionMetadata
from toolkit.infer.attention.paged import PagedTreeMetadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.drafters.draft_rollout import DraftRollout, HeadReader
from toolkit.infer.drafters.draft_sampling import BestTokens
from toolkit.infer.drafters.head_drafter import AutoregressiveDrafter, room_for
from toolkit.infer.graphs.round_state import RoundState
from toolkit.infer.graphs.static_sampling import StaticSampling
from toolkit.infer.kernels.dispatch import Ops
from toolkit.infer.kernels.tree_reference import Followed
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, root_only
from toolkit.infer.verify.sampler import greedy
from toolkit.infer.verify.verifiers import nodes_at_once
from toolkit.infer.verify.walk import follow
from toolkit.targets.load import Target


@dataclass(frozen=True)
class RoundContext:
    """What all rounds of an engine run on. drafter: None where nothing is drafted."""

    target: Target
    forward: TargetForward
    cache: KVCache
    ops: Ops
    drafter: AutoregressiveDrafter | None
    max_context: int
    state: RoundState


class DeviceRound:
    """The round of `rows` rows that draft `shape` (None: nothing). distributions: None where all rows are greedy.

    followed.numbers: what the host reads afterwards.
    """

    def __init__(
        self, context: RoundContext, rows: int, shape: DraftShape | None, distributions: StaticSampling | None
    ) -> None:
        self._context, self.rows, self._shape, self._distributions = context, rows, shape, distributions
        self._longest = 1 if shape is None else shape.num_steps + 1
        self._roots, self._lengths, self._counts, self._real = context.state.row_states[:, :rows]
        self._table = context.state.table[:rows]
        self._span = self._table.shape[1] * context.cache.pool.page_size
        self.followed: Followed

    def __call__(self) -> None:
        tree = self._draft()
        hidden, positions = self._forward(tree)
        followed = follow(tree, self._choose(hidden, positions + 1))
        self._keep_features(followed)
        if not tree.is_chain:
            self._compact(followed)
        self._advance(followed)
        self.followed = followed

    def _draft(self) -> DraftTree:
        drafter, shape = self._context.drafter, self._shape
        if shape is None:
            return root_only(self._roots.clone())
        assert drafter is not None, "a shape came without a head"
        pending = drafter.inputs
        here = (slice(0, self.rows), slice(0, self._longest))
        hidden = drafter.reader.head.first_hidden(pending.features[here])
        begin = self._lengths - self._counts
        # Clones: the round itself writes the next round's.
        nodes = StaticDraftRollout(
            drafter.reader, pending.tokens[here].clone(), hidden, pending.carry[: self.rows].clone(), begin,
            self._counts.clone(), room_for(shape), self._head_plan, self._span,
        )  # fmt: skip
        own = [shape] * self.rows
        tree = drafter.tree_from(nodes, self._roots.clone(), shape, own, BestTokens())
        pending.carry[: self.rows] = nodes.finish()
        return tree

    def _plan(self, cache: KVCache, lengths: Tensor, mask: Tensor, depths: Tensor) -> AttentionMetadata:
        return PagedTreeMetadata(cache, self._context.ops, self._table, lengths, self._span, mask, depths)

    def _head_plan(self, stage: int, begin: Tensor, sees: Tensor, depths: Tensor) -> AttentionMetadata:
        drafter = self._context.drafter
        assert drafter is not None
        return self._plan(drafter.reader.caches[stage], begin, sees, depths)

    def _forward(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """The target's hidden states [B, N, H] at every node, and the nodes' positions [B, N]."""
        positions = self._lengths[:, None] + tree.depths
        plan = self._plan(self._context.cache, self._lengths.clone(), tree.mask, tree.depths)
        return self._context.forward(tree.tokens, positions.clamp(max=self._context.max_context - 1), plan), positions

    def _choose(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The target's token behind every node, [B, N]; positions [B, N] of these tokens."""
        nodes = nodes_at_once(*hidden.shape[:2], drawn=False)
        parts = zip(hidden.split(nodes, dim=1), positions.split(nodes, dim=1), strict=True)
        return torch.cat([self._tokens(self._context.target.logits(part), at) for part, at in parts], dim=1)

    def _tokens(self, logits: Tensor, positions: Tensor) -> Tensor:
        best = greedy(logits)
        if self._distributions is None:
            return best
        return torch.where(
            self._context.state.hot[: self.rows, None], self._distributions.draw(logits, positions), best
        )

    def _keep_features(self, followed: Followed) -> None:
        """The accepted path becomes what the head has not read yet; the tokens after it are those just chosen."""
        drafter = self._context.drafter
        if drafter is None:
            return
        features = drafter.reader.head.features().to(drafter.reader.dtype)
        path = followed.path[:, :, None].expand(-1, -1, features.shape[2])
        width = followed.path.shape[1]
        drafter.inputs.features[: self.rows, :width] = features.gather(1, path)
        drafter.inputs.tokens[: self.rows, :width] = followed.tokens

    def _compact(self, followed: Followed) -> None:
        """Move the target's keys of accepted nodes to the places they would have in plain decoding."""
        cache, begin = self._context.cache, self._lengths[:, None]
        at = torch.arange(followed.path.shape[1], device=begin.device).expand_as(followed.path)
        source = torch.where(at <= followed.accepted[:, None], followed.path, at)
        places = [cache.pool.places_in(self._table, begin + one).flatten() for one in (at, source)]
        cache.move_entries(*places)

    def _advance(self, followed: Followed) -> None:
        """Rows stand where the round has left them; padding stays."""
        committed = followed.accepted + 1
        last = followed.tokens.gather(1, followed.accepted[:, None])[:, 0]
        self._roots.copy_(last * self._real)
        self._lengths.add_(committed * self._real)
        self._counts.copy_(committed * self._real + (1 - self._real))


# stage, committed positions it has read [B], sees [B, n, M], depths [B, M] -> how the newest n of M nodes attend
HeadMetadata = Callable[[int, Tensor, Tensor, Tensor], AttentionMetadata]


class StaticDraftRollout(DraftRollout):
    """An expansion whose rows begin where a tensor says, and whose plans come from `plan`.

    begin [B]: committed positions that the head has read. reach: what no position of any forward reaches, so that the
    head's tables are as large as they will be: one that grew later would leave a recording with freed memory.
    """

    def __init__(
        self, reader: HeadReader, tokens: Tensor, hidden: Tensor, carry: Tensor, begin: Tensor, counts: Tensor,
        room: int, plan: HeadMetadata, reach: int,
    ) -> None:  # fmt: skip
        self._plan_of, self._reach = plan, reach
        super().__init__(reader, tokens, hidden, carry, begin, counts, room)

    def _plan(self, sees: Tensor, depths: Tensor) -> tuple[AttentionMetadata, int]:
        return self._plan_of(self.stage, (self._begin - self.stage).clamp(min=0), sees, depths), self._reach
