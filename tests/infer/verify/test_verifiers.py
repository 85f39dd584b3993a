"""Verifiers by hand, and in the engine: who may ask for which, and what stays the same under each."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tests.infer.conftest import finished
from tests.infer.verify.test_grammar_masks import ByToken, some_grammar
from tests.infer.verify.test_verifiers_distribution import misfit
from toolkit.infer.drafters import lookup as lookup_module
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import DraftShapeError, EngineError, SamplingParams, VerifyError
from toolkit.infer.request.request import summarise
from toolkit.infer.verify.verifiers import VERIFIERS, DrawnChains, block, rejection, settle

DRAWING = ("rejection", "block")
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11], [6], [2, 20, 21, 5]]


def test_equal_distributions_keep_every_draft():
    """A head that is the target: no draft is lost to rounding, whatever the coins, and 0 / 0 is no rejection."""
    probs = torch.softmax(torch.randn(500, 4, 50, generator=torch.Generator().manual_seed(0)), dim=-1)
    q = probs.clone()
    q[:, -1] = 0
    drafts = torch.multinomial(probs.flatten(0, 1), 1, generator=torch.Generator().manual_seed(1)).view(500, 4)
    drafted = torch.tensor([True, True, True, False]).expand(500, 4)
    for rule in (rejection, block):
        chains = DrawnChains(probs, q, drafts, drafted, torch.full((500, 4), 1 - 2.0**-53, dtype=torch.float64))
        assert rule(chains)[0].tolist() == [3] * 500
        assert torch.equal(settle(rule, chains, torch.rand(500, 4).double())[:, :3], drafts[:, :3])


def test_what_does_not_go_together_is_refused(small_target, small_draft):
    """Trees, and drafts without a distribution: each message says what to do instead."""
    with pytest.raises(DraftShapeError, match=r"`verify` is \w+, .* a chain.*tree 4x3/12.*4,1,5.*`verify` to target"):
        Engine(small_target, small_draft, DraftShape.parse("4,3,12"), verify="block")
    with pytest.raises(EngineError, match="needs a draft head.*target"):
        Engine(small_target, NgramLookup(), verify="block")


@pytest.mark.parametrize("verify", DRAWING)
def test_greedy_and_plain_rows_beside_drawn_ones(small_target, small_draft, verify):
    """In one batch: greedy rows write the target's own tokens, plain sampled rows those of their seed, and edited,
    logged and shorter-chained rows run beside them."""
    engine = Engine(small_target, small_draft, DraftShape.chain(4), max_running_requests=8, verify=verify)
    greedy = SamplingParams(max_tokens=40, ignore_eos=True)
    sampled = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3)
    edited = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, presence_penalty=0.5, logprobs=2, seed=0)
    wanted = [engine.generate([p], s, speculative=False)[0].output_ids for p in PROMPTS for s in (greedy, sampled)]
    requests = []
    for prompt in PROMPTS:
        requests.append(engine.add_request(prompt, greedy))
        requests.append(engine.add_request(prompt, sampled, speculative=False))
    beside = [engine.add_request(PROMPTS[0], sampled), engine.add_request(PROMPTS[1], edited)]
    beside.append(engine.add_request(PROMPTS[2], sampled, shape=DraftShape.chain(2)))
    assert finished(engine, requests) == wanted
    stats = summarise(event for request in beside for event in request.events)
    assert stats.accepted > 5 and {event.offered for event in beside[2].events} == {2}
    assert len(beside[1].logprobs) == 40
    assert [kept.token_id for kept in beside[1].logprobs] == beside[1].output_ids


@pytest.mark.slow
def test_auto_keeps_seeds_and_draws_for_the_rest(small_target, small_draft, monkeypatch):
    """In one batch: a stated seed writes the tokens of plain decoding, drafts drawn beside it or not. Requests without
    one keep more drafts: over 60 of them chance alone would fail this less than once in 1e4 runs, and their seeds are
    fixed here."""
    seeds = iter(range(10_000))
    monkeypatch.setattr("secrets.randbits", lambda _bits: next(seeds))
    free = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0)
    stated = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=i) for i in range(4)]
    engine = Engine(small_target, small_draft, DraftShape.chain(4), max_running_requests=8, verify="auto")
    plain = [engine.generate([p], s, speculative=False)[0].output_ids for p, s in zip(PROMPTS, stated, strict=True)]
    beside = [engine.add_request(PROMPTS[i % 4], free) for i in range(60)]
    kept = engine.generate(PROMPTS, stated)
    while engine.has_work():
        engine.step()
    alone = engine.generate(PROMPTS, stated)
    engine.close()
    assert [one.output_ids for one in kept] == [one.output_ids for one in alone] == plain
    assert summarise(event for one in kept for event in one.events).accepted > 0
    by_target = Engine(small_target, small_draft, DraftShape.chain(4), max_running_requests=8, verify="target")
    of_target = by_target.generate([PROMPTS[i % 4] for i in range(60)], free)
    by_target.close()
    lengths = [summarise(event for one in some for event in one.events).accept_length for some in (beside, of_target)]
    assert lengths[0] > lengths[1]


def test_what_a_request_may_ask_for():
    """The rule of its engine, and those that need no other draws than this rule has; the others are named."""
    verifier = VERIFIERS["rejection"]
    assert [verifier.of_request(asked) for asked in (None, "target", "rejection")] == [None, "target", None]
    with pytest.raises(VerifyError, match="verify 'block'.* verifies by rejection: .*target"):
        verifier.of_request("block")


@pytest.mark.parametrize("verify", ["rejection", "auto"])
def test_a_request_chooses_its_rule(small_target, small_draft, monkeypatch, verify):
    """In one batch: by target a seed writes the tokens of plain decoding, whatever the engine's rule does beside it."""
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=i) for i in range(4)]
    engine = Engine(small_target, small_draft, DraftShape.chain(4), max_running_requests=8, verify=verify)
    plain = [engine.generate([p], s, speculative=False)[0].output_ids for p, s in zip(PROMPTS, params, strict=True)]
    asked = "block" if verify == "auto" else None
    drawn = [engine.add_request(p, s, verify=asked) for p, s in zip(PROMPTS, params, strict=True)]
    kept = [engine.add_request(p, s, verify="target") for p, s in zip(PROMPTS, params, strict=True)]
    assert all(map(engine.verifier.draws_for, drawn)) and not any(map(engine.verifier.draws_for, kept))
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    engine.close()
    assert [one.output_ids for one in kept] == plain != [one.output_ids for one in drawn]
    assert summarise(event for one in kept for event in one.events).accepted > 0


