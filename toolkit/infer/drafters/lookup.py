"""Lookup: drafts of what followed an earlier occurrence of a text's end, in the request or in a corpus of answers.

A suffix automaton has a state for every set of substrings that end at the same places of the text. The state of the
whole text links to the state of its longest suffix that occurred before (Blumer et al., Theoretical Computer Science
40, 1985; for drafting: Hu et al., SAM decoding, arXiv 2411.10666):

    text     the cat sat on the mat . the cat        suffix "the cat", length 2, that ended at position 2
    drafts                                    sat on the mat

Every token that the target writes shows whether lookup would have drafted it, whatever was drafted. So the rates below
cost no verify step:

    rate of length n = share of tokens that equal the token after the earlier occurrence of an end of n tokens

A draft that starts at a match of n tokens is at a match of n + j tokens after j right ones. Its expected accept_length
is 1 + r(n) + r(n) r(n + 1) + ...

Two drafters look up. `NgramDrafter` has no head. `ComposedDrafter` has one: lookup costs the host some microseconds a
token, the head a forward per level. Text that repeats itself (code, quotes, lists, tables) gives lookup long drafts;
elsewhere it has none and the head drafts.

    row 0    root ── a ── b ── c ── d        lookup: the text after an earlier occurrence of its end
    row 1    root ── e ── g                  the head's tree
                 └── f

A row has one of the two, not both in one tree. With a fixed shape it drafts by lookup wherever the expected
accept_length of that is above LEAST_LENGTH, a chain with as many nodes as the shape. Adaptive drafting chooses the
depth, and whether the head runs (`adaptive.py`).

The verify rules stay exact: lookup's drafts depend on the committed tokens only, as the best tokens of a head do. Rows
whose drafts were drawn from the head's distribution keep it; rows with lookup's drafts are verified by the target's
draws (`Proposal.drawn`).

Shapes: B rows, N nodes a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.infer.attention.metadata import FEW
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter, DraftRanks, WrappedDrafter
from toolkit.infer.drafters.estimates import Rates
from toolkit.infer.request.draft_tree import (
    DraftShape,
    DraftTree,
    Proposal,
    chain_tree,
    root_only,
    upload,
    without_padding,
)
from toolkit.infer.request.request import Request

MOST_LINKS = 32  # states whose latest place is updated per token: a text of one repeated token has a state per length
SEPARATOR = -1  # ends each text of a corpus: no text continues into the next one
MOST_READ = 32768  # last tokens of a request that are searched: an automaton takes some 450 bytes a token
READ_AT_ONCE = 2048  # tokens of all rows that are read in one round, some milliseconds; the rest in the next ones
LEAST_READ = 64  # tokens of a row that are read whatever the others leave of READ_AT_ONCE
CONTEXT = 16  # tokens of a prompt's end that are searched in a corpus
LENGTHS = (1, 2, 3, 4, 6, 9, 16)  # the shortest match of each class
FIRST_RATES = (0.2, 0.5, 0.6, 0.7, 0.75, 0.85, 0.95)  # by class, before any try: the demo target's on 104 prompts
GUESS_WEIGHT, REQUEST_WEIGHT = 8.0, 8.0  # weight, in tries, of FIRST_RATES, and of the engine's rates in a request's
MEMORY = 256  # number of tries in which an old try loses 63 % of its weight
MOST_DEPTH = FEW - 1  # tokens of lookup's longest draft with adaptive drafting; more nodes take a slower attention
LEAST_LENGTH = 1.4  # expected accept_length from which lookup drafts in place of the head, with a fixed shape

Drafts = list[list[int]]  # lookup's tokens by row; none: the head drafts there


class Match(NamedTuple):
    """An earlier occurrence of the end of a text: its length in tokens, and the place after it."""

    length: int
    place: int


class SuffixAutomaton:
    """A text with its earlier occurrences. One token costs constant time on average."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]  # by state; _end: the latest known end of its strings
        self._last = 0

    def append(self, token: int) -> None:
        """Adds a token to the text."""
        self._note_ends()
        following, link, length, end = self._next, self._link, self._length, self._end
        state, self._last = self._last, len(following)
        self.tokens.append(token)
        following.append({})
        link.append(0)
        length.append(len(self.tokens))
        end.append(len(self.tokens))
        while state >= 0 and token not in following[state]:
            following[state][token] = self._last
            state = link[state]
        if state < 0:
            return
        found = following[state][token]
        if length[found] == length[state] + 1:
            link[self._last] = found
            return
        copy = len(following)
        following.append(dict(following[found]))
        link.append(link[found])
        length.append(length[state] + 1)
        end.append(end[found])
        link[found] = link[self._last] = copy
        while state >= 0 and following[state].get(token) == found:
            following[state][token] = copy
            state = link[state]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.append(token)

    def match(self) -> Match | None:
        """Returns the longest suffix of the text that occurred before; None if there is none.

        tokens[place - length : place] equals the end of the text; `place` is the latest one, up to MOST_LINKS states.
        """
        state = self._link[self._last]
        return self.match_at(state, self._length[state])

    def match_at(self, state: int, length: int) -> Match | None:
        """Returns the longest suffix of a state's string of `length` tokens that a token of the same text follows."""
        while state > 0:
            place = self._end[state]
            if self.tokens[place] != SEPARATOR:
                return Match(length, place)
            others = [self._end[after] - 1 for token, after in self._next[state].items() if token != SEPARATOR]
            if others:
                return Match(length, max(others))
            state = self._link[state]
            length = self._length[state]
        return None

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Appends a token to a state's string of `length` tokens. Returns both of its longest suffix in the text."""
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        return (self._next[state][token], length + 1) if token in self._next[state] else (0, 0)

    def continuation(self, place: int, count: int) -> list[int]:
        """Returns up to `count` tokens from `place` to a separator. After the end it repeats the tokens just taken."""
        taken = self.tokens[place : place + count]
        while len(taken) < count:
            taken.append(taken[len(taken) - (len(self.tokens) - place)])
        return taken[: taken.index(SEPARATOR)] if SEPARATOR in taken else taken

    def _note_ends(self) -> None:
        """Notes the end of the text as the latest place of its suffixes; a match is read before this."""
        state = self._link[self._last]
        for _ in range(MOST_LINKS):
            if state <= 0:
                return
            self._end[state] = len(self.tokens)
            state = self._link[state]


