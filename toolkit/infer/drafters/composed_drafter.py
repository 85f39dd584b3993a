"""A head and suffix lookup in one drafter: lookup's draft in the rows that have one, the head's in the others.

Lookup costs the host some microseconds a token, the head a forward per level. Text that repeats itself (code, quotes,
lists, tables) gives lookup long drafts; elsewhere it has none and the head drafts.

    row 0    root ── a ── b ── c ── d        lookup: the text after an earlier occurrence of its end
    row 1    root ── e ── g                  the head's tree
                 └── f

A row has one of the two, not both in one tree. With a fixed shape it drafts by lookup wherever the expected
accept_length of that is above LEAST_LENGTH, a chain with as many nodes as the shape. Adaptive drafting chooses the
depth, and whether the head runs (`lookup.py`).

The verify rules stay exact: lookup's drafts depend on the committed tokens only, as the best tokens of a head do. Rows
whose drafts were drawn from the head's distribution keep it; rows with lookup's drafts are verified by the target's
draws (`Proposal.drawn`).

Shapes: B rows, N nodes a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.infer.attention.metadata import FEW
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter, WrappedDrafter
from toolkit.infer.drafters.lookup import MatchRates, SuffixAutomaton, SuffixLookup
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, Proposal, chain_tree, without_padding
from toolkit.infer.request.request import Request
from toolkit.infer.request.upload import upload

MOST_DEPTH = FEW - 1  # tokens of lookup's longest draft with adaptive drafting; more nodes take a slower attention
LEAST_LENGTH = 1.4  # expected accept_length from which lookup drafts in place of the head, with a fixed shape

NOTHING: tuple[list[int], list[float]] = ([], [1.0])  # lookup's draft where there is none, and its accept_length
Drafts = list[list[int]]  # lookup's tokens by row; none: the head drafts there


class ComposedDrafter(WrappedDrafter):
    """Drafts by lookup or by `inner`, a drafter with a head.

    depth: tokens of lookup's longest draft; None: as many as `shape` has drafted nodes. corpus: searched too.
    """

    def __init__(
        self, inner: Drafter, shape: DraftShape, depth: int | None = None, corpus: SuffixAutomaton | None = None
    ) -> None:
        super().__init__(inner)
        self._depth, self._corpus = depth, corpus
        self._rates = [MatchRates(), MatchRates()]
        self._texts: WeakKeyDictionary[Request, SuffixLookup] = WeakKeyDictionary()  # of the running requests
        self.shape = shape

    def set_shape(self, shape: DraftShape) -> None:
        self.inner.set_shape(shape)
        self.shape = shape

    def weights_changed(self) -> None:
        self.inner.weights_changed()
        self._rates = [MatchRates(), MatchRates()]

    def depth(self, shape: DraftShape) -> int:
        """Returns the number of tokens of lookup's longest draft beside `shape`."""
        return shape.num_draft_tokens - 1 if self._depth is None else self._depth

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        # The head may not run for a while, and a step of lookup commits up to depth + 1 tokens.
        return self.inner.reach(shape, skips=True) + self.depth(shape) + 1

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        found = self.lookups(requests)
        drafts = [tokens if lengths[-1] >= LEAST_LENGTH else [] for tokens, lengths in found]
        return self.compose(requests, rows, drafts)

    def lookups(self, requests: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
        """Returns lookup's draft for every row, and its expected accept_length by depth from 0."""
        known, self._texts = self._texts, WeakKeyDictionary()
        found, depth = [], self.depth(self.shape)
        for request in requests:
            if not request.speculative:
                found.append(NOTHING)
                continue
            lookup = self._texts[request] = known.get(request) or SuffixLookup(self._rates, self._corpus)
            lookup.read(request)
            found.append(
                lookup.draft(depth if request.shape is None else min(depth, request.shape.num_draft_tokens - 1))
            )
        return found

    def compose(self, requests: Sequence[Request], rows: RoundRows, drafts: Drafts, *, head: bool = True) -> DraftTree:
        """Returns a tree for every row: lookup's chain where `drafts` has one, the head's elsewhere.

        head: False: rows without a draft of lookup get their root only. The head also rests if no row is left to it.
        """
        head_skips = not head or all(draft or not one.speculative for draft, one in zip(drafts, requests, strict=True))
        tree = (self.inner.skip if head_skips else self.inner.propose)(requests, rows)
        return with_chains(tree, rows.roots, drafts) if any(drafts) else tree


def with_chains(tree: DraftTree, roots: Tensor, drafts: Drafts) -> DraftTree:
    """Returns `tree` with the rows that have drafts replaced by chains of these tokens. roots [B]."""
    nodes = max(tree.nodes, 1 + max(map(len, drafts)))
    tokens = upload([draft + [0] * (nodes - 1 - len(draft)) for draft in drafts], roots.device)
    chains = chain_tree(roots, tokens, [len(draft) for draft in drafts])
    chained = upload([bool(draft) for draft in drafts], roots.device)
    more = nodes - tree.nodes
    # Padding nodes are not valid: children of the root, or the next ones of a chain.
    head_rows = (
        pad(tree.tokens, (0, more)),
        chains.parents if tree.is_chain else pad(tree.parents, (0, more)),
        chains.depths if tree.is_chain else pad(tree.depths, (0, more), value=1),
        pad(tree.mask, (0, more, 0, more)),
        pad(tree.valid, (0, more)),
    )
    lookup_rows = (chains.tokens, chains.parents, chains.depths, chains.mask, chains.valid)
    tokens, parents, depths, mask, valid = (
        torch.where(chained.view(-1, *[1] * (of_head.dim() - 1)), of_lookup, of_head)
        for of_head, of_lookup in zip(head_rows, lookup_rows, strict=True)
    )
    deepest = max(tree.deepest, *map(len, drafts))
    return DraftTree(
        tokens, parents, depths, without_padding(mask, valid), valid, deepest, tree.is_chain,
        None if tree.proposal is None else _of_rows(tree.proposal, ~chained, more),
    )  # fmt: skip


def _of_rows(proposal: Proposal, rows: Tensor, more: int) -> Proposal:
    """Returns the distributions of the drafts in `rows` [B] (bool) only, for `more` nodes more."""
    drawn = rows if proposal.drawn is None else proposal.drawn & rows
    return replace(proposal, q=pad(proposal.q, (0, 0, 0, more)), drawn=drawn)
