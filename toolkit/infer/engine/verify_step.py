"""One target forward over the nodes of every row, and what it says of them.

Shapes: B running rows, N nodes a row, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.infer.attention.metadata import tree_metadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.request.request import Request
from toolkit.infer.verify.sampler import Choices, Sampler
from toolkit.infer.verify.verifiers import Verifier, nodes_at_once
from toolkit.infer.verify.walk import VerifyResult, moved_entries, walk


class TreeVerifier:
    """Its distributions and the verifier decide how far each tree was right; the cache then holds what was accepted."""

    def __init__(self, forward: TargetForward, cache: KVCache, verifier: Verifier, max_context: int) -> None:
        self._target, self._forward, self._cache = forward.target, forward, cache
        self._verifier, self._max_context = verifier, max_context
        self._sampler: Sampler | None = None  # None: the rows changed

    def rows_changed(self) -> None:
        """Other requests run, or in other rows."""
        self._sampler = None

    def __call__(self, requests: Sequence[Request], tree: DraftTree) -> tuple[VerifyResult, Choices]:
        """A row of L tokens has the target's keys of L - 1; its root is the last of them."""
        lengths = [request.length - 1 for request in requests]
        held, span = torch.tensor(lengths, device=self._target.device), max(lengths) + tree.nodes
        table = self._cache.pool.table(0, len(lengths), self._cache.pool.pages_of(span), held.device)
        plan = tree_metadata(self._cache, table, held, span, tree.mask, tree.depths)
        positions = at = held[:, None] + tree.depths
        if max(lengths) + tree.deepest >= self._max_context:
            # Nodes past the context are never committed; clamping only keeps learned position tables in range.
            at = positions.clamp(max=self._max_context - 1)
        hidden = self._forward(tree.tokens, at, plan)
        choices = self._choose(requests, hidden, positions + 1, tree)
        result = walk(tree, choices.tokens, choices.extra)
        if not tree.is_chain:
            self._compact(result, lengths)
        return result, choices

    def _choose(self, requests: Sequence[Request], hidden: Tensor, positions: Tensor, tree: DraftTree) -> Choices:
        """The target's token after every node: hidden [B, N, H], positions [B, N] of those tokens."""
        if self._sampler is None or self._sampler.outdated:
            self._sampler = Sampler(requests, self._target.vocab_size, self._target.device, self._verifier)
        nodes = nodes_at_once(*hidden.shape[:2], drawn=tree.proposal is not None)
        if nodes >= hidden.shape[1]:
            return self._sampler(self._target.logits(hidden), positions, tree)
        parts = zip(hidden.split(nodes, dim=1), positions.split(nodes, dim=1), strict=True)
        return Choices.joined(
            [self._sampler(self._target.logits(part), at, tree, i * nodes) for i, (part, at) in enumerate(parts)]
        )

    def _compact(self, result: VerifyResult, lengths: list[int]) -> None:
        """Move the keys of accepted nodes to the places they would have in plain decoding."""
        place = self._cache.pool.place
        moves = [(place(row, to), place(row, of)) for row, to, of in moved_entries(result, lengths)]
        if moves:
            self._cache.move_entries(*torch.tensor(moves, device=self._target.device).T)
