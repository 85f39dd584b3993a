"""Lookup: drafts of what followed an earlier occurrence of a text's end, in the request or in a corpus of answers.

A suffix automaton has a state for every set of substrings that end at the same places of the text. The state of the
whole text links to the state of its longest suffix that occurred before (Blumer et al., Theoretical Computer Science
40, 1985; for drafting: Hu et al., SAM decoding, arXiv 2411.10666):

    text     the cat sat on the mat . the cat        suffix "the cat", length 2, that ended at position 2

Every token that the target writes shows whether lookup would have drafted it, whatever was drafted. So the rates below
cost no verify step:

    rate of length n = share of tokens that equal the token after the earlier occurrence of an end of n tokens

A draft that starts at a match of n tokens is at a match of n + j tokens after j right ones. Its expected accept_length
is 1 + r(n) + r(n) r(n + 1) + ...

`LookupChoice` chooses in every round how deep lookup drafts, and whether the head drafts too (`composed_drafter.py`):

    tokens per second of a row = harmonic mean over the rows of max(lookup's expected accept_length, the head's)
                                 / seconds of the round

The harmonic mean, because it is the time of a token that counts: rows without a match wait for a round with more nodes,
and rows that get ahead leave a batch that is not full. Closed batches of 16 rows took 5 % longer than plain decoding
with the mean, up to 7 % with the median.

The head's shape is the one that adaptive drafting has just chosen, or None. Lookup's expected lengths differ in every
round, because the matches do; they are learned from every token, so lookup needs no probes. Its costs are those of
verifying its nodes (step_costs.py). Where depth 1 seems not to pay, it runs once in RETRY rounds that search the texts,
so that one slow round does not end lookup; deeper drafts follow when a shallower one has been measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from toolkit.infer.drafters.step_costs import Arm, LookupArm, Shape, StepCosts
from toolkit.infer.request.request import Request

MOST_LINKS = 32  # states whose latest place is updated per token: a text of one repeated token has a state per length
SEPARATOR = -1  # ends each text of a corpus: no text continues into the next one
MOST_READ = 32768  # tokens of a prompt that are searched: an automaton takes some 450 bytes a token
CONTEXT = 16  # tokens of a prompt's end that are searched in a corpus
LENGTHS = (1, 2, 3, 4, 6, 9, 16)  # the shortest match of each class
FIRST_RATES = (0.2, 0.5, 0.6, 0.7, 0.75, 0.85, 0.95)  # by class, before any try: the demo target's on 104 prompts
GUESS_WEIGHT, REQUEST_WEIGHT = 8.0, 8.0  # weight, in tries, of FIRST_RATES, and of the engine's rates in a request's
MEMORY = 256  # number of tries in which an old try loses 63 % of its weight
DEPTHS = (1, 2, 3, 4, 6, 8, 11, 15)
RETRY, RETRY_LENGTH = 128, 1.4  # rounds between retries of depth 1, and the expected accept_length that allows one

Lengths = Sequence[Sequence[float]]  # by row, the expected accept_length by depth from 0


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

    engine_rates: of all requests, in their own text and in the corpus. corpus: texts that each end with SEPARATOR.
    least: tokens of the shortest match that is drafted from.
    """

    def __init__(
        self, engine_rates: Sequence[MatchRates], corpus: SuffixAutomaton | None = None, least: int = 1
    ) -> None:
        self.text = SuffixAutomaton()
        self._corpus, self._at = corpus, (0, 0)  # the state of the text's end in the corpus, and its length
        self._rates = [MatchRates(above) for above in engine_rates]
        self._least = least
        self._read = 0  # tokens of the request

    def read(self, request: Request) -> list[bool | None]:
        """Reads the request's new tokens. Those after the answer's first one update the rates.

        Returns for each of these whether lookup would have drafted it; None where it had no match."""
        if self._read == 0:
            known = [*request.prompt_ids, *request.output_ids[:1]]
            self.text.extend(known[-MOST_READ:])
            for token in known[-CONTEXT:]:
                self._follow(token)
            self._read = len(known)
        drafted: list[bool | None] = []
        for token in request.output_ids[self._read - len(request.prompt_ids) :]:
            right = None
            for text, match, rates in self._matches():
                right = text.tokens[match.place] == token
                rates.add(match.length, right)
            drafted.append(right)
            self.text.append(token)
            self._follow(token)
            self._read += 1
        return drafted

    def _follow(self, token: int) -> None:
        if self._corpus is not None:
            self._at = self._corpus.follow(*self._at, token)

    def _matches(self) -> Iterator[tuple[SuffixAutomaton, Match, MatchRates]]:
        """Yields the match in the request's own text, then the one in the corpus."""
        found = [(self.text, self.text.match())]
        if self._corpus is not None:
            found.append((self._corpus, self._corpus.match_at(*self._at)))
        for (text, match), rates in zip(found, self._rates, strict=False):
            if match is not None and match.length >= self._least:
                yield text, match, rates

    def draft(self, depth: int) -> tuple[list[int], list[float]]:
        """Returns up to `depth` tokens and the expected accept_length of their first 0, 1, .. tokens.

        Without a match there are no tokens, and the lengths are [1.0]. At the end of the request's text a draft
        continues with its own tokens, so a loop is drafted to any length. A text of the corpus ends.
        """
        best: tuple[list[int], list[float]] = ([], [1.0])
        for text, match, rates in self._matches():
            tokens = text.continuation(match.place, depth)
            by_class = rates.rates()
            reached = accumulate((by_class[_class_of(match.length + one)] for one in range(len(tokens))), mul)
            lengths = list(accumulate(reached, initial=1.0))
            if lengths[-1] > best[1][-1]:
                best = tokens, lengths
        return best


