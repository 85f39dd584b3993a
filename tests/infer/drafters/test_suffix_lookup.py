"""Suffix automaton, corpus and the rates of lookup, against definitions by rescanning."""

from __future__ import annotations

import random

import pytest

from toolkit.infer.drafters.lookup_corpus import CONTEXT, CorpusCursor, LookupCorpus
from toolkit.infer.drafters.suffix_automaton import SuffixAutomaton
from toolkit.infer.drafters.suffix_lookup import FIRST_RATES, MatchRates, SuffixLookup
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


@pytest.mark.parametrize("size, depth", [(1, 1), (1, 3), (2, 4), (3, 2)])
@pytest.mark.parametrize("symbols", [2, 3, 9])
def test_places_of_an_ngram_have_all_its_continuations(symbols, size, depth):
    """Texts in which everything recurs. The definition: every earlier occurrence; the latest one comes first."""
    chance = random.Random(symbols)
    for _ in range(10):
        automaton, text = SuffixAutomaton(), []
        for _ in range(60):
            text.append(chance.randrange(symbols))
            automaton.append(text[-1])
            ends = [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == text[-size:]]
            found = list(automaton.places(size, depth))
            assert found[:1] == ends[:1] and set(found) <= set(ends) and found == sorted(found, reverse=True)
            whole = [text[end : end + depth] for end in found if end + depth <= len(text)]
            assert sorted(whole) == sorted(
                map(list, {tuple(text[end : end + depth]) for end in ends if end + depth <= len(text)})
            )


def test_the_corpus_finds_the_longest_end_of_a_text():
    """Texts of 4 tokens, so ends recur; the next token is the most frequent one after the end."""
    chance = random.Random(0)
    texts = [[chance.randrange(4) for _ in range(chance.randint(1, 40))] for _ in range(20)]
    cursor, ending = CorpusCursor(LookupCorpus(texts)), []
    for _ in range(300):
        token = chance.randrange(4)
        cursor.append(token)
        ending = [*ending, token][-CONTEXT:]
        after: dict[int, list[int]] = {}
        for text in texts:
            for size in range(1, len(ending) + 1):
                after.setdefault(size, []).extend(
                    text[at + size] for at in range(len(text) - size) if text[at : at + size] == ending[-size:]
                )
        match = cursor.match
        if match is None:
            assert not after[1]
            continue
        assert match.tokens[match.place - match.length : match.place].tolist() == ending[-match.length :]
        assert int(match.tokens[match.place]) in after[match.length]


def test_many_occurrences_vote():
    """More than are counted: those that come first in the order of the following tokens do not decide alone."""
    corpus = LookupCorpus([[7, 2]] * 70 + [[7, 9]] * 900 + [[7]] * 70)
    match = corpus.find([7])
    assert int(match.tokens[match.place]) == 9
    assert LookupCorpus([[7]] * 70).find([7]) is None


def test_the_end_of_a_text_is_enough():
    """A cursor that starts with a long text matches as one that read it token by token."""
    chance = random.Random(3)
    corpus = LookupCorpus([[chance.randrange(3) for _ in range(400)]])
    text = [chance.randrange(3) for _ in range(100)]
    slow, fast = CorpusCursor(corpus), CorpusCursor(corpus)
    for token in text:
        slow.append(token)
    fast.start(text)
    assert fast.match.length == slow.match.length == CONTEXT or fast.match == slow.match


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
    lookup = SuffixLookup([MatchRates(), MatchRates()], LookupCorpus([[1, 2, 3, 4], [9, 9]]))
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