@pytest.mark.parametrize(
    ("verify", "shape", "where"), [("target", "3,3,8", "fc.weight"), ("block", "4,1,5", "lm_head.weight")]
)
def test_a_head_of_nan_changes_no_answer(small_target, small_draft, verify, shape, where):
    """A checkpoint that training broke drafts rubbish; greedy and seeded answers stay the target's, and no step fails.
    Of lm_head one row alone is broken: its token's score is, and with it the whole distribution."""
    head = copy.deepcopy(small_draft.head)
    with torch.no_grad():
        head.get_parameter(where)[0] = math.nan
    engine = Engine(
        small_target, dataclasses.replace(small_draft, head=head), DraftShape.parse(shape), max_running_requests=8,
        verify=verify,
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    sampled = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3)
    wanted = [engine.generate([p], s, speculative=False)[0].output_ids for p in PROMPTS for s in (greedy, sampled)]
    requests = [engine.add_request(p, s, verify="target") for p in PROMPTS for s in (greedy, sampled)]
    beside = [engine.add_request(p, sampled) for p in PROMPTS]
    assert finished(engine, requests) == wanted
    assert [len(one.output_ids) for one in beside] == [30] * 4


def two_token_distribution(target, prompt: list[int], params: SamplingParams, allowed: Tensor | None = None) -> Tensor:
    """Exact distribution of the answer's second and third token [V, V], summed over the first; with the penalty.

    allowed [.., V]: which tokens may follow each token."""
    vocab, model = target.vocab_size, target.model

    def after(texts: list[list[int]], penalised: list[list[int]]) -> Tensor:
        logits = model(input_ids=torch.tensor([prompt + text for text in texts])).logits[:, -1].double()
        for row, tokens in enumerate(penalised):
            logits[row, sorted(set(tokens))] -= params.presence_penalty
        if allowed is not None:
            logits = logits.masked_fill(~allowed[[(prompt + text)[-1] for text in texts]], -torch.inf)
        return torch.softmax(logits / params.temperature, dim=-1)

    one = [[a] for a in range(vocab)]
    two = [[a, b] for a in range(vocab) for b in range(vocab)]
    first, second = after([[]], [[]])[0], after(one, one)
    third = after(two, two).view(vocab, vocab, vocab)
    return torch.einsum("a,ab,abc->bc", first, second, third)


