"""Drafts with a block drafter (`heads/dspark.py`).

One pass scores all levels of a draft, which are then chosen in turn.

Shapes: B rows, P unread positions a row, b places of a block, n nodes of a level, H head hidden size, D size of the
draft vocabulary.

With L tokens committed, the root x_{L-1} is the first place of the block. Of earlier positions the cache has keys and
values of the target's features; those of the block stand after them for one pass, and the next features overwrite them:

    position       ..  L-3      L-2       L-1       L        ..   L-2+b
    cache          ..  f_{L-3}  f_{L-2}   x_{L-1}   mask 1   ..   mask b-1
    scores of                             level 1   level 2  ..   level b

A DFlash block has one mask more, and its first place is no draft: mask 1 scores level 1. Places of a block see each
other as in training: all of them, or of a causal head those before.

In a tree the nodes of a level differ by the correction of their own token alone (`heads/correction.py`), so all nodes
that can be in the tree are expanded: it is best-first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count

import torch
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.correction import Serving
from toolkit.heads.decoder_layer import using
from toolkit.heads.dspark import DSparkHead
from toolkit.infer.attention.metadata import AttentionMetadata, tree_metadata
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.draft_rollout import DraftRollout, Draws
from toolkit.infer.drafters.drafter import DraftRanks
from toolkit.infer.drafters.drafting_head import DraftingHead, HeadReader
from toolkit.infer.drafters.head_drafter import CATCH_UP, HeadDrafter
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.params import DraftShapeError
from toolkit.infer.verify.verifiers import LOGIT_ROWS
from toolkit.targets.target import Target


class BlockReader(HeadReader):
    """`read` writes known positions to the cache; `draft` runs a block; `logits` corrects its scores by the tokens
    before."""

    def __init__(self, head: DraftingHead, target: Target, pool: PagePool) -> None:
        super().__init__(head, target, pool)
        self._block, self.writes_alone = block_of(head), False  # `read` does no more than that
        self.corrects = self._block.config.correction != "none"
        self._serving = Serving(lambda ids: self._embed(ids).to(self.dtype), head.scores, self._rows())

    def weights_changed(self) -> None:
        """Copies the rows again, in place: recorded rounds read them."""
        if self._serving.rows is not None:
            rows = self._rows()
            assert rows is not None, "it had some"
            self._serving.rows.copy_(rows)

    def _rows(self) -> Tensor | None:
        """The correction's weights of the draft vocabulary. Those of a head without an output matrix are of all ids."""
        return self._block.correction.rows(None if self.head.config.own_vocabulary else self.head.to_target)

    def read(
        self, stage: int, tokens: Tensor, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata, reach: int
    ) -> Tensor:
        """Write the keys and values of hidden [B, n, ..] at positions [B, n] < reach. Returns `hidden`."""
        rows, new = positions.shape
        layers = count()

        def write(k: Tensor, v: Tensor) -> None:
            k, v = (x.view(rows, new, *x.shape[1:]).transpose(1, 2) for x in (k, v))
            metadata.write(next(layers), k, v)

        with using(self.head.ops):
            self._block.write_context(hidden.flatten(0, 1), positions.flatten(), reach, write)
        return hidden

    def draft(
        self, roots: Tensor, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata, reach: int
    ) -> Tensor:
        """Roots [B, 1], hidden [B, 1, ..] of the features before them, positions [B, b] -> states [B, b, H]."""
        size = positions.shape[1]
        return super().read(0, roots.expand(-1, size), hidden.expand(-1, size, -1), positions, metadata, reach)

    def scores(self, states: Tensor) -> Tensor:
        """States [B, n, H] -> the `scores` [B, n, D] of `logits`, of no width if the correction does not read them."""
        return self.head.logits(0, states) if self._block.correction.reads_scores else states[..., :0]

    def logits(self, states: Tensor, scores: Tensor, before: Tensor) -> Tensor:
        """Logits [B, n, D] after tokens [B, n]; [B, 1, D] if they are equal after all of a row. States [B, n, H] and
        `scores` [B, n, D]; or one of a row for all, as of the nodes of a level."""
        with using(self.head.ops):
            return self._block.scores(states, scores, before, self._serving)

    def confidence(self, states: Tensor, before: Tensor) -> Tensor:
        """Chance [B, n] that the target accepts the draft of states [B, n, H], after tokens [B, n], if it accepts those
        before. Only of heads that say it."""
        odds = self._block.confident(self._block.after(states, before, self._serving.embed))
        assert odds is not None, "checked when the draft was loaded"
        return odds.float().sigmoid()


def block_of(head: DraftingHead) -> DSparkHead:
    assert isinstance(head.module, DSparkHead), "a block drafter has a DSpark head"
    return head.module


