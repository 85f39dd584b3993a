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
from itertools import chain, islice

import torch

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter, DraftRanks
from toolkit.infer.drafters.suffix_automaton import SuffixAutomaton
from toolkit.infer.kernels.tree_reference import ancestor_mask
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, root_only, without_padding
from toolkit.infer.request.errors import EngineError
from toolkit.infer.request.request import Request
from toolkit.infer.request.upload import upload

PLACES_PER_BRANCH = 4  # occurrences tried per branch: those of a longer n-gram are found for a shorter one again


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


class NgramDrafter(Drafter):
    """Drafts from the requests' own tokens. A row without a match gets its root only."""

    def __init__(self, lookup: NgramLookup, shape: DraftShape, device: torch.device) -> None:
        self._sizes, self._device = range(lookup.max_n, lookup.min_n - 1, -1), device
        self._texts: list[SuffixAutomaton] = []  # by row
        self.set_shape(shape)

    def set_shape(self, shape: DraftShape) -> None:
        self.shape = shape

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        self._texts[first_row:] = [SuffixAutomaton() for _ in requests]

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        """Looks up every token since the last probe or draft, with the text before it."""
        texts = self._texts[: len(requests)]
        ranks = [self._ranks(*one, width, len(requests)) for one in zip(texts, requests, strict=True)]
        return root_only(rows.roots), ranks

    def move_row(self, destination: int, source: int) -> None:
        self._texts[destination] = self._texts[source]

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        found = [self._paths(*one) for one in zip(self._texts[: len(requests)], requests, strict=True)]
        nodes = max(map(len, found))
        if nodes == 1:
            return root_only(rows.roots)
        # Padding nodes are children of the root. They are not valid and no node attends to them.
        table: list[list[list[int]]] = [[], [], []]
        for paths in found:
            number, spare = {path: node for node, path in enumerate(paths)}, nodes - len(paths)
            table[0].append([path[-1] for path in paths[1:]] + [0] * spare)
            table[1].append([-1, *(number[path[:-1]] for path in paths[1:])] + [0] * spare)
            table[2].append([len(path) for path in paths] + [1] * spare)
        drafts, parents, depths = (upload(part, self._device) for part in table)
        counts = upload([len(paths) for paths in found], self._device)
        valid = torch.arange(nodes, device=self._device) < counts[:, None]
        deepest = max(len(paths[-1]) for paths in found)
        return DraftTree(
            tokens=torch.cat((rows.roots[:, None], drafts), dim=1),
            parents=parents,
            depths=depths,
            mask=without_padding(ancestor_mask(parents[:, 1:], deepest), valid),
            valid=valid,
            deepest=deepest,
            is_chain=all(len(paths) == len(paths[-1]) + 1 for paths in found),
        )

    def _paths(self, text: SuffixAutomaton, request: Request) -> list[tuple[int, ...]]:
        """Returns the tokens from the root to every node, in level order; the root's are ()."""
        children: dict[tuple[int, ...], int] = {(): 0}  # by path
        if request.speculative:
            text.extend(_new(text, request))
            shape = self.shape if request.shape is None else request.shape.within(self.shape)
            for place in self._places(text, shape.num_steps, shape.top_k):
                path: tuple[int, ...] = ()
                for token in text.continuation(place, shape.num_steps):
                    child = (*path, token)
                    if child not in children:
                        if len(children) >= shape.num_draft_tokens or children[path] >= shape.top_k:
                            break
                        children[path] += 1
                        children[child] = 0
                    path = child
        return sorted(children, key=len)

    def _places(self, text: SuffixAutomaton, depth: int, width: int) -> Iterator[int]:
        """Yields places after earlier occurrences of the text's end: longest n-gram first, then most recent."""
        places = chain.from_iterable(text.places(size, depth) for size in self._sizes)
        return islice(places, 1 if width == 1 else PLACES_PER_BRANCH * width)

    def _ranks(self, text: SuffixAutomaton, request: Request, width: int, rows: int) -> list[int]:
        ranks: list[int] = []
        if not request.speculative:
            return ranks
        new = _new(text, request)
        answer = min(len(new), len(request.output_ids) - 1)  # the first token follows the prompt; it is never drafted
        text.extend(new[: len(new) - answer])
        for token in new[len(new) - answer :]:
            drafts = list(dict.fromkeys(text.tokens[place] for place in self._places(text, 1, width)))[:width]
            if drafts or rows > 1:  # a single row without a match runs a plain round
                ranks.append(drafts.index(token) if token in drafts else width)
            text.append(token)
        return ranks


def _new(text: SuffixAutomaton, request: Request) -> list[int]:
    """Returns the tokens of a request that are not in its text yet."""
    known = len(text.tokens) - len(request.prompt_ids)
    return request.output_ids[known:] if known >= 0 else request.prompt_ids + request.output_ids
