"""Texts of earlier answers, searched for the end of a running one, by a suffix array.

The array sorts the places of the corpus by the CONTEXT tokens that follow them, so every string of up to CONTEXT tokens
is one range of it (Manber and Myers, SIAM Journal on Computing 22, 1993). The array is built once and never changes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
CONTEXT = 16  # tokens of the longest match, a power of two
MOST_PLACES = 64  # occurrences that vote for the next token
SEPARATOR = -1  # between texts: no text continues into the next one


class Match(NamedTuple):
    """An occurrence of the end of a text: its length in tokens, the text that holds it, the place after it."""

    length: int
    tokens: Sequence[int] | IntArray
    place: int


class LookupCorpus:
    """Tokenised texts and their suffix array: 12 bytes a token."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        joined = [token for text in texts for token in (*text, SEPARATOR)]
        self.tokens = np.asarray(joined, dtype=np.int64)
        self._order = _sorted_places(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, ending: Sequence[int]) -> Match | None:
        """Returns an occurrence of `ending`, at most CONTEXT tokens, before the token that follows it most often.

        Of more than MOST_PLACES occurrences some decide. None: nothing follows `ending` in the corpus.
        """
        tokens, order, size = self.tokens, self._order, len(ending)
        wanted = list(ending)

        def string(number: int) -> list[int]:
            start = order[number]
            return tokens[start : start + size].tolist()

        low = bisect_left(range(len(order)), wanted, key=string)
        if low == len(order) or string(low) != wanted:
            return None
        high = bisect_right(range(len(order)), wanted, lo=low, key=string)
        # Evenly over the range: within it, places are sorted by the tokens that follow.
        places = order[low : high : -(-(high - low) // MOST_PLACES)].astype(np.int64) + size
        after = [int(tokens[place]) for place in places]  # a separator ends every text, so a token follows
        votes = Counter(token for token in after if token != SEPARATOR)
        if not votes:
            return None
        best, _ = votes.most_common(1)[0]
        return Match(size, tokens, int(places[after.index(best)]))


class CorpusCursor:
    """The longest end of one growing text that occurs in the corpus, at most CONTEXT tokens."""

    def __init__(self, corpus: LookupCorpus) -> None:
        self._corpus = corpus
        self._ending: list[int] = []
        self.match: Match | None = None

    def start(self, text: Sequence[int]) -> None:
        """Begins with a text, in place of the one before."""
        self._ending = list(text[-CONTEXT:])
        self._search(len(self._ending))

    def append(self, token: int) -> None:
        """Adds a token to the text. The match grows by one token at most."""
        self._ending = [*self._ending, token][-CONTEXT:]
        self._search(1 if self.match is None else self.match.length + 1)

    def _search(self, longest: int) -> None:
        sizes = range(min(longest, len(self._ending)), 0, -1)
        self.match = next((found for size in sizes if (found := self._corpus.find(self._ending[-size:]))), None)


def _sorted_places(tokens: IntArray) -> NDArray[np.int32]:
    """Returns the places of `tokens` sorted by the CONTEXT tokens from each on, by doubling the sorted length."""
    rank = tokens - tokens.min(initial=0)
    order = np.argsort(rank, kind="stable")
    size = 1
    while size < CONTEXT:
        later = np.zeros_like(rank)
        later[:-size] = rank[size:] + 1  # 0 after the end
        keys = rank * (int(later.max(initial=0)) + 1) + later
        order = np.argsort(keys, kind="stable")
        _, rank = np.unique(keys, return_inverse=True)
        size *= 2
    return order.astype(np.int32)
