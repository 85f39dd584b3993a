"""Suffix automaton and rates of lookup against definitions by rescanning; drafts of lookup alone, and beside a head."""

from __future__ import annotations

import copy
import gc
import random

import pytest
import torch

from tests.infer.conftest import finished
from tests.infer.drafters.conftest import ragged_prompts, settings
from toolkit.infer.drafters import lookup as lookup_module
from toolkit.infer.drafters.estimates import Rates
from toolkit.infer.drafters.lookup import (
    CONTEXT,
    FIRST_RATES,
    GUESS_WEIGHT,
    MEMORY,
    SEPARATOR,
    Lookups,
    NgramLookup,
    SuffixAutomaton,
    SuffixLookup,
    with_chains,
)
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, summarise
from toolkit.targets.target import Target

REPEATED = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [3, 9, 3, 9, 3], [1, 2], [4, 4, 4, 4]]


# -- the automaton ----------------------------------------------------------------------------------------------------


def longest_repeat(text: list[int]) -> tuple[int, int] | None:
    """The definition: the longest end of the text that ended before, and the latest place of it."""
    for size in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return size, end
    return None


@pytest.mark.parametrize("symbols", [1, 3, 9])
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


def test_a_draft_continues_the_match_and_states_its_length():
    """5 6 stood there before 7 8; the text's end is 5 6. A loop goes on beyond the text's end."""
    lookup = SuffixLookup([Rates(FIRST_RATES, GUESS_WEIGHT, MEMORY)])
    lookup.read(Request([5, 6, 7, 8, 9, 5], SamplingParams(), output_ids=[6]))
    tokens, lengths = lookup.draft(3)
    assert tokens == [7, 8, 9]
    two, three, four = FIRST_RATES[1:4]
    assert lengths == pytest.approx([1, 1 + two, 1 + two + two * three, 1 + two + two * three + two * three * four])
    loop = SuffixLookup([Rates(FIRST_RATES, GUESS_WEIGHT, MEMORY)])
    loop.read(Request([1, 2, 1], SamplingParams(), output_ids=[2]))
    assert loop.draft(5)[0] == [1, 2, 1, 2, 1]
    fresh = SuffixLookup([Rates(FIRST_RATES, GUESS_WEIGHT, MEMORY)])
    fresh.read(Request([1, 2, 3], SamplingParams(), output_ids=[4]))
    assert fresh.draft(4) == ([], [1.0])


def test_long_texts_are_read_in_parts_and_by_their_end(monkeypatch):
    """A prompt of thousands of tokens must not hold a round up, nor fill the memory; a row beside it is read at once.
    Until all is read nothing is drafted, and a text that has grown too long begins again with its end."""
    for name, value in {"READ_AT_ONCE": 8, "LEAST_READ": 3, "MOST_READ": 20}.items():
        monkeypatch.setattr(lookup_module, name, value)
    long, short = Request([*range(100, 140), 1, 2], SamplingParams()), Request([5, 6, 5], SamplingParams())
    long.output_ids, short.output_ids = [1], [6]
    lookups, drafts = Lookups(), []
    for _ in range(4):
        lookups.read([long, short])
        drafts.append((lookups.draft(long, 2)[0], lookups.draft(short, 2)[0]))
    assert drafts == [([], []), ([], [5, 6]), ([2, 1], [5, 6]), ([2, 1], [5, 6])]
    text = lookups._texts[long]
    assert text.text.tokens == [*range(123, 140), 1, 2, 1]
    seen = 0
    for token in [2, 1, 7] * 10:
        long.output_ids.append(token)
        lookups.read([long, short])
        seen += len(text.text.tokens) > 40
    assert not seen and lookups.draft(long, 3)[0] == [2, 1, 7] and sum(text._rates[0].tries) <= 30


# -- lookup alone -----------------------------------------------------------------------------------------------------


