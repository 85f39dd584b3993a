"""Apply grammars to draft trees: cut the drafts outside of them, and mask the target's logits at every node that stays.

The cut comes before the target's forward, so a forbidden draft costs it nothing. Where a row's drafts were drawn from
the head's distribution q, the rules of `verifiers.py` need the distribution of the drafts that stay: q of the allowed
tokens, normalised. Whether a chain ends at a forbidden draft depends on the tokens before it and on chance alone, so
the rules stay exact:

    q at the root   a .5   b .3   x .2      x is outside of the grammar
    drafted         a or b (80 %)           kept; drawn from q: a .625, b .375
                    x (20 %)                cut; the target's own token follows, from its masked distribution p

Shapes: B rows of the batch, R of them edited, N nodes of a tree, n nodes in this call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from toolkit.infer.kernels.tree_reference import ancestor_mask
from toolkit.infer.request.draft_tree import DraftTree, Proposal, chain_tree, root_only, without_padding
from toolkit.infer.request.request import Request
from toolkit.infer.request.upload import upload


class GrammarMasks:
    """The masks of some rows of the batch: in every round first `cut`, then `apply`. Rows without a grammar may be
    among them.

    requests: all requests of the batch. rows: the numbers of the edited ones, ascending.
    """

    def __init__(self, requests: Sequence[Request], rows: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self._rows, self._vocab_size, self._device = list(rows), vocab_size, device
        self._requests = list(requests)
        self._packed = torch.empty(0)  # [R, N, V / 8] uint8, of the last tree
        self._tree: DraftTree | None = None

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return the tree without the drafts outside of their row's grammar, and without the nodes below them.

        Reads the tree on the host. Keeps the masks of the nodes that stay for `apply`.
        """
        host = torch.stack((tree.tokens, tree.parents, tree.valid.long()), dim=1).tolist()
        kept = [[node for node, real in enumerate(valid) if real] for _, _, valid in host]
        offered = sum(map(len, kept))
        masks: list[list[bytes | None]] = [[None] * tree.nodes for _ in host]
        for row, request in enumerate(self._requests):
            if request.grammar is not None:
                tokens, parents, _ = host[row]
                masks[row] = request.grammar.masks(request.output_ids, tokens, parents, kept[row])
                kept[row] = [node for node in kept[row] if masks[row][node] is not None]
        if sum(map(len, kept)) == offered:
            kept = [list(range(tree.nodes)) for _ in host]
        else:
            tree = _smaller(tree, host, kept)
        table = [[masks[row][node] for node in kept[row]] for row in self._rows]
        rows = [[*row, *[None] * (tree.nodes - len(row))] for row in table]
        self._packed = packed(rows, -(-self._vocab_size // 8), self._device)
        if tree.proposal is not None:
            tree = replace(tree, proposal=self._within(tree.proposal))
        self._tree = tree
        return tree

    def apply(self, logits: Tensor, tree: DraftTree, first: int) -> None:
        """Set the logits of forbidden tokens to -inf, in place: [R, n, V] fp32, at the nodes first .. first+n-1.

        tree: the result of the last `cut`.
        """
        assert tree is self._tree, "the masks are those of another tree"
        logits.masked_fill_(~self._allowed(first, logits.shape[1]), -torch.inf)

    def _allowed(self, first: int, nodes: int) -> Tensor:
        """Returns [R, n, V] bool."""
        return unpacked(self._packed[:, first : first + nodes])[..., : self._vocab_size]

    def _within(self, proposal: Proposal) -> Proposal:
        """Returns the distributions of the drafts that stay."""
        nodes = proposal.q.shape[1]
        rows = upload(self._rows, self._device)
        before, allowed = proposal.q[rows], self._allowed(0, nodes)[..., proposal.ids]
        q = before * allowed
        q = q / q.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        q = torch.where(allowed.all(dim=-1, keepdim=True), before, q)
        return replace(proposal, q=proposal.q.index_copy(0, rows, q))


def packed(masks: Sequence[Sequence[bytes | None]], size: int, device: torch.device) -> Tensor:
    """Returns masks of `size` bytes, of R rows with n nodes each, as [R, n, size] uint8. None allows every token."""
    joined = b"".join(b"\xff" * size if mask is None else mask for row in masks for mask in row)
    found = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(masks), len(masks[0]), size)
    return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)  # as `upload`


def unpacked(masks: Tensor) -> Tensor:
    """Returns `packed` masks as bool, with a multiple of 8 tokens."""
    return _bits_of_bytes(masks.device)[masks.long()].view(torch.bool)


@cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """Returns the eight bits of every byte, one in each byte of a number: [256] int64. Faster than shifts of bytes."""
    bits = [[byte >> bit & 1 for bit in range(8)] for byte in range(256)]
    return torch.tensor(bits, dtype=torch.uint8).view(torch.int64).flatten().to(device)


def _smaller(tree: DraftTree, host: list[list[list[int]]], kept: Sequence[Sequence[int]]) -> DraftTree:
    """Returns the tree of the nodes kept[row] of each row, as narrow as they allow.

    host: tokens and parents of each row. kept: ascending node numbers with the root; with a node also its ancestors.
    """
    roots, nodes = tree.tokens[:, 0], max(map(len, kept))
    if nodes == 1:
        return root_only(roots)
    if tree.is_chain:
        whole = tree.proposal
        proposal = None if whole is None else replace(whole, q=whole.q[:, : nodes - 1])
        return chain_tree(roots, tree.tokens[:, 1:nodes], [len(row) - 1 for row in kept], proposal)
    # Padding nodes are children of the root. They are not valid and no node attends to them.
    table: list[list[list[int]]] = [[], [], []]
    for (own, above, _), row in zip(host, kept, strict=True):
        number, spare = {node: place for place, node in enumerate(row)}, [0] * (nodes - len(row))
        places = [-1, *(number[above[node]] for node in row[1:])]
        levels = [0]
        for parent in places[1:]:
            levels.append(levels[parent] + 1)
        table[0].append([own[node] for node in row] + spare)
        table[1].append(places + spare)
        table[2].append(levels + [1 for _ in spare])
    deepest = max(map(max, table[2]))
    tokens, parents, depths = (upload(part, roots.device) for part in table)
    counts = upload([len(row) for row in kept], roots.device)
    valid = torch.arange(nodes, device=roots.device) < counts[:, None]
    mask = without_padding(ancestor_mask(parents[:, 1:], deepest), valid)
    return DraftTree(tokens, parents, depths, mask, valid, deepest, is_chain=False)
