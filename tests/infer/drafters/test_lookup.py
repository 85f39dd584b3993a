"""Suffix automaton and the rates of lookup, against definitions by rescanning."""

from __future__ import annotations

import random

import pytest

from toolkit.infer.drafters.lookup import CONTEXT, FIRST_RATES, SEPARATOR, MatchRates, SuffixAutomaton, SuffixLookup
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


def longest_repeat(text: list[int]) -> tuple[int, int] | None:
    """The definition: the longest end of the text that ended before, and the latest place of it."""
    for size in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return size, end
    return None


@pytest.mark.parametrize("symbols", [1, 2, 3, 9])
def test_the_automaton_finds_what_a_rescan_finds(symbols):
    chance = random.Random(symbols)
    for _ in range(30):
        automaton, text = SuffixAutomaton(), []
        for _ in range(60):
            token = chance.randrange(symbols)
            automaton.append(token)
            text.append(token)
            assert automaton.match() == longest_repeat(text)


def corpus_of(*texts: list[int]) -> SuffixAutomaton:
    corpus = SuffixAutomaton()
    for text in texts:
        corpus.extend([*text, SEPARATOR])
    return corpus


def test_the_corpus_finds_the_longest_end_of_a_text():
    """Texts of 4 tokens, so ends recur. The definition: every place of an end that a token of the same text follows."""
    chance = random.Random(0)
    texts = [[chance.randrange(4) for _ in range(chance.randint(1, 40))] for _ in range(20)]
    corpus, at, ending = corpus_of(*texts), (0, 0), []
    for _ in range(300):
        token = chance.randrange(4)
        at, ending = corpus.follow(*at, token), [*ending, token][-CONTEXT:]
        longest = max(
            (size for text in texts for size in range(1, 1 + len(ending)) for place in range(size, len(text))
             if text[place - size : place] == ending[-size:]),
            default=0,
        )  # fmt: skip
        length, place = corpus.match_at(*at) or (0, 0)
        assert min(length, CONTEXT) == longest
        if length:
            assert corpus.tokens[place - longest : place] == ending[-longest:] and corpus.tokens[place] != SEPARATOR


def test_rates_follow_what_was_right_and_start_from_those_of_all_requests():
    engine = MatchRates()
    assert engine.rates() == pytest.approx(FIRST_RATES)
    own = MatchRates(engine)
    for _ in range(100):
        own.add(2, False)
    assert own.rates()[1] < 0.05 and engine.rates()[1] < 0.1 and own.rates()[0] == FIRST_RATES[0]
    assert MatchRates(engine).rates()[1] == pytest.approx(engine.rates()[1])


def test_a_draft_continues_the_match_and_states_its_length():
    """5 6 stood there before 7 8; the text's end is 5 6. A loop goes on beyond the text's end."""
    lookup = SuffixLookup([MatchRates()])
    lookup.read(Request([5, 6, 7, 8, 9, 5], SamplingParams(), output_ids=[6]))
    tokens, lengths = lookup.draft(3)
    assert tokens == [7, 8, 9]
    two, three, four = FIRST_RATES[1:4]
    assert lengths == pytest.approx([1, 1 + two, 1 + two + two * three, 1 + two + two * three + two * three * four])
    loop = SuffixLookup([MatchRates()])
    loop.read(Request([1, 2, 1], SamplingParams(), output_ids=[2]))
    assert loop.draft(5)[0] == [1, 2, 1, 2, 1]
    fresh = SuffixLookup([MatchRates()])
    fresh.read(Request([1, 2, 3], SamplingParams(), output_ids=[4]))
    assert fresh.draft(4) == ([], [1.0])


def test_a_text_of_the_corpus_ends_its_draft():
    lookup = SuffixLookup([MatchRates(), MatchRates()], corpus_of([1, 2, 3, 4], [9, 9]))
    lookup.read(Request([7, 1], SamplingParams(), output_ids=[2]))
    assert lookup.draft(6)[0] == [3, 4]


def test_only_answers_count():
    """A prompt's repetitions say nothing about the target; tokens are counted once, in whatever runs they come."""
    rates = MatchRates()
    request = Request([1, 2, 1, 2, 1, 2], SamplingParams(), output_ids=[1])
    lookup = SuffixLookup([rates])
    lookup.read(request)
    assert rates.rates() == pytest.approx(FIRST_RATES)
    request.output_ids += [2, 1]
    lookup.read(request)
    lookup.read(request)
    assert sum(rates._tries) == pytest.approx(2, abs=0.01) and sum(rates._hits) == pytest.approx(2, abs=0.01)
