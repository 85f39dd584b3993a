"""Drafts without a head: n-gram lookup in the request's own text (prompt lookup decoding).

Find the longest n-gram at the end of prompt and answer that also occurs earlier, and propose the tokens that followed
it. The most recent occurrence comes first:

    text     the cat sat on the mat . the cat ...        n-gram "the cat", found at the start
    drafts                                    sat on the mat

With top_k > 1, older occurrences and shorter n-grams propose too; their continuations are merged into a tree. If a
continuation reaches the end of the text, it continues with its own tokens, so a loop is drafted to any length.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter, DraftRanks
from toolkit.infer.kernels.tree_reference import ancestor_mask
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, root_only, without_padding
from toolkit.infer.request.errors import EngineError
from toolkit.infer.request.request import Request

PLACES_PER_BRANCH = 4  # occurrences tried per branch: recent ones often have the same continuation


@dataclass(frozen=True)
class NgramLookup:
    """The settings of n-gram lookup, given in place of a head.

    max_n, min_n: lengths of the n-grams to search for, the longest first. Raises `EngineError` unless
    1 <= min_n <= max_n.
    """

    max_n: int = 4
    min_n: int = 2

    @property
    def kind(self) -> str:
        return "ngram"

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise EngineError(f"min_n is {self.min_n} and max_n is {self.max_n}; 1 <= min_n <= max_n is needed")


class History:
    """The text of one request, with an index from each n-gram to its ends. Every token is indexed once."""

    def __init__(self, lookup: NgramLookup) -> None:
        self._sizes = range(lookup.max_n, lookup.min_n - 1, -1)
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends to the text. An n-gram is indexed when a token follows it, so the text's end never matches itself."""
        text, ends = self.tokens, self._ends
        for token in tokens:
            end = len(text)
            for size in self._sizes:
                if size <= end:
                    ends.setdefault(tuple(text[end - size :]), []).append(end)
            text.append(token)

    def places(self) -> Iterator[int]:
        """Yields positions after earlier occurrences of the text's end: longest n-gram first, then most recent."""
        seen: set[int] = set()
        for size in self._sizes:
            if size <= len(self.tokens):
                for place in reversed(self._ends.get(tuple(self.tokens[-size:]), ())):
                    if place not in seen:
                        seen.add(place)
                        yield place

    def continuation(self, place: int, count: int) -> list[int]:
        """Returns `count` tokens from `place` on. After the end of the text it repeats the tokens just taken."""
        taken = self.tokens[place : place + count]
        while len(taken) < count:
            taken.append(taken[len(taken) - (len(self.tokens) - place)])
        return taken


class Trie:
    """Continuations merged into one tree: node 0 is the root, siblings carry different tokens."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self._children: dict[tuple[int, int], int] = {}
        self._branches = [0]

    def add(self, tokens: Sequence[int], shape: DraftShape) -> None:
        """Adds a path, until the tree has num_draft_tokens nodes or a node has top_k children."""
        node = 0
        for token in tokens:
            child = self._children.get((node, token))
            if child is None:
                if len(self.tokens) >= shape.num_draft_tokens or self._branches[node] >= shape.top_k:
                    return
                child = self._children[node, token] = len(self.tokens)
                self._branches[node] += 1
                self._branches.append(0)
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
            node = child

    def in_level_order(self) -> tuple[list[int], list[int], list[int]]:
        """Returns tokens, parents and depths of the nodes, sorted by depth."""
        order = sorted(range(len(self.tokens)), key=self.depths.__getitem__)
        number = {old: new for new, old in enumerate(order)}
        parents = [-1 if old == 0 else number[self.parents[old]] for old in order]
        return [self.tokens[old] for old in order], parents, [self.depths[old] for old in order]


class NgramDrafter(Drafter):
    """Drafts from the requests' own tokens. A row without a match gets its root only."""

    def __init__(self, lookup: NgramLookup, shape: DraftShape, device: torch.device) -> None:
        self._lookup, self._device = lookup, device
        self._histories: list[History] = []  # by row
        self.set_shape(shape)

    def set_shape(self, shape: DraftShape) -> None:
        self.shape = shape

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        self._histories[first_row:] = [History(self._lookup) for _ in requests]

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        """Looks up every token since the last probe or draft, with the text before it."""
        histories = self._histories[: len(requests)]
        ranks = [self._ranks(*one, width, len(requests)) for one in zip(histories, requests, strict=True)]
        return root_only(rows.roots), ranks

    def move_row(self, destination: int, source: int) -> None:
        self._histories[destination] = self._histories[source]

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        histories = self._histories[: len(requests)]
        tries = [self._trie(history, request) for history, request in zip(histories, requests, strict=True)]
        found = [trie.in_level_order() for trie in tries]
        nodes = max(len(tokens) for tokens, _, _ in found)
        if nodes == 1:
            return root_only(rows.roots)
        counts = [len(tokens) for tokens, _, _ in found]
        # Padding nodes are children of the root. They are not valid and no node attends to them.
        padded = [
            (
                tokens + [tokens[0]] * (nodes - len(tokens)),
                parents + [0] * (nodes - len(parents)),
                depths + [1] * (nodes - len(depths)),
            )
            for tokens, parents, depths in found
        ]
        tokens, parents, depths = (torch.tensor(part, device=self._device) for part in zip(*padded, strict=True))
        valid = torch.arange(nodes, device=self._device) < torch.tensor(counts, device=self._device)[:, None]
        deepest = max(depths[-1] for _, _, depths in found)
        return DraftTree(
            tokens=tokens,
            parents=parents,
            depths=depths,
            mask=without_padding(ancestor_mask(parents[:, 1:], deepest), valid),
            valid=valid,
            deepest=deepest,
            is_chain=all(parents == list(range(-1, len(parents) - 1)) for _, parents, _ in found),
        )

    def _trie(self, history: History, request: Request) -> Trie:
        trie = Trie(request.output_ids[-1])
        if not request.speculative:
            return trie
        history.extend(_new(history, request))
        shape = self.shape if request.shape is None else request.shape.within(self.shape)
        for place in islice(history.places(), 1 if shape.is_chain else PLACES_PER_BRANCH * shape.top_k):
            trie.add(history.continuation(place, shape.num_steps), shape)
        return trie

    def _ranks(self, history: History, request: Request, width: int, rows: int) -> list[int]:
        ranks: list[int] = []
        if not request.speculative:
            return ranks
        new = _new(history, request)
        answer = min(len(new), len(request.output_ids) - 1)  # the first token follows the prompt; it is never drafted
        history.extend(new[: len(new) - answer])
        for token in new[len(new) - answer :]:
            places = islice(history.places(), 1 if width == 1 else PLACES_PER_BRANCH * width)
            drafts = list(dict.fromkeys(history.tokens[place] for place in places))[:width]
            if drafts or rows > 1:  # a single row without a match runs a plain round
                ranks.append(drafts.index(token) if token in drafts else width)
            history.extend([token])
        return ranks


def _new(history: History, request: Request) -> list[int]:
    """Returns the tokens of a request that are not in its history yet."""
    known = len(history.tokens) - len(request.prompt_ids)
    return request.output_ids[known:] if known >= 0 else request.prompt_ids + request.output_ids