@pytest.mark.parametrize(
    ("verify", "name", "lookup"),
    [
        pytest.param("rejection", "eagle3", None, marks=pytest.mark.slow, id="rejection"),
        pytest.param("block", "eagle3", True, marks=pytest.mark.slow, id="block beside lookup"),
        pytest.param("auto", "eagle3", None, marks=pytest.mark.slow, id="auto"),
        pytest.param("block", "dspark", None, id="block of a block drafter"),
        pytest.param("target", "dspark", None, marks=pytest.mark.slow, id="best-first trees"),
    ],
)
def test_distribution_of_an_engine(small_target, build, monkeypatch, verify, name, lookup):
    """G-test of the second and third token over 3000 seeds, in an engine with a head of 20 of the 24 tokens.

    The distributions of a round are computed by several parts of its rows. The block drafter ends chains by its
    confidence, which depends on drawn drafts.

    With lookup, rows whose drafts are drawn run beside rows whose drafts are looked up: those with a first token that
    the prompt has, too. Some of the tokens are drafts; a presence penalty makes the distribution depend on earlier
    drafts. Under auto these requests state no seed, and as many that do run beside them. Seeds are fixed, so the
    outcome is too; were they fresh, chance alone would fail this once in 1e5 runs.
    """
    runs, tree = 3000, verify == "target"
    heat = 1.0 if tree else 1.5
    settings = {"temperature": heat, "presence_penalty": 0.8, "max_tokens": 4, "ignore_eos": True}
    seeds = iter(range(runs))
    monkeypatch.setattr("secrets.randbits", lambda _bits: next(seeds))
    stated = [SamplingParams(**settings, seed=i) for i in range(runs)]
    free = SamplingParams(**settings)
    params = [one for each in stated for one in (free, each)] if verify == "auto" else stated
    prompt = PROMPTS[0] if lookup is None else [*range(1, 24, 2), *PROMPTS[0]]
    probs = two_token_distribution(small_target, prompt, SamplingParams(**settings)).flatten()
    monkeypatch.setattr(lookup_module, "LEAST_LENGTH", 1.0)
    monkeypatch.setattr("toolkit.infer.verify.verifiers.LOGIT_ROWS", 70)
    options = {"max_running_requests": 64, "verify": verify, "lookup": lookup}
    draft = dataclasses.replace(build(name), draft_confidence=0.45 if name == "dspark" and not tree else 0.0)
    engine = Engine(small_target, draft, DraftShape.parse("16") if tree else DraftShape.chain(2), **options)
    counts = torch.zeros(24 * 24, dtype=torch.float64)
    accepted = 0
    for request in engine.generate([prompt] * len(params), params):
        if verify == "auto" and request.states_seed:
            continue
        counts[request.output_ids[1] * 24 + request.output_ids[2]] += 1
        accepted += request.token_from_draft[1] + request.token_from_draft[2]
    engine.close()
    assert accepted > runs / 20
    g, limit = misfit(counts, probs * runs, z=4.265)
    assert g < limit, f"G = {g:.1f}, limit {limit:.1f}"


@pytest.mark.slow
@pytest.mark.parametrize(("verify", "shape"), [("block", "2,1,3"), ("rejection", "2,1,3"), ("target", "2,3,7")])
def test_distribution_of_an_engine_under_a_grammar(small_target, small_draft, verify, shape):
    """G-test as above, of the target's distribution over the tokens that the grammar allows. Drafts that are masked as
    the target's logits are, but verified as if they were not, would give another one (arXiv 2605.07698)."""
    runs, allowed = 3000, some_grammar(5, 24)
    engine = Engine(small_target, small_draft, DraftShape.parse(shape), max_running_requests=64, verify=verify)
    settings = {"temperature": 1.5, "max_tokens": 4, "ignore_eos": True}
    requests = [engine.add_request(PROMPTS[0], SamplingParams(**settings, seed=i)) for i in range(runs)]
    for request in requests:
        request.grammar = ByToken(allowed)
    while engine.has_work():
        engine.step()
    engine.close()
    probs = two_token_distribution(small_target, PROMPTS[0], SamplingParams(**settings), allowed).flatten()
    places = [one.output_ids[1] * 24 + one.output_ids[2] for one in requests]
    counts = torch.bincount(torch.tensor(places), minlength=24 * 24).double()
    assert counts[probs == 0].sum() == 0, "a token that the grammar forbids"
    assert sum(one.token_from_draft[1] + one.token_from_draft[2] for one in requests) > runs / 20
    g, limit = misfit(counts, probs * runs, z=4.265)
    assert g < limit, f"G = {g:.1f}, limit {limit:.1f}"