@cache
def _class_of(length: int) -> int:
    return bisect_right(LENGTHS, length) - 1


class LookupChoice:
    """Compares lookup's drafts with the choice for the head."""

    def __init__(self) -> None:
        self._rounds, self._last = 0, -RETRY

    def choose(
        self,
        lookup: Lengths,
        shape: Shape,
        head: Sequence[float],
        costs: StepCosts,
        margin: float,
    ) -> tuple[list[int], LookupArm] | None:
        """Returns the depth of lookup by row (0: none) and the round to run; None: draft `shape` in all rows.

        lookup: expected accept_length of lookup's drafts. head: by row, that of `shape`. margin: the least factor by
        which drafting must be faster than plain decoding.
        """
        self._rounds += 1
        if all(len(one) == 1 for one in lookup):
            return None
        batch, deepest = len(lookup), max(map(len, lookup)) - 1
        shapes: list[Shape] = [None, *([] if shape is None else [shape])]
        rounds = {LookupArm(one, depth): depth for one in shapes for depth in DEPTHS if depth <= deepest}
        arms: list[Arm] = [None, shape, *rounds]
        known = costs.all(batch, arms)
        current = _mean(head) / known[shape] if shape in known else 0.0
        floor = max(current, margin / known[None])
        speeds = {
            arm: _mean(_lengths(lookup, rounds[arm], head if arm.shape else None)) / seconds
            for arm, seconds in known.items()
            if isinstance(arm, LookupArm)
        }
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] <= floor:
            least = LookupArm(None, 1)
            due = self._rounds - self._last >= RETRY and _mean(_lengths(lookup, 1, None)) >= RETRY_LENGTH
            if not due:
                return None
            best = least
        self._last = self._rounds
        depth = rounds[best]
        mine = _lengths(lookup, depth, None)
        theirs = head if best.shape else [1.0] * batch
        depths = [min(depth, len(one) - 1) if a > b else 0 for one, a, b in zip(lookup, mine, theirs, strict=True)]
        if not any(depths):
            return None
        # Without a row for the head, the round is one of lookup alone: its time says nothing of the head.
        left = best.shape is not None and any(b > 1 for own, b in zip(depths, theirs, strict=True) if own == 0)
        return depths, LookupArm(best.shape if left else None, max(depths))


def _mean(lengths: Sequence[float]) -> float:
    """Returns the harmonic mean; statistics.harmonic_mean takes ten times as long."""
    return len(lengths) / sum(1 / one for one in lengths)


def _lengths(lookup: Lengths, depth: int, head: Sequence[float] | None) -> list[float]:
    """Returns the expected accept_length of each row if lookup drafts `depth` tokens and the head the other rows."""
    mine = [one[min(depth, len(one) - 1)] for one in lookup]
    return mine if head is None else [max(pair) for pair in zip(mine, head, strict=True)]