def test_repetition_is_drafted(small_target):
    """A target whose attention says nothing chooses by the last token alone, so its answer is a loop; from the second
    round of the loop on, lookup must follow it, 7 tokens a step."""
    model = copy.deepcopy(small_target.model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    target = Target(model=model, tokenizer=small_target.tokenizer, name="loop")
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    prompts = [[3, 9, 4, 17, 8, 3, 9, 4, 17, 8, 3, 9], [5, 6]]
    engine = Engine(target, NgramLookup(), DraftShape.chain(6), max_running_requests=2)
    plain = engine.generate(prompts, params, speculative=False)
    got = engine.generate(prompts, params)
    engine.close()
    assert [request.output_ids for request in got] == [request.output_ids for request in plain]
    for request in got:
        assert summarise(request.events).accept_length > 4


# -- beside a head ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "batch", "adaptive"),
    [
        ("eagle3", "4,3,12", 16, True),
        ("mtp-three-layers", "4,3,12", 16, False),
        ("eagle2", "4,1,5", 1, True),
    ],
)
def test_no_token_changes(small_target, build, plain, name, shape, batch, adaptive):
    """fp32, exact, greedy and sampled; over 24 tokens matches are frequent."""
    options = {"lookup": True, "max_running_requests": batch, "adaptive": adaptive}
    engine = Engine(small_target, build(name), DraftShape.parse(shape), **options)
    some = slice(None) if batch > 1 else slice(0, 6)
    requests = [engine.add_request(p, s) for p, s in zip(ragged_prompts()[some], settings()[some], strict=True)]
    assert finished(engine, requests) == plain[some]


def test_both_draft_in_one_batch(small_target, build, monkeypatch):
    """Rows with a match are offered lookup's chain, the others the head's draft, and both are accepted at times."""
    seen = []

    def noted(tree, roots, drafts):
        seen.append(tuple(bool(draft) for draft in drafts))
        return with_chains(tree, roots, drafts)

    monkeypatch.setattr(lookup_module, "with_chains", noted)
    engine = Engine(small_target, build("eagle3"), DraftShape(4, 3, 12), lookup=True, max_running_requests=4)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in REPEATED]
    answers = finished(engine, requests)
    assert answers == [one.output_ids for one in Engine(small_target).generate(REPEATED, params)]
    assert any(any(rows) and not all(rows) for rows in seen), "no batch had both"


def test_preempted_and_moved_rows_stay_exact(small_target, build):
    """Little memory: requests lose their pages and begin again; short ones end and rows move."""
    options = {"lookup": True, "max_running_requests": 4, "max_total_tokens": 360}
    engine = Engine(small_target, build("eagle3"), DraftShape.chain(4), context_length=150, **options)
    params = [SamplingParams(max_tokens=50 + 13 * (i % 3), ignore_eos=True) for i in range(8)]
    prompts = [REPEATED[i % 4] + [i + 1] for i in range(8)]
    requests = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    answers = finished(engine, requests)
    assert answers == [one.output_ids for one in Engine(small_target).generate(prompts, params)]


def test_a_corpus_is_drafted_from(small_target, build):
    """An answer that was given before is drafted whole, although its own text does not repeat."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = Engine(small_target).generate([[3, 11, 5]], params)[0].output_ids
    lengths, given = {}, SuffixAutomaton()
    given.extend([*plain, SEPARATOR])
    for name, corpus in (("without", None), ("with", given)):
        engine = Engine(small_target, build("eagle3"), DraftShape.chain(4), lookup=True, corpus=corpus)
        request = engine.generate([[3, 11, 5]], params)[0]
        engine.close()
        assert request.output_ids == plain
        lengths[name] = len(plain) / len(request.events)
    assert lengths["with"] > lengths["without"] and lengths["with"] > 3


def test_texts_of_ended_requests_are_freed(small_target, small_draft):
    engine = Engine(small_target, small_draft, DraftShape.chain(3), lookup=True, max_running_requests=4)
    engine.generate(REPEATED, SamplingParams(max_tokens=8, ignore_eos=True))
    engine.close()
    gc.collect()
    assert len(engine.drafter._texts._texts) == 0
