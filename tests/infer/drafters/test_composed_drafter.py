"""A head and lookup in one drafter: exact under every verifier, and each drafts where it should."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.infer.drafters.test_adaptive_drafter import ScriptedChoice
from tests.infer.drafters.test_drafters import finished, ragged_prompts, settings
from toolkit.infer.attention.metadata import FEW
from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.drafters.composed_drafter import MOST_DEPTH, with_chains
from toolkit.infer.drafters.lookup import (
    DEPTHS,
    RETRY,
    SEPARATOR,
    LookupChoice,
    SuffixAutomaton,
    SuffixLookup,
)
from toolkit.infer.drafters.step_costs import LookupArm, StepCosts
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape, Proposal, chain_tree, root_only
from toolkit.infer.request.params import SamplingParams

HEADS = ["eagle3", "mtp-three-layers", "eagle2"]
REPEATED = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [3, 9, 3, 9, 3], [1, 2], [4, 4, 4, 4]]


@pytest.fixture(scope="module")
def plain(small_target) -> list[list[int]]:
    return [request.output_ids for request in Engine(small_target).generate(ragged_prompts(), settings())]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("shape", ["1,1,2", "4,1,5", "4,3,12"])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("adaptive", [False, True])
def test_no_token_changes(small_target, build, plain, name, shape, batch, adaptive):
    """fp32, exact, greedy and sampled; over 24 tokens matches are frequent."""
    options = {"lookup": True, "max_running_requests": batch, "adaptive": adaptive}
    engine = Engine(small_target, build(name), DraftShape.parse(shape), **options)
    some = slice(None) if batch > 1 else slice(0, 6)
    requests = [engine.add_request(p, s) for p, s in zip(ragged_prompts()[some], settings()[some], strict=True)]
    assert finished(engine, requests) == plain[some]


@pytest.mark.parametrize("shape", ["4,1,5", "4,3,12"])
def test_both_draft_in_one_batch(small_target, build, shape, monkeypatch):
    """Rows with a match are offered lookup's chain, the others the head's draft, and both are accepted at times."""
    from toolkit.infer.drafters import composed_drafter

    seen = []

    def noted(tree, roots, drafts):
        seen.append(tuple(bool(draft) for draft in drafts))
        return with_chains(tree, roots, drafts)

    monkeypatch.setattr(composed_drafter, "with_chains", noted)
    engine = Engine(small_target, build("eagle3"), DraftShape.parse(shape), lookup=True, max_running_requests=4)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in REPEATED]
    answers = finished(engine, requests)
    assert answers == [one.output_ids for one in Engine(small_target).generate(REPEATED, params)]
    assert any(any(rows) and not all(rows) for rows in seen), "no batch had both"


def test_preempted_and_moved_rows_stay_exact(small_target, build):
    """Little memory: requests lose their pages and begin again; short ones end and rows move."""
    options = {"lookup": True, "max_running_requests": 4, "memory": MemorySettings(max_total_tokens=360)}
    engine = Engine(small_target, build("eagle3"), DraftShape.chain(4), context_length=150, **options)
    params = [SamplingParams(max_tokens=50 + 13 * (i % 3), ignore_eos=True) for i in range(8)]
    prompts = [REPEATED[i % 4] + [i + 1] for i in range(8)]
    requests = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    answers = finished(engine, requests)
    assert answers == [one.output_ids for one in Engine(small_target).generate(prompts, params)]


@pytest.mark.parametrize("verify", ["auto", "rejection", "block"])
def test_drawn_drafts_stay_in_the_heads_rows(small_target, build, verify):
    """Rows whose drafts are drawn and rows with lookup's drafts run in one batch under the chain rules."""
    options = {"lookup": True, "max_running_requests": 4, "verify": verify}
    engine = Engine(small_target, build("eagle3"), DraftShape.chain(3), **options)
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7)
    requests = [engine.add_request(prompt, params) for prompt in REPEATED]
    assert all(len(answer) == 30 for answer in finished(engine, requests))
    assert any(event.accepted for request in requests for event in request.events)


def test_chains_take_the_place_of_rows():
    """Tree rows keep their nodes and get invalid ones; chain rows have the given tokens; their q is not used."""
    roots = torch.tensor([7, 8])
    q = torch.ones(2, 2, 4)
    tree = chain_tree(roots, torch.tensor([[1, 2], [3, 4]]), [2, 1], Proposal(q, torch.arange(4)))
    made = with_chains(tree, roots, [[], [5, 6, 9]])
    assert made.tokens.tolist() == [[7, 1, 2, 0], [8, 5, 6, 9]] and made.is_chain and made.deepest == 3
    assert made.valid.tolist() == [[True, True, True, False], [True] * 4]
    assert made.proposal.drawn.tolist() == [True, False] and made.proposal.q.shape == (2, 3, 4)
    assert made.mask[0, 3].tolist() == [False, False, False, True]
    alone = with_chains(root_only(roots), roots, [[5], []])
    assert alone.tokens.tolist() == [[7, 5], [8, 0]] and alone.valid.tolist() == [[True, True], [True, False]]


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


def measured(batch: int, seconds: dict) -> StepCosts:
    costs = StepCosts()
    for arm, (draft, verify) in seconds.items():
        costs.add(batch, arm, draft, verify)
    return costs


