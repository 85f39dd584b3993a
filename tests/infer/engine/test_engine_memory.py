"""Pages, prefixes, chunks and preemption: none of them may change a token, or lose a page."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.infer.drafters.conftest import AnyChoice
from toolkit.infer.drafters import head_drafter
from toolkit.infer.engine import scheduler
from toolkit.infer.engine.engine import Engine
from toolkit.infer.engine.scheduler import LEAST_CHUNK
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

TIGHT = {"chunked_prefill_size": 7, "max_total_tokens": 176}
MEMORY = {"ample": {}, "tight": TIGHT, "tight-no-prefixes": {**TIGHT, "prefix_cache": False}}


def families(seed: int, count: int, chance: random.Random) -> list[list[int]]:
    """Prompts that share beginnings of various lengths, some of them whole prompts."""
    generator = torch.Generator().manual_seed(seed)
    stems = [torch.randint(1, 24, (n,), generator=generator).tolist() for n in (60, 33, 16)]
    prompts = []
    for _ in range(count):
        stem = chance.choice(stems)
        tail = [chance.randrange(1, 24) for _ in range(chance.randint(1, 20))]
        prompts.append(stem[: chance.randint(1, len(stem))] + (tail if chance.random() < 0.8 else []))
    return prompts


def run_checked(engine: Engine, prompts, params, *, at_once: int) -> list:
    """All prompts, `at_once` of them queued at a time, with the integrity check after every step."""
    requests, left = [], list(zip(prompts, params, strict=True))
    while left or engine.has_work():
        while left and len(engine.scheduler.waiting) < at_once:
            requests.append(engine.add_request(*left.pop(0)))
        engine.step()
        engine.check_integrity()
    return requests


@pytest.fixture(scope="module")
def asked(small_target) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts on shared prefixes, greedy and sampled settings, and what plain decoding writes."""
    chance = random.Random(5)
    prompts = families(1, 24, chance)
    params = [
        SamplingParams(max_tokens=chance.randint(1, 40), temperature=chance.choice((0.0, 0.9)), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    plain = Engine(small_target, max_running_requests=4, prefix_cache=False)
    return prompts, params, [one.output_ids for one in plain.generate(prompts, params)]


@pytest.mark.parametrize(
    ("name", "memory"),
    [("eagle3", "ample"), ("none", "tight"), ("eagle3", "tight"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("mtp-three-layers", "tight"),
         ("mtp-three-layers", "ample"), ("ngram", "tight"), ("eagle2", "tight"), ("eagle3", "tight-no-prefixes")))],
)  # fmt: skip
def test_tokens_are_those_of_plain_decoding(small_target, build, asked, name, memory):
    """Every drafter, chain and tree, greedy and sampled, on shared prefixes, in chunks, with too few pages."""
    prompts, params, wanted = asked
    for shape in ("3,1,4", "3,3,8") if name != "none" else (None,):
        options = {"draft": build(name), "shape": DraftShape.parse(shape)} if shape else {}
        options |= {"max_running_requests": 4, "context_length": 130}
        engine = Engine(small_target, **options, **MEMORY[memory])
        requests = run_checked(engine, prompts, params, at_once=6)
        engine.close()
        assert [request.output_ids for request in requests] == wanted
        reused = sum(request.cached_tokens for request in requests)
        assert (reused == 0) == (memory == "tight-no-prefixes")
        if memory.startswith("tight"):
            assert sum(request.preemptions for request in requests) > 0
        elif name in ("eagle3", "mtp-three-layers"):  # heads that were fed wrong entries would still be lossless
            fresh = Engine(small_target, **options, prefix_cache=False)
            again = fresh.generate(prompts, params)
            fresh.close()
            ours, theirs = ([[e.accepted for e in one.events] for one in many] for many in (requests, again))
            assert ours == theirs


def test_a_second_turn_reads_only_what_is_new(small_target, small_draft):
    """The conversation so far, answer included, is found again: all whole pages but those the head had not read."""
    engine = Engine(small_target, small_draft, DraftShape.chain(3), max_running_requests=2)
    prompt = families(2, 1, random.Random(1))[0][:1] * 3 + [5, 6, 7] * 12
    first = engine.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    turn = prompt + first.output_ids + [3, 4]
    second = engine.generate([turn], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    engine.close()
    assert first.cached_tokens == 0
    assert second.cached_tokens >= (len(turn) - 2 - 5) // 16 * 16 > len(prompt)
    plain = Engine(small_target, max_running_requests=1, prefix_cache=False)
    assert second.output_ids == plain.generate([turn], SamplingParams(max_tokens=20, ignore_eos=True))[0].output_ids


def test_requests_without_drafts_find_prefixes(small_target, build):
    """Beside a head: they find what drafted requests left. What they leave lacks its entries, and is not kept."""
    stem, params = [(7 * i) % 23 + 1 for i in range(64)], SamplingParams(max_tokens=30, ignore_eos=True)
    engine, fresh = (
        Engine(small_target, build("eagle3"), DraftShape.chain(3), max_running_requests=2, prefix_cache=kept)
        for kept in (True, False)
    )
    # (what follows the stem, whether drafts are wanted, tokens found)
    for tail, drafted, found in (([1], False, 0), ([2], True, 0), ([3], False, 48), ([2, 6], True, 64)):
        done, wanted = (one.generate([stem + tail], params, speculative=drafted)[0] for one in (engine, fresh))
        engine.check_integrity()
        assert (done.output_ids, done.cached_tokens) == (wanted.output_ids, found)
        assert [event.accepted for event in done.events] == [event.accepted for event in wanted.events]
    engine.close()
    fresh.close()


@pytest.mark.parametrize("name", ["eagle3", "none"])
def test_prompts_that_arrive_together_read_a_shared_beginning_once(small_target, build, name):
    """As the choices of a request and questions with the same examples. A short beginning holds no prompt up."""
    stem, params = [(7 * i) % 23 + 1 for i in range(150)], SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [stem + [1], stem + [2, 3], stem[:100] + [4], [9] * 20, stem + [1], stem[30:80], stem[30:80]]
    options = {"draft": build(name), "shape": DraftShape.chain(3)} if name != "none" else {}
    engine, fresh = (
        Engine(small_target, **options, max_running_requests=8, prefix_cache=kept) for kept in (True, False)
    )
    done, wanted = (one.generate(prompts, params) for one in (engine, fresh))
    engine.check_integrity()
    assert [one.cached_tokens for one in done] == [0, 144, 96, 0, 144, 0, 0]
    for one, other in zip(done, wanted, strict=True):
        assert one.output_ids == other.output_ids
        assert [event.accepted for event in one.events] == [event.accepted for event in other.events]
    engine.close()
    fresh.close()


def test_prompts_whose_pages_are_not_kept_are_read_together(small_target, build, monkeypatch):
    """Beside a head, requests without drafts leave no prefixes: to wait for them would only cost forwards."""
    engine = Engine(small_target, build("eagle3"), DraftShape.chain(3), max_running_requests=4)
    read, groups = engine._prompts._read, []
    monkeypatch.setattr(
        engine._prompts, "_read", lambda row, group, *more: groups.append(len(group)) or read(row, group, *more)
    )
    for drafted, wanted in ((False, [3]), (True, [1, 2])):
        groups.clear()
        engine.generate([[5 + drafted] * 90] * 3, SamplingParams(max_tokens=2), speculative=drafted)
        assert groups == wanted
    engine.close()


def test_answers_that_end_before_a_prefill_runs_out_of_memory(small_target, monkeypatch):
    """One step reads the first prompt, whose answer has one token, and fails at the second."""
    engine = Engine(small_target, max_running_requests=4)
    read, prompts = engine._prompts._read, [[5] * 90 + [1], [5] * 90 + [2]]

    def limited(row, group, *more):
        if group[0].prompt_ids == prompts[1] and not fits:
            raise torch.OutOfMemoryError
        return read(row, group, *more)

    fits: list[int] = []
    monkeypatch.setattr(engine._prompts, "_read", limited)
    first, second = (engine.add_request(one, SamplingParams(max_tokens=1)) for one in prompts)
    assert first in engine.step() and first.finished and not second.finished
    engine.check_integrity()
    fits.append(1)
    assert second in engine.step() and second.finished and not engine.has_work()
    engine.close()


def test_running_answers_go_on_while_a_long_prompt_is_read(small_target):
    """Chunked: between two rounds of the first request at most 8 tokens of the second's prompt are read."""
    engine = Engine(small_target, max_running_requests=2, chunked_prefill_size=8)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first = engine.add_request([5, 6, 7], params)
    engine.step()
    second = engine.add_request([3] * 50, params)
    written = len(first.output_ids)
    seen = []
    while not second.output_ids:
        engine.step()
        engine.check_integrity()
        seen.append(second.n_read)
    assert seen == [8, 16, 24, 32, 40, 48, 50]
    assert len(first.output_ids) == written + len(seen)


def test_a_prompt_may_be_aborted_while_it_is_read(small_target, small_draft):
    """Its row and pages are free at once, and nothing half-read is ever found again."""
    engine = Engine(small_target, small_draft, max_running_requests=2, chunked_prefill_size=8)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.add_request([5, 6, 7], params)
    engine.step()
    long = engine.add_request([3] * 90, params)
    engine.step()
    assert 0 < long.n_read < 90
    engine.abort(long)
    engine.check_integrity()
    assert long.finish_reason == "abort" and engine.scheduler.reading is None
    again = engine.add_request([3] * 90, params)
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    engine.close()
    assert again.cached_tokens == 0 and len(again.output_ids) == 30


@pytest.mark.parametrize(("name", "failing"), [("eagle3", 0), ("mtp-three-layers", 2)])
def test_a_failing_forward_is_heard_and_leaves_the_engine_usable(small_target, build, monkeypatch, name, failing):
    """The error that comes is the forward's own; afterwards the same engine answers as ever."""
    prompts = families(4, 6, random.Random(2))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine = Engine(
        small_target,
        build(name),
        DraftShape.chain(3),
        max_running_requests=3,
        prefix_cache=False,
    )
    wanted = [request.output_ids for request in engine.generate(prompts, params)]
    forward, calls = engine._prompts._forward, iter(range(100))

    def broken(*given):
        if next(calls) == failing:
            raise RuntimeError("a kernel of this forward failed")
        return forward(*given)

    broken.max_context = forward.max_context
    monkeypatch.setattr(engine._prompts, "_forward", broken)
    monkeypatch.setattr(engine.scheduler, "chunk", 60)
    with pytest.raises(RuntimeError, match="a kernel of this forward failed"):
        engine.generate(prompts, params)
    assert not engine.has_work()
    engine.check_integrity()
    assert [request.output_ids for request in engine.generate(prompts, params)] == wanted
    engine.close()


def resident_bytes() -> int:
    """What this process holds now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_answer(request, wanted, *, same: bool) -> None:
    """`same`: it is plain decoding's answer, or the beginning of it."""
    assert len(request.output_ids) <= request.token_limit <= request.params.max_tokens
    if not same:
        assert request.finish_reason != "length" or len(request.output_ids) == request.token_limit
        assert (request.finish_reason == "stop") == (request.stop_reason is not None)
        return
    assert request.output_ids == wanted.output_ids[: len(request.output_ids)]
    assert [one.token_id for one in request.logprobs] == (request.output_ids if wanted.logprobs else [])
    for ours, theirs in zip(request.logprobs, wanted.logprobs, strict=False):
        assert abs(ours.logprob - theirs.logprob) < 1e-3 and len(ours.top) == len(theirs.top)
    if request.finish_reason != "abort":
        ended = (request.output_ids, request.finish_reason, request.stop_reason)
        assert ended == (wanted.output_ids, wanted.finish_reason, wanted.stop_reason)


def any_settings(chance: random.Random, seed: int) -> SamplingParams:
    """Of one short request. Every fourth forty come with all further settings mixed: each costs its whole batch."""

    def now_and_then(*values):
        return chance.choice(values) if seed // 40 % 4 == 0 and chance.random() < 0.3 else values[0]

    most = chance.choice((1, 4, 8, 12, 40, 80))
    return SamplingParams(
        temperature=chance.choice((0.0, 0.7)), top_p=chance.choice((1.0, 0.9)), seed=seed, ignore_eos=seed % 2 == 0,
        max_tokens=most, min_tokens=min(most, now_and_then(0, 6)), top_k=now_and_then(0, 5),
        min_p=now_and_then(0.0, 0.05), repetition_penalty=now_and_then(1.0, 1.3),
        presence_penalty=now_and_then(0.0, 0.8), frequency_penalty=now_and_then(0.0, 0.5),
        logit_bias=now_and_then({}, {5: 3.0, 9: -100.0}), stop_ids=now_and_then((), (7, 19)),
        stop=now_and_then((), ("w12", "w5"), "w3 w"), logprobs=now_and_then(None, 0, 3),
    )  # fmt: skip


def any_drafts(chance: random.Random, widest: DraftShape) -> dict:
    """Most requests draft what the engine does; some chains or smaller trees of their own, some nothing."""
    if chance.random() < 0.2:
        return {"speculative": False}
    own = (DraftShape.chain(1), DraftShape.chain(3), DraftShape(2, 2, 4), widest)
    return {"shape": chance.choice([one for one in own if one.fits_in(widest)]) if chance.random() < 0.3 else None}


@pytest.mark.soak
@pytest.mark.parametrize(("count", "verify", "shape"), [
    pytest.param(2000, "target", "3,3,8", marks=pytest.mark.slow),
    (100, "block", "3,1,4"),
    (100, "auto", "3,1,4"),
])  # fmt: skip
def test_soak(small_target, small_draft, monkeypatch, count, verify, shape):
    """Many short requests of every kind, in chains and trees of their own, aborts and preemptions at random: no page
    leaks, no answer changes (drafts that are drawn change those with a temperature, as do seeds of the engine's own,
    which half of the requests have under auto: these end as they must), and of the last 1,600 of 2,000 at most 8 MiB
    stay in memory, 5 KiB a request."""
    chance, widest = random.Random(11), DraftShape.parse(shape)
    prompts = families(3, count, chance)
    params = [any_settings(chance, i) for i in range(len(prompts))]
    plain = Engine(small_target, max_running_requests=64, prefix_cache=False)
    wanted = plain.generate(prompts, params)
    if verify == "auto":
        seeds = iter(range(count))
        monkeypatch.setattr("secrets.randbits", lambda _bits: next(seeds))
        params = [dataclasses.replace(one, seed=None) if i % 4 < 2 else one for i, one in enumerate(params)]
    monkeypatch.setattr(head_drafter, "CATCH_UP", 64)  # a row needs room for as many nodes: pages run out
    engine = Engine(
        small_target, small_draft, widest, max_running_requests=16, context_length=168, adaptive=True, verify=verify,
        lookup=True, max_total_tokens=288, chunked_prefill_size=48,
    )  # fmt: skip
    engine.drafter.chooser = AnyChoice(chance, widest)
    left, live = list(range(len(prompts))), {}  # by number: those that have not ended
    seen: Counter[str] = Counter()
    while left or engine.has_work():
        for _ in range(min(len(left), chance.randint(0, 6))):
            i = left.pop(0)
            live[i] = engine.add_request(prompts[i], params[i], **any_drafts(chance, widest))
        if live and chance.random() < 0.12:
            engine.abort(chance.choice(list(live.values())[-24:]))
        engine.step()
        engine.check_integrity()
        for i, request in [(i, request) for i, request in live.items() if request.finished]:
            other = params[i].seed is None or (verify in ("rejection", "block") and request.speculative)
            check_answer(live.pop(i), wanted[i], same=not (other and params[i].temperature > 0))
            seen["aborted"] += request.finish_reason == "abort"
            seen["preempted"] += request.preemptions
            seen["cached"] += request.cached_tokens
            seen["chains"] += any(event.offered == event.depth_offered > 0 for event in request.events)
            seen["trees"] += any(event.offered > event.depth_offered for event in request.events)
            seen["stop strings"] += isinstance(request.stop_reason, str)
            seen["ended"] += 1
            if seen["ended"] == count // 5:
                before = resident_bytes()
    assert seen["ended"] == count and seen["aborted"] > count / 50 and seen["cached"] > count / 5
    assert seen["preempted"] > count / 200 and seen["chains"] > count / 10 and seen["stop strings"] > 0
    assert (seen["trees"] > count / 10) == (widest.top_k > 1)
    if count >= 2000:
        assert resident_bytes() - before < 8 * 2**20
    engine.close()
    held = engine._memory.pool.held
    assert engine._memory._prefixes is not None
    engine._memory._prefixes.evict(engine._memory.pool.capacity)
    assert held <= 18 and engine._memory.pool.held == 0


def test_a_prefill_that_runs_out_of_memory_fails_at_most_its_own_request(tiny_target, monkeypatch):
    """It failed every request in flight. A prompt that fits in smaller chunks is read in those."""
    params = SamplingParams(max_tokens=20)
    prompts = [[5, 6, 7], [9] * 300]
    wanted = [one.output_ids for one in Engine(tiny_target).generate(prompts, params)]
    for fits in (64, 32):
        engine = Engine(tiny_target)
        read = engine._prompts._read

        def limited(row, group, tokens, drafter, read=read, fits=fits):
            if tokens > fits:
                raise RuntimeError("can't allocate memory")
            return read(row, group, tokens, drafter)

        monkeypatch.setattr(engine._prompts, "_read", limited)
        short, long = engine.generate(prompts, params)
        assert short.output_ids == wanted[0]
        if fits == 64:
            assert long.output_ids == wanted[1]
        else:
            assert long.failed and "needs more memory" in long.stop_reason
        engine.check_integrity()
        engine.close()


def test_chunks_grow_back_and_only_what_was_read_fails(tiny_target, monkeypatch):
    """Chunks stayed small for the rest of the server's life, and a request of higher priority that had just come was
    ended in place of the one that was read."""
    engine, later = Engine(tiny_target), []
    read = engine._prompts._read

    def limited(row, group, tokens, drafter):
        if group[0].priority:
            if engine.scheduler.chunk == LEAST_CHUNK:
                later.append(engine.add_request([5, 6], SamplingParams(max_tokens=4), priority=0))
            raise torch.OutOfMemoryError
        return read(row, group, tokens, drafter)

    monkeypatch.setattr(engine._prompts, "_read", limited)
    whole = engine.scheduler.chunk
    big = engine.add_request([9] * 10, SamplingParams(max_tokens=4), priority=1)
    while engine.has_work():
        engine.step()
    assert big.failed and not later[0].failed and len(later[0].output_ids) == 4
    assert engine.scheduler.chunk == LEAST_CHUNK
    monkeypatch.setattr(scheduler, "READS_TO_GROW", 2)
    for first in range(3, 30):
        engine.generate([[first] * 300], SamplingParams(max_tokens=1))
    assert engine.scheduler.chunk == whole


def test_a_prompt_is_scored_alike_in_chunks(small_target):
    """A chunk begins and ends anywhere between the parts whose logits are in memory at once."""
    prompts = [[3 + n % 20 for n in range(length)] for length in (150, 66, 64, 9)]
    whole, cut = (
        Engine(small_target, chunked_prefill_size=size).generate(
            prompts, SamplingParams(max_tokens=1, prompt_logprobs=0)
        )
        for size in (1024, 37)
    )
    for one, other in zip(whole, cut, strict=True):
        assert [entry.token_id for entry in other.prompt_logprobs] == one.prompt_ids[1:]
        wanted = [entry.logprob for entry in one.prompt_logprobs]
        assert [entry.logprob for entry in other.prompt_logprobs] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("token_s", "most"), [(1.0, 16), (1e-6, 1024)])
def test_chunks_follow_the_measured_speed_while_others_decode(tiny_target, monkeypatch, token_s, most):
    """A long prompt stopped every stream for seconds. Alone it is read in whole chunks; the answer is the same."""
    params = SamplingParams(max_tokens=40)
    (wanted,) = Engine(tiny_target).generate([[9] * 300], params)
    engine, sizes = Engine(tiny_target), []
    engine.keep_pace(0.15)
    read = engine._prompts._read

    def noted(row, group, tokens, drafter):
        sizes.append((len(engine.scheduler.running) > len(group), tokens))
        fresh = read(row, group, tokens, drafter)
        engine._prompts._token_s = token_s
        return fresh

    monkeypatch.setattr(engine._prompts, "_read", noted)
    first = engine.add_request([9] * 300, params)
    engine.step()
    second = engine.add_request([9, 8] + [7] * 290, params)
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    assert first.output_ids == wanted.output_ids and second.finished
    assert sizes[0] == (False, 300) and max(tokens for _, tokens in sizes[1:]) <= most
    assert most == 1024 or sum(tokens for _, tokens in sizes[1:]) >= 290