class BlockRollout(DraftRollout):
    """The unread positions of one round, and the block after them. levels: of the draft.

    block [B, .., H]: the states of its drafts.
    """

    best_first = True
    _reader: BlockReader

    def __init__(
        self, reader: BlockReader, rows: RoundRows, tokens: Tensor, hidden: Tensor, carry: Tensor, levels: int
    ) -> None:
        config = block_of(reader.head).config
        self._size, self._causal, self._lengths, self._levels_drafted = (
            config.block_size, config.causal, rows.lengths, levels
        )  # fmt: skip
        self._first_draft = self._size - reader.head.config.drafts_at_once
        # The room of the nodes that a chain of so many levels would add.
        super().__init__(reader, rows, tokens, hidden, carry, levels=self._size)
        self._place = 0

    def at_roots(self) -> Tensor:
        """Runs the block. Returns the state of its first draft, [B, 1, H]."""
        self._run_block()
        return self.block[:, :1]

    def grow(self, states: Tensor, tokens: Tensor, parents: Tensor | None = None, sees: Tensor | None = None) -> Tensor:
        """Takes the drafts [B, n] of a level. Returns the state of the next draft, [B, 1, H]."""
        if self.within is not None:
            self.within.grow(tokens, parents)
        self._place, self._before = self._place + 1, tokens
        return self.block[:, self._place, None]

    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits [B, n, D] at the current place, corrected by each token before; [B, 1, D] if none is."""
        logits = self._reader.logits(states, self._scores[:, self._place, None], self._before)
        return logits if self.within is None else self.within(logits)

    def best(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As `DraftRollout.best`, with LOGIT_ROWS rows of logits at once: a level may have hundreds of nodes. A grammar
        masks whole levels."""
        parts = self._before.split(max(1, LOGIT_ROWS // len(states)), dim=1)
        if len(parts) == 1 or self.within is not None or not self._reader.corrects:
            return super().best(states, k)
        scores, top = self._scores[:, self._place, None], ops_for(states.device.type).top_log_probs
        found = zip(*(top(self._reader.logits(states, scores, part), k) for part in parts), strict=True)
        values, ids = (torch.cat(one, dim=1) for one in found)
        return values, ids

    def shadow_ranks(self, counts: Sequence[int], to_target: Tensor, width: int) -> DraftRanks:
        """As `DraftRollout.shadow_ranks`, for one position a row: the token before the root, which the root follows."""
        self._run_block(back=1)
        right = self.tokens.gather(1, self._roots)
        drafts = to_target[self.logits(self.block[:, :1])[:, 0].topk(min(width, len(to_target)), dim=-1).indices]
        hits = drafts == right
        found = torch.where(hits.any(dim=1), hits.int().argmax(dim=1), width).tolist()
        # The block stood where the last of the unread positions belong.
        self._read(self.tokens, self.states, self._positions[0], self._levels[0][2])
        return [[rank] if held > 1 else [] for rank, held in zip(found, counts, strict=True)]

    def _run_block(self, back: int = 0) -> None:
        """Runs the block whose first place is the root, or the token `back` places before it."""
        at = (self._roots - back).clamp(min=0)
        lengths, self._before = self._lengths - back, self.tokens.gather(1, at)
        hidden = self.states.gather(1, at[:, :, None].expand(-1, -1, self.states.shape[2]))
        places, sees = _block(self._size, lengths.device, causal=self._causal)
        sees = sees.expand(len(lengths), -1, -1)
        metadata = tree_metadata(self._reader.caches[0], self._table, lengths, self._reach, sees, None)
        states = self._reader.draft(self._before, hidden, lengths[:, None] + places, metadata, self._reach)
        self.block = states[:, self._first_draft :]
        self._scores = self._reader.scores(self.block[:, : self._levels_drafted])


@cache  # never freed: recorded rounds read them
def _block(size: int, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns 0 .. size-1, and which places of a block each of them attends to, [size, size] bool: all, or none later
    than itself."""
    every = torch.ones(size, size, dtype=torch.bool, device=device)
    return torch.arange(size, device=device), every.tril() if causal else every


class BlockDrafter(HeadDrafter):
    """`HeadDrafter` for a block drafter: no more levels than places of a block."""

    reader_class = BlockReader
    reader: BlockReader

    def __init__(
        self, target: Target, draft: DraftCheckpoint, shape: DraftShape, pool: PagePool, *, draws: Draws | None = None
    ) -> None:
        self._draft_confidence, self.ends_chains = draft.draft_confidence, draft.draft_confidence > 0
        super().__init__(target, draft, shape, pool, draws=draws)

    def weights_changed(self) -> None:
        super().weights_changed()
        self.reader.weights_changed()

    def set_shape(self, shape: DraftShape) -> None:
        most = self._head.config.drafts_at_once
        if shape.num_steps > most:
            raise DraftShapeError(
                f"draft shape {shape.as_text()} has {shape.num_steps} levels, but this head drafts blocks of {most} "
                f"tokens; give at most {most}, such as {DraftShape.chain(most).as_text()}"
            )
        super().set_shape(shape)

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        return (CATCH_UP if skips else 0) + shape.num_steps + 1 + block_of(self._head).config.block_size

    def _read_unread(
        self, rows: RoundRows, unread: int, shape: DraftShape | None = None, keep: int = 1
    ) -> BlockRollout:
        held = (slice(len(rows.roots)), slice(unread))
        hidden = self._head.first_hidden(self.inputs.features[held].contiguous())
        carry = self.inputs.carry[held[0]]
        levels = shape.num_steps if shape else 1
        return BlockRollout(self.reader, rows, self.inputs.tokens[held], hidden, carry, levels)

    def _ended(self, nodes: DraftRollout, chain: DraftTree) -> DraftTree:
        """Returns chains that end before the draft with which the chance that all are accepted falls below the draft's
        least confidence. It depends on earlier drafts, not on the one that is left out, so the verify rules stay exact.
        """
        if not self.ends_chains or chain.nodes == 1:
            return chain
        assert isinstance(nodes, BlockRollout)
        chance = self.reader.confidence(nodes.block[:, : chain.nodes - 1], chain.tokens[:, :-1]).cumprod(dim=1)
        counts = ((chance >= self._draft_confidence) & chain.valid[:, 1:]).sum(dim=1).tolist()
        return chain.first_nodes([1 + count for count in counts])
