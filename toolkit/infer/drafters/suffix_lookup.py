"""Lookup in a request's own text and in a corpus: what followed an earlier occurrence of the text's end.

Every token that the target writes shows whether lookup would have drafted it, whatever was drafted. So the rates below
cost no verify step:

    rate of length n = share of tokens that equal the token after the earlier occurrence of an end of n tokens

A draft that starts at a match of n tokens is at a match of n + j tokens after j right ones. Its expected accept_length
is 1 + r(n) + r(n) r(n + 1) + ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import mul

from toolkit.infer.drafters.lookup_corpus import SEPARATOR, CorpusCursor, LookupCorpus, Match
from toolkit.infer.drafters.suffix_automaton import SuffixAutomaton
from toolkit.infer.request.request import Request

LENGTHS = (1, 2, 3, 4, 6, 9, 16)  # the shortest match of each class
FIRST_RATES = (0.2, 0.5, 0.6, 0.7, 0.75, 0.85, 0.95)  # by class, before any try: the demo target's on 104 prompts
GUESS_WEIGHT, REQUEST_WEIGHT = 8.0, 8.0  # weight, in tries, of FIRST_RATES, and of the engine's rates in a request's
MOST_READ = 32768  # tokens of a prompt that are searched: an automaton takes some 450 bytes a token
MEMORY = 256  # number of tries in which an old try loses 63 % of its weight


class MatchRates:
    """Share of right tokens by class of match length, with exponential decay. above: the rates to start from."""

    def __init__(self, above: MatchRates | None = None) -> None:
        self._above = above
        self._hits, self._tries = [0.0] * len(LENGTHS), [0.0] * len(LENGTHS)

    def add(self, length: int, right: bool) -> None:
        """Adds a token that followed a match of `length` tokens."""
        one, keep = _class_of(length), 1 - 1 / MEMORY
        self._hits[one] = self._hits[one] * keep + right
        self._tries[one] = self._tries[one] * keep + 1
        if self._above is not None:
            self._above.add(length, right)

    def rates(self) -> list[float]:
        """Returns the rates by class."""
        start, weight = (FIRST_RATES, GUESS_WEIGHT) if self._above is None else (self._above.rates(), REQUEST_WEIGHT)
        columns = zip(start, self._hits, self._tries, strict=True)
        return [(weight * guess + hits) / (weight + tries) for guess, hits, tries in columns]


class SuffixLookup:
    """The drafts of one request. Every token of the request is read once, but of a long prompt only the end.

    engine_rates: of all requests, in their own text and in the corpus.
    """

    def __init__(self, engine_rates: Sequence[MatchRates], corpus: LookupCorpus | None = None) -> None:
        self._text = SuffixAutomaton()
        self._cursor = None if corpus is None else CorpusCursor(corpus)
        self._rates = [MatchRates(above) for above in engine_rates]
        self._read = 0  # tokens of the request

    def read(self, request: Request) -> None:
        """Reads the request's new tokens. Those that come after the first call update the rates."""
        if self._read == 0:
            known = [*request.prompt_ids, *request.output_ids]
            self._text.extend(known[-MOST_READ:])
            if self._cursor is not None:
                self._cursor.start(known)
            self._read = len(known)
        for token in request.output_ids[self._read - len(request.prompt_ids) :]:
            for match, rates in zip(self._matches(), self._rates, strict=False):
                if match is not None:
                    rates.add(match.length, int(match.tokens[match.place]) == token)
            self._text.append(token)
            if self._cursor is not None:
                self._cursor.append(token)
            self._read += 1

    def _matches(self) -> list[Match | None]:
        """Returns the match in the request's own text, then the one in the corpus."""
        own = self._text.match()
        found = None if own is None else Match(own[0], self._text.tokens, own[1])
        return [found] if self._cursor is None else [found, self._cursor.match]

    def draft(self, depth: int) -> tuple[list[int], list[float]]:
        """Returns up to `depth` tokens and the expected accept_length of their first 0, 1, .. tokens.

        Without a match there are no tokens, and the lengths are [1.0]. At the end of the request's text a draft
        continues with its own tokens, so a loop is drafted to any length. A text of the corpus ends.
        """
        best: tuple[list[int], list[float]] = ([], [1.0])
        for match, rates in zip(self._matches(), self._rates, strict=False):
            if match is None:
                continue
            tokens = self._continued(match, depth)
            by_class = rates.rates()
            reached = accumulate((by_class[_class_of(match.length + one)] for one in range(len(tokens))), mul)
            lengths = list(accumulate(reached, initial=1.0))
            if lengths[-1] > best[1][-1]:
                best = tokens, lengths
        return best

    def _continued(self, match: Match, depth: int) -> list[int]:
        if match.tokens is self._text.tokens:
            return self._text.continuation(match.place, depth)
        tokens = [int(token) for token in match.tokens[match.place : match.place + depth]]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


@cache
def _class_of(length: int) -> int:
    return bisect_right(LENGTHS, length) - 1
