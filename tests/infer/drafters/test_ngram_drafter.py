"""N-gram lookup: what is proposed, at what cost, and that repetition really is drafted."""

from __future__ import annotations

import copy

import torch

from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cache.round_state import RoundState, row_states
from toolkit.infer.drafters.ngram_drafter import NgramDrafter, NgramLookup
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.targets.target import Target


def proposed(text: list[int], shape: str, min_n: int = 1):
    lookup = NgramLookup(min_n)
    drafter = NgramDrafter(lookup, DraftShape.parse(shape), torch.device("cpu"))
    request = Request(text[:-1], SamplingParams(), output_ids=text[-1:])
    drafter.admit(0, [request], len(text) - 1)
    state = RoundState(1, PagePool(1, 64), torch.device("cpu"))
    state.set_rows(row_states([request], [1]), 1)
    return drafter.propose([request], state.rows(1))


def test_the_latest_longest_match_is_continued():
    """5 6 stood there twice: after the later one came 9. A match of three tokens is better than a later one of two."""
    assert proposed([5, 6, 7, 8, 5, 6, 9, 3, 4, 5, 6], "3,1,4").tokens.tolist() == [[6, 9, 3, 4]]
    assert proposed([1, 5, 6, 7, 2, 5, 6, 8, 1, 5, 6], "2,1,3").tokens.tolist() == [[6, 7, 2]]


def test_a_loop_is_drafted_beyond_its_own_end():
    """The match ends where the text ends; the draft goes on from itself."""
    tree = proposed([7, 1, 2, 1, 2], "7,1,8")
    assert tree.tokens.tolist() == [[2, 1, 2, 1, 2, 1, 2, 1]] and tree.is_chain and tree.valid.all()


def test_nothing_found_is_a_plain_step():
    """No node is verified for nothing."""
    tree = proposed([1, 2, 3, 4], "4,1,5")
    assert tree.nodes == 1 and tree.tokens.tolist() == [[4]]
    assert proposed([1, 2, 3, 2], "4,1,5", min_n=2).nodes == 1


def test_a_tree_is_drafted_as_a_chain_of_its_depth():
    tree = proposed([5, 9, 8, 7, 5, 9, 6, 1, 5, 9], "2,2,6")
    assert tree.tokens.tolist() == [[9, 6, 1]] and tree.is_chain


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


def test_a_row_that_takes_anothers_place_keeps_its_text(small_target):
    """Rows end at different times; drafts from another request's text would still be exact, but never right. A row has
    indexed what its request had before the newest round, and nothing before its first one."""
    lookup = NgramLookup(1)
    engine = Engine(small_target, lookup, DraftShape.chain(3), max_running_requests=3)
    params = [SamplingParams(max_tokens=10 + 9 * (i % 3), ignore_eos=True) for i in range(7)]
    requests = [engine.add_request([3 + i, 9, 4], one) for i, one in enumerate(params)]
    while engine.has_work():
        engine.step()
        for row, request in enumerate(engine._running):
            text = request.prompt_ids + request.output_ids
            drafted_from = text[: len(text) - request.events[-1].committed] if request.events else []
            assert engine.drafter._texts[row].text.tokens == drafted_from
    engine.close()
    assert all(request.finished for request in requests)
    assert sum(event.offered for request in requests for event in request.events) > 0, "nothing was ever drafted"