def test_the_faster_draft_is_chosen():
    """Plain 1 s; five nodes verify in 1.2 s; the head drafts in 0.3 s."""
    chain = DraftShape.chain(4)
    costs = measured(1, {None: (0.0, 1.0), chain: (0.3, 1.2), LookupArm(None, 4): (0.0, 1.2)})
    long = [[1.0, 1.9, 2.7, 3.4, 4.0]]
    assert LookupChoice().choose(long, chain, [2.0], costs, 1.0) == ([4], LookupArm(None, 4))
    assert LookupChoice().choose([[1.0]], chain, [2.0], costs, 1.0) is None, "no match"
    choice = LookupChoice()
    choice.choose(long, chain, [2.0], costs, 1.0)  # a round of lookup, so no retry is due
    assert choice.choose([[1.0, 1.1, 1.11, 1.11, 1.11]], chain, [2.0], costs, 1.0) is None, "the head is faster"


def test_a_batch_keeps_the_head_for_rows_without_a_match():
    chain = DraftShape.chain(4)
    costs = measured(4, {None: (0.0, 1.0), chain: (0.1, 1.2), LookupArm(None, 4): (0.0, 1.2)})
    found = [1.0, 1.9, 2.7, 3.4, 4.0]
    lookup = [found, found, [1.0], [1.0, 1.2, 1.2, 1.2, 1.2]]
    depths, arm = LookupChoice().choose(lookup, chain, [2.0] * 4, costs, 1.0)
    assert arm.shape == chain and depths == [arm.depth, arm.depth, 0, 0] and arm.depth >= 3


def test_rows_without_a_match_count_as_much_as_the_others():
    """Half of 16 rows would get 4 tokens in the time of 2: 2.5 a row in the mean, but the others wait for twice as
    long."""
    costs = measured(16, {None: (0.0, 1.0), LookupArm(None, 3): (0.0, 2.0)})
    found = [1.0, 2.0, 3.0, 4.0]
    assert LookupChoice().choose([found] * 8 + [[1.0]] * 8, None, [1.0] * 16, costs, 1.1) is None
    assert LookupChoice().choose([found] * 15 + [[1.0]], None, [1.0] * 16, costs, 1.1) is not None


def test_a_round_of_lookup_alone_is_not_timed_as_the_heads():
    """All rows have a match: the head rests, and its times must not be taken from this round."""
    chain = DraftShape.chain(4)
    costs = measured(2, {None: (0.0, 1.0), chain: (0.0, 1.2), LookupArm(chain, 4): (0.0, 1.2)})
    depths, arm = LookupChoice().choose([[1.0, 1.9, 2.7, 3.4, 4.0]] * 2, chain, [2.0] * 2, costs, 1.0)
    assert arm == LookupArm(None, max(depths)) and min(depths) > 0


def test_drafts_take_the_fast_attention():
    """A draft of lookup and its root are few enough nodes for one native call."""
    assert MOST_DEPTH + 1 <= FEW and max(DEPTHS) == MOST_DEPTH


def test_texts_of_ended_requests_are_freed(small_target, small_draft):
    engine = Engine(small_target, small_draft, DraftShape.chain(3), lookup=True, max_running_requests=4)
    engine.generate(REPEATED, SamplingParams(max_tokens=8, ignore_eos=True))
    engine.close()
    gc.collect()
    assert len(engine.drafter._texts) == 0


def test_one_slow_round_does_not_end_lookup():
    """Depth 1 was slow once: it is tried again, but only after RETRY rounds."""
    costs = measured(1, {None: (0.0, 1.0), LookupArm(None, 1): (0.0, 9.0)})
    choice = LookupChoice()
    ran = [choice.choose([[1.0, 1.9]], None, [1.0], costs, 1.0) is not None for _ in range(2 * RETRY + 1)]
    assert [number for number, one in enumerate(ran) if one] == [0, RETRY, 2 * RETRY]


@pytest.mark.parametrize(("batch", "searched"), [(1, [*range(40)]), (4, [*range(16), 16, 24, 32])])
def test_texts_are_searched_less_where_lookup_never_drafts(small_target, small_draft, monkeypatch, batch, searched):
    """With several rows, each round's search would be a cost of plain decoding. A later one reads all tokens since, and
    finds what it would have found; once lookup drafts, every round is searched again."""
    options = {"lookup": True, "max_running_requests": batch, "adaptive": True}
    engine = Engine(small_target, small_draft, DraftShape.chain(3), **options)
    chooser = ScriptedChoice([None] * 40 + [LookupArm(None, 1)] + [None] * 9)
    engine.drafter.chooser, chooser.depths = chooser, [1] * batch
    composed, rounds = engine.drafter.inner, []
    lookups = composed.lookups
    monkeypatch.setattr(composed, "lookups", lambda rows: rounds.append(len(rows[0].events)) or lookups(rows))
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    requests = [engine.add_request(REPEATED[row], params) for row in range(batch)]
    for _ in range(40):
        engine.step()
    assert rounds == searched
    found = [tokens for tokens, _ in lookups(requests)]
    whole = [SuffixLookup(composed._rates) for _ in requests]
    for one, request in zip(whole, requests, strict=True):
        one.read(request)
    assert found == [one.draft(MOST_DEPTH)[0] for one in whole] and any(found)
    for _ in range(10):
        engine.step()
    engine.close()
    assert rounds == [*searched, *range(40, 50)]
