"""The longest repeated end of a text, updated token by token.

A suffix automaton has a state for every set of substrings that end at the same places of the text. The state of the
whole text links to the state of its longest suffix that occurred before (Blumer et al., Theoretical Computer Science
40, 1985; for drafting: Hu et al., SAM decoding, arXiv 2411.10666):

    text     the cat sat on the mat . the cat        suffix "the cat", length 2, that ended at position 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

MOST_LINKS = 32  # states whose latest place is updated per token: a text of one repeated token has a state per length


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

    def match(self) -> tuple[int, int] | None:
        """Returns (length, end) of the longest suffix of the text that occurred before; None if there is none.

        tokens[end - length : end] equals the end of the text; `end` is the latest such place, up to MOST_LINKS states.
        """
        state = self._link[self._last]
        return (self._length[state], self._end[state]) if state > 0 else None

    def places(self, size: int, depth: int) -> Iterator[int]:
        """Yields places after earlier occurrences of the last `size` tokens, most recent first.

        One place for every different continuation of `depth` tokens; of those that the text's end cuts off, some.
        """
        state = 0
        for token in self.tokens[-size:]:
            state = self._next[state][token]
        ways = [(-self._end[state], 0, state)] if state != self._last else []
        while ways:  # (-place, tokens after it that differ from the continuations before, their state)
            place, known, state = heappop(ways)
            yield -place
            for at in range(known - place, min(depth - place, len(self.tokens) + 1)):
                own = self.tokens[at] if at < len(self.tokens) else None
                for other, after in self._next[state].items():
                    if other != own:
                        heappush(ways, (at + place + 1 - self._end[after], at + place + 1, after))
                if own is not None:
                    state = self._next[state][own]

    def continuation(self, place: int, count: int) -> list[int]:
        """Returns `count` tokens from `place` on. After the end of the text it repeats the tokens just taken."""
        taken = self.tokens[place : place + count]
        while len(taken) < count:
            taken.append(taken[len(taken) - (len(self.tokens) - place)])
        return taken

    def _note_ends(self) -> None:
        """Notes the end of the text as the latest place of its suffixes; a match is read before this."""
        state = self._link[self._last]
        for _ in range(MOST_LINKS):
            if state <= 0:
                return
            self._end[state] = len(self.tokens)
            state = self._link[state]
