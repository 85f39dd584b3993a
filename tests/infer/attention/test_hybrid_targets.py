"""Targets with linear-attention layers: the states after a verify step are those of the last accepted node."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.native_targets import DELTA, SERVES_HYBRIDS
from tests.infer.attention.test_target_families import EXPERTS, VOCABULARY, build, build_head
from tests.infer.conftest import finished, oracle_engine
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.config import ConfigError
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import (
    DraftShapeError,
    SamplingParams,
)

FAMILIES = {
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
}

pytestmark = pytest.mark.skipif(not SERVES_HYBRIDS, reason="needs transformers 5.23 or later")


@pytest.fixture(scope="module")
def target(small_target):
    target = build("qwen3_5_text", FAMILIES["qwen3_5_text"], small_target.tokenizer)
    assert set(target.config.layer_types) == {"linear_attention", "full_attention"}
    return target


def prompts_of(*lengths: int, stem: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    begin = torch.randint(3, VOCABULARY, (stem,), generator=generator).tolist()
    return [begin + torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_exact(family, small_target, reference):
    """Plain decoding and chains of which an oracle makes most tokens right: every number of accepted nodes comes, and
    a state that is one node off changes the rest of the answer."""
    target = build(family, FAMILIES[family], small_target.tokenizer)
    prompts = prompts_of(14, 5, 130, 9, 70)  # shorter and longer than transformers' chunks of 64
    wanted = [reference(target, prompt, 24) for prompt in prompts]
    assert len({token for answer in wanted for token in answer}) > 12, "the answers hardly vary"
    params = SamplingParams(max_tokens=24)
    engine = Engine(target, max_running_requests=2)
    assert [request.output_ids for request in engine.generate(prompts, params, speculative=False)] == wanted
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, wanted, strict=True)}
    engine = oracle_engine(target, answers, right=0.7, tree=False, max_running_requests=2)
    requests = engine.generate(prompts, params)
    assert [request.output_ids for request in requests] == wanted
    assert {event.accepted for request in requests for event in request.events if event.offered > 1} >= {0, 1, 2, 3}


def test_the_first_launches_leave_no_states(target, reference):
    """It writes states into the first rows: the next prompts there start with zeros again."""
    prompts = prompts_of(14, 5, 21)
    memory = {"chunked_prefill_size": 16}
    engine = Engine(target, build_head(target), DraftShape.parse("3,1,4"), max_running_requests=2, **memory)
    engine.warm_up()
    answers = [request.output_ids for request in engine.generate(prompts, SamplingParams(max_tokens=16))]
    engine.close()
    assert answers == [reference(target, prompt, 16) for prompt in prompts]


@pytest.mark.slow
def test_little_memory(target, reference):
    """Prompts in chunks of 7, five at once where three have room: rows move, requests are preempted and read again;
    a head's chain with lookup, and n-gram lookup. A preempted request finds its prefix again."""
    prompts = prompts_of(4, 5, 1, 9, 7, stem=35)
    wanted = [reference(target, prompt, 40) for prompt in prompts]
    for draft, lookup in ((build_head(target), True), (NgramLookup(), None)):
        room = 144 if lookup is None else 304  # the head may fall behind lookup by some positions
        options = {"max_running_requests": 5, "context_length": 128, "lookup": lookup}
        options |= {"max_total_tokens": room, "chunked_prefill_size": 7}
        engine = Engine(target, draft, DraftShape.parse("3,1,4"), **options)
        requests = [engine.add_request(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
        assert finished(engine, requests) == wanted
        assert lookup is not None or sum(request.preemptions for request in requests) > 0


def test_prefixes_are_reused(target, reference):
    """A conversation goes on: its text up to the last whole page is not read again, with the states at its end. A
    prompt that only begins alike starts where states are kept, or anew."""
    (first,), params = prompts_of(41), SamplingParams(max_tokens=20, ignore_eos=True)
    engine = Engine(target, build_head(target), DraftShape.parse("3,1,4"), max_running_requests=2, context_length=200)
    begun = engine.generate([first], params)[0]
    turns = [first + begun.output_ids + more for more in prompts_of(9, 30)]
    alike = [first[:34] + prompts_of(7)[0], first[:20] + prompts_of(7)[0]]
    done = engine.generate([*turns, *alike], params)
    plain = Engine(target, prefix_cache=False, context_length=200)
    wanted = [one.output_ids for one in plain.generate([*turns, *alike], params)]
    assert [one.output_ids for one in done] == wanted
    assert [one.cached_tokens for one in done] == [48, 48, 32, 0]  # 61 tokens, of which the last ones are not read yet
    engine.check_integrity()
    many = [prompt + [5] for prompt in prompts_of(*range(20, 30))]
    for prompt in many:  # only the latest states are kept
        engine.generate([prompt], params)
    assert engine.generate([turns[0]], params)[0].cached_tokens == 0
    assert engine.generate([many[-1] + [7, 8]], params)[0].cached_tokens > 0


def test_a_failed_chunk_is_read_again(target, monkeypatch):
    """States change when a forward over a prompt is complete, so a chunk that failed is not applied twice."""
    (prompt,), params = prompts_of(40), SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = Engine(target).generate([prompt], params)[0].output_ids
    memory = {"chunked_prefill_size": 7}
    engine = Engine(target, build_head(target), DraftShape.parse("3,1,4"), **memory)
    request, admit, calls = engine.add_request(prompt, params), engine.drafter.admit, []

    def fails_once(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        admit(*arguments)

    monkeypatch.setattr(engine.drafter, "admit", fails_once)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    while engine.has_work():
        engine.step()
    assert request.output_ids == wanted and len(calls) > 5


def test_what_needs_one_chain_is_refused(target):
    """Trees, recorded rounds and compiled bodies: refused with the way out, not computed wrongly."""
    head = build_head(target)
    with pytest.raises(DraftShapeError, match="tree 3x2/6.*linear-attention layers.*3,1,4"):
        Engine(target, head, DraftShape.parse("3,2,6"))
    with pytest.raises(ConfigError, match="`cuda_graph_max_bs`.*linear-attention layers; leave it out"):
        Engine(target, head, DraftShape.parse("3,1,4"), capture=lambda run: run, cuda_graph_max_bs=2)