class SuffixLookup:
    """The drafts of one request. Every token of the request is read once, but of a long text only the end.

    engine_rates: of all requests, in their own text and in the corpus. corpus: texts that each end with SEPARATOR.
    least: tokens of the shortest match that is drafted from.
    """

    def __init__(self, engine_rates: Sequence[Rates], corpus: SuffixAutomaton | None = None, least: int = 1) -> None:
        self.text = SuffixAutomaton()
        self._corpus, self._at = corpus, (0, 0)  # the state of the text's end in the corpus, and its length
        self._rates = [Rates(above, REQUEST_WEIGHT, MEMORY) for above in engine_rates]
        self._least = least
        self._read = self._counted = 0  # tokens of the request; before `_counted` they update no rates
        self._behind = True  # not all tokens are read

    def read(self, request: Request, most: int = MOST_READ) -> list[bool | None]:
        """Reads up to `most` of the request's new tokens. Those after the answer's first one update the rates.

        Returns for each of these whether lookup would have drafted it; None where it had no match."""
        if self._read == 0:
            self._counted = len(request.prompt_ids) + 1
            self._read = max(0, request.length - MOST_READ)
        elif len(self.text.tokens) >= 2 * MOST_READ:  # begin again with the end of the text
            self._counted, self._read = self._read, self._read - MOST_READ
            self.text = SuffixAutomaton()
        begin, prompt = self._read, len(request.prompt_ids)
        self._read = end = min(request.length, begin + most)
        self._behind = end < request.length
        new = [*request.prompt_ids[begin:end], *request.output_ids[max(0, begin - prompt) : max(0, end - prompt)]]
        drafted: list[bool | None] = []
        for at, token in enumerate(new, start=begin):
            if at >= self._counted:
                right = None
                for text, match, rates in self._matches():
                    right = text.tokens[match.place] == token
                    rates.add(_class_of(match.length), right)
                drafted.append(right)
            self.text.append(token)
            if self._corpus is not None and at >= self._counted - CONTEXT:
                self._at = self._corpus.follow(*self._at, token)
        return drafted

    def _matches(self) -> Iterator[tuple[SuffixAutomaton, Match, Rates]]:
        """Yields the match in the request's own text, then the one in the corpus."""
        matches = [(self.text, self.text.match())]
        if self._corpus is not None:
            matches.append((self._corpus, self._corpus.match_at(*self._at)))
        for (text, match), rates in zip(matches, self._rates, strict=False):
            if match is not None and match.length >= self._least:
                yield text, match, rates

    def draft(self, depth: int) -> tuple[list[int], list[float]]:
        """Returns up to `depth` tokens and the expected accept_length of their first 0, 1, .. tokens.

        Without a match there are no tokens, and the lengths are [1.0]; also before all of a long prompt is read. At the
        end of the request's text a draft continues with its own tokens, so a loop is drafted to any length. A text of
        the corpus ends.
        """
        best: tuple[list[int], list[float]] = ([], [1.0])
        for text, match, rates in [] if self._behind else self._matches():
            tokens = text.continuation(match.place, depth)
            by_class = rates.now()
            reached = accumulate((by_class[_class_of(match.length + more)] for more in range(len(tokens))), mul)
            lengths = list(accumulate(reached, initial=1.0))
            if lengths[-1] > best[1][-1]:
                best = tokens, lengths
        return best


