"""What changes the target's logits before a token is chosen: penalties, logit bias and min_tokens, and grammars.

An edit depends on one token's logit and on the count of this token in the preceding text. Only tokens of the preceding
text, tokens with a bias and stop ids can change: C candidates a row in place of the vocabulary. The text before the
token that a node chooses is the committed text and the drafts on the node's path. The root is committed already and is
not counted twice:

    committed  ... x      tree  x ── a ── b          at node b: committed, a, b
                                  └─ c               at node c: committed, c

A grammar cuts the drafts outside of it before the target's forward, so a forbidden draft costs it nothing, and masks
the logits at every node that stays. Where a row's drafts were drawn from the head's distribution q, the rules of
`verifiers.py` need the distribution of the drafts that stay: q of the allowed tokens, normalised. Whether a chain ends
at a forbidden draft depends on the tokens before it and on chance alone, so the rules stay exact:

    q at the root   a .5   b .3   x .2      x is outside of the grammar
    drafted         a or b (80 %)           kept; drawn from q: a .625, b .375
                    x (20 %)                cut; the target's own token follows, from its masked distribution p

Shapes: B rows of the batch, R of them edited, N nodes of a tree, n nodes in this call, C candidates a row,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from toolkit.infer.kernels.tree_reference import ancestor_mask
from toolkit.infer.request.draft_tree import DraftTree, Proposal, chain_tree, root_only, upload, without_padding
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


def penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def is_edited(request: Request) -> bool:
    """Returns whether the target's logits are edited before the next token of this request is chosen."""
    return penalises(request.params) or bool(request.params.logit_bias) or below_min_tokens(request)


def below_min_tokens(request: Request) -> bool:
    """Returns whether min_tokens still forbids the stop ids."""
    return bool(request.stop_set) and len(request.output_ids) < request.params.min_tokens


class LogitEdits:
    """The edits of some rows of the batch. `apply` first counts the new tokens of their answers.

    requests: all requests of the batch. rows: the numbers of the edited ones, ascending.
    """

    def __init__(self, requests: Sequence[Request], rows: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.rows = upload(rows, device, torch.long)
        self._requests = [requests[row] for row in rows]
        size = (len(rows), vocab_size)
        self._counts = torch.zeros(size, dtype=torch.float32, device=device)  # of each token in the answer
        self._in_prompt = torch.zeros(size, dtype=torch.bool, device=device)
        self._bias = torch.zeros(size, dtype=torch.float32, device=device)
        self._stops = torch.zeros(size, dtype=torch.bool, device=device)
        self._read = [0] * len(rows)  # answer tokens counted
        biases = [request.params.biases for request in self._requests]
        stops = [[token for token in request.stop_set if token < vocab_size] for request in self._requests]
        prompts = [one.prompt_ids if one.params.repetition_penalty != 1 else [] for one in self._requests]
        added = [value for bias in biases for value in bias.values()]
        self._bias[self._places(biases)] = upload(added, device, torch.float32)
        self._stops[self._places(stops)] = True
        self._in_prompt[self._places(prompts)] = True
        self._known = [{*one[0], *one[1], *one[2]} for one in zip(biases, stops, prompts, strict=True)]
        self._candidates = self._padded([sorted(known) for known in self._known])
        self._settings(device)

    def _places(self, ids: Sequence[Iterable[int]]) -> tuple[Tensor, Tensor]:
        """Returns the rows and ids of all entries of `ids`, which has a collection for each row."""
        pairs = [(row, one) for row, some in enumerate(ids) for one in some]
        rows, tokens = upload(pairs, self.rows.device, torch.long).view(-1, 2).unbind(dim=1)
        return rows, tokens

    def _settings(self, device: torch.device) -> None:
        params = [request.params for request in self._requests]

        def column(values: list[float]) -> Tensor:
            return upload(values, device, torch.float32)[:, None, None]

        self._repetition = column([p.repetition_penalty for p in params])
        self._frequency = column([p.frequency_penalty for p in params])
        self._presence = column([p.presence_penalty for p in params])
        first = [len(r.prompt_ids) + r.params.min_tokens for r in self._requests]
        self._stops_from = upload(first, device)[:, None]  # the first position where a stop id is allowed

    def apply(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int) -> None:
        """Edits logits in place: [R, n, V] fp32, at the nodes first .. first+n-1 of the edited rows.

        positions [R, n]: index in the sequence of the token that each node chooses. tree: of the whole batch.
        """
        self._follow()
        nodes = logits.shape[1]
        drafts = tree.tokens[self.rows, 1:]
        on_path = tree.mask[self.rows, first : first + nodes, 1:]
        # A token may occur twice in `ids`. Both entries then hold the same value, so either may be kept.
        ids = torch.cat((self._candidates, drafts), dim=1)
        repeated = (drafts[:, :, None] == ids[:, None]).float()
        counts = self._counts.gather(1, ids)[:, None] + on_path.float() @ repeated
        index = ids[:, None].expand(-1, nodes, -1)
        logits.scatter_(2, index, self._edited(logits.gather(2, index), counts, ids, positions))

    def _edited(self, logits: Tensor, counts: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the edited logits [R, n, C]. logits, counts [R, n, C]: of the tokens ids [R, C]."""
        in_answer = counts > 0
        scaled = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = torch.where(in_answer | self._in_prompt.gather(1, ids)[:, None], scaled, logits)
        logits = logits - self._frequency * counts - self._presence * in_answer
        logits = logits + self._bias.gather(1, ids)[:, None]
        too_early = positions < self._stops_from
        return logits.masked_fill(self._stops.gather(1, ids)[:, None] & too_early[:, :, None], -torch.inf)

    def _follow(self) -> None:
        """Counts the tokens that the answers got since the last call."""
        written: list[list[int]] = []
        fresh: list[list[int]] = []
        for row, request in enumerate(self._requests):
            new = request.output_ids[self._read[row] :] if penalises(request.params) else []
            self._read[row] += len(new)
            written.append(new)
            fresh.append(sorted(set(new) - self._known[row]))
            self._known[row].update(new)
        if not any(written):
            return
        places = self._places(written)
        self._counts.index_put_(places, torch.ones(len(places[0]), device=self._counts.device), accumulate=True)
        if any(fresh):
            self._candidates = torch.cat((self._candidates, self._padded(fresh)), dim=1)

    def _padded(self, ids: list[list[int]]) -> Tensor:
        """Returns ids as [R, longest], padded with id 0. The edit of token 0 is right in every row."""
        longest = max(len(row) for row in ids)
        filled = [row + [0] * (longest - len(row)) for row in ids]
        return upload(filled, self.rows.device, torch.long).view(len(ids), longest)


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