@cache
def _class_of(length: int) -> int:
    return bisect_right(LENGTHS, length) - 1


class Lookups:
    """The lookups of the running requests. Arguments as of SuffixLookup."""

    def __init__(self, corpus: SuffixAutomaton | None = None, least: int = 1) -> None:
        self._corpus, self._least = corpus, least
        self.forget_rates()
        self._texts: WeakKeyDictionary[Request, SuffixLookup] = WeakKeyDictionary()

    def forget_rates(self) -> None:
        """Starts again with the rates of all requests, as after new weights."""
        self._rates = [Rates(FIRST_RATES, GUESS_WEIGHT, MEMORY) for _ in range(2)]

    def read(self, requests: Sequence[Request]) -> list[list[bool | None]]:
        """Reads the new tokens, of long texts a part. Returns those of SuffixLookup.read; none of plain requests."""
        known, self._texts = self._texts, WeakKeyDictionary()
        left = READ_AT_ONCE
        drafted: list[list[bool | None]] = []
        for request in requests:
            drafted.append([])
            if request.speculative:
                text = self._texts[request] = known.get(request) or SuffixLookup(self._rates, self._corpus, self._least)
                before = len(text.text.tokens)
                drafted[-1] = text.read(request, max(left, LEAST_READ))
                left -= max(0, len(text.text.tokens) - before)
        return drafted

    def draft(self, request: Request, depth: int) -> tuple[list[int], list[float]]:
        """As SuffixLookup.draft; no tokens for a request that is not speculative."""
        return self._texts[request].draft(depth) if request.speculative else ([], [1.0])


@dataclass(frozen=True)
class NgramLookup:
    """The settings of n-gram lookup, given in place of a head. min_n: tokens of the shortest match."""

    min_n: int = 2

    @property
    def kind(self) -> str:
        return "ngram"


class NgramDrafter(Drafter):
    """Drafts chains as deep as the shape from the requests' own tokens. A row without a match gets its root only."""

    def __init__(self, lookup: NgramLookup, shape: DraftShape) -> None:
        self._texts = Lookups(least=lookup.min_n)
        self.set_shape(shape)

    def set_shape(self, shape: DraftShape) -> None:
        self.shape = shape

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        """Looks up every token since the last probe or draft, with the text before it."""
        # A single row without a match runs a plain round.
        ranks = [
            [0 if right else width for right in drafted if right is not None or len(requests) > 1]
            for drafted in self._texts.read(requests)
        ]
        return root_only(rows.roots), ranks

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        self._texts.read(requests)
        shapes = [self.shape if one.shape is None else one.shape.within(self.shape) for one in requests]
        drafts = [self._texts.draft(*pair)[0] for pair in zip(requests, (s.num_steps for s in shapes), strict=True)]
        return with_chains(root_only(rows.roots), rows.roots, drafts) if any(drafts) else root_only(rows.roots)


class ComposedDrafter(WrappedDrafter):
    """Drafts by lookup or by `inner`, a drafter with a head.

    depth: tokens of lookup's longest draft; None: as many as `shape` has drafted nodes. corpus: searched too.
    """

    def __init__(
        self, inner: Drafter, shape: DraftShape, depth: int | None = None, corpus: SuffixAutomaton | None = None
    ) -> None:
        super().__init__(inner)
        self._depth, self._texts, self.shape = depth, Lookups(corpus), shape

    def set_shape(self, shape: DraftShape) -> None:
        self.inner.set_shape(shape)
        self.shape = shape

    def weights_changed(self) -> None:
        self.inner.weights_changed()
        self._texts.forget_rates()

    def depth(self, shape: DraftShape) -> int:
        """Returns the number of tokens of lookup's longest draft beside `shape`."""
        return shape.num_draft_tokens - 1 if self._depth is None else self._depth

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        # The head may not run for a while, and a step of lookup commits up to depth + 1 tokens.
        return self.inner.reach(shape, skips=True) + self.depth(shape) + 1

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        found = self.lookups(requests)
        drafts = [tokens if lengths[-1] >= LEAST_LENGTH else [] for tokens, lengths in found]
        # The head rests if no row is left to it.
        rests = all(draft or not one.speculative for draft, one in zip(drafts, requests, strict=True))
        tree = (self.inner.skip if rests else self.inner.propose)(requests, rows)
        return with_chains(tree, rows.roots, drafts) if any(drafts) else tree

    def lookups(self, requests: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
        """Returns lookup's draft for every row, and its expected accept_length by depth from 0."""
        self._texts.read(requests)
        most = self.depth(self.shape)
        depths = [most if one.shape is None else min(most, one.shape.num_draft_tokens - 1) for one in requests]
        return [self._texts.draft(request, depth) for request, depth in zip(requests, depths, strict=True)]


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
