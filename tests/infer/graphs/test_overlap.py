"""Round n+1 is launched before the host has read round n: the answers are those of rounds that wait."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.infer.engine.test_host_reads import HostReads
from toolkit.infer.engine import round
from toolkit.infer.engine.engine import Engine
from toolkit.infer.engine.round import Rounds, finish
from toolkit.infer.graphs.graph_rounds import GraphRounds
from toolkit.infer.graphs.recordings import PROMPT_SIZES
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

ROWS, REQUESTS, CONTEXT, NOISE = 5, 16, 72, 0.05
SETTINGS: list[dict[str, Any]] = [
    {"stop": ("w18",)}, {"max_tokens": 1}, {"max_tokens": 2}, {"ignore_eos": True}, {"temperature": 0.8},
    {"stop": ("w11 w", "w5"), "temperature": 0.7, "top_p": 0.9}, {"max_tokens": 17}, {"min_tokens": 9},
]  # fmt: skip
# Edits and log-probabilities of some requests, whose choices are launched once the host has read the round before.
MIXED: list[dict[str, Any]] = [
    {"logprobs": 2}, {}, {"presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ("w11 w",)}, {"max_tokens": 17},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3}, {"logit_bias": {7: 2.0}, "min_tokens": 9},
    {"temperature": 0.7}, {"logprobs": 1, "repetition_penalty": 1.2, "stop": ("w18",)},
]  # fmt: skip
ABORTS = {6: 1, 9: 0, 11: -1, 30: 0, 41: 0}  # by step: the row whose request is aborted


class Watch:
    """What happens to one engine: checks it after every step, and its pages before every round."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.counts: Counter[str] = Counter()
        self.in_round = True

    def capture(self, recording: Any) -> Callable:
        def capture(run: Callable[[], None]) -> Callable[[], None]:
            replay = recording(run)
            return lambda: (self.in_round and self.check_pages(), replay())

        return capture

    def read_prompt(self, *given: Any) -> Any:
        self.in_round = False
        states = GraphRounds.prompt(self.engine._rounds.graphs, *given)
        self.in_round = True
        return states

    def check_pages(self) -> None:
        """Every row that is not past its end has pages for what it writes, wherever the device has got meanwhile."""
        engine = self.engine
        pool, state = engine._memory.pool, engine._rounds.state
        for row, request in enumerate(engine._running):
            read = int(state.row_states[1, row])
            self.counts["ahead"] += read > request.length - 1
            if read + 1 < len(request.prompt_ids) + request.token_limit:
                assert len(pool.tables[row]) >= pool.pages_of(read + engine._memory.slack), "pages are missing"
            assert state.table[row, : len(pool.tables[row])].tolist() == pool.tables[row], "other pages than the row's"

    def step(self) -> list[Request]:
        before = [request for request in self.engine._running if request.finished]
        touched = self.engine.step()
        assert not set(before) & set(touched), "an ended request got something"
        self.engine.check_integrity()
        self.counts["one round too many"] += any(request.finished for request in self.engine._running)
        return touched


def scene(watch: Watch, abort: bool, kinds: list[dict[str, Any]] = SETTINGS) -> list[Request]:
    """Requests that arrive while others run, some of them aborted. Every token is handed out once, in order."""
    engine, generator = watch.engine, torch.Generator().manual_seed(5)
    requests: list[Request] = []
    seen: Counter[Request] = Counter()
    for step in range(10_000):
        for _ in range({0: 4, 3: 2, 4: 7}.get(step, step > 20 and step % 4 == 0 and len(requests) < REQUESTS)):
            i = len(requests)
            prompt = torch.randint(1, 24, (1 + 11 * i % 35,), generator=generator).tolist()
            one = kinds[i % len(kinds)]
            requests.append(engine.add_request(prompt, SamplingParams(**{"max_tokens": 60, "seed": i, **one})))
        if abort and step in ABORTS and engine._running:
            watch.counts["aborted in flight"] += engine._rounds.in_flight
            engine.abort(engine._running[ABORTS[step] % len(engine._running)])
        if abort and step == 8:
            engine.abort(engine.scheduler.waiting[-1])
        for request in watch.step():
            assert len(request.output_ids) > seen[request]
            seen[request] = len(request.output_ids)
        if not engine.has_work() and len(requests) == REQUESTS:
            break
    assert all(request.finished and len(request.output_ids) == seen[request] for request in requests)
    assert not engine._rounds.in_flight
    engine._memory._prefixes.evict(engine._memory.pool.capacity)
    assert engine._memory.pool.held == 0, "pages leaked"
    engine.close()
    return requests


def watched(target: Any, draft: Any, shape: str, capture: Any, tokens: int | None = None, **settings: Any) -> Watch:
    watch = Watch()
    watch.engine = Engine(
        target, draft, None if draft is None else DraftShape.parse(shape),
        max_running_requests=ROWS, context_length=CONTEXT,
        capture=None if capture is None else watch.capture(capture), max_total_tokens=tokens, chunked_prefill_size=16,
        **settings,
    )  # fmt: skip
    if capture is not None:
        watch.engine._rounds.graphs.prompt = watch.read_prompt
    return watch


def told(request: Request) -> tuple:
    events = [(one.offered, one.accepted, one.committed, one.truncated) for one in request.events]
    reasons = request.finish_reason, request.stop_reason
    return request.output_ids, request.token_from_draft, events, *reasons, [one.token_id for one in request.logprobs]


@pytest.fixture(scope="module")
def agreeing(small_target, shared_draft):
    """A target that mostly goes by its last token alone, and a head that mostly guesses right: long accepted runs."""

    def make(name: str) -> tuple[Any, Any]:
        draft = None if name == "none" else shared_draft(name)
        model, head = copy.deepcopy(small_target.model), None if draft is None else copy.deepcopy(draft.head)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(7, 0))
            for name, weight in [*model.named_parameters(), *(() if head is None else head.named_parameters())]:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight *= NOISE
                if name.endswith(("fc.weight", "eh_proj.weight")):  # of the token's embedding, and a feature's trace
                    weight *= NOISE
                    weight[:, : len(weight)] += torch.eye(len(weight))
        return replace(small_target, model=model), None if draft is None else replace(draft, head=head)

    return make


CASES = [
    ("eagle2", "3,3,8", True, 112),
    pytest.param("none", "", True, None, marks=pytest.mark.slow),
    pytest.param("eagle2", "3,3,8", False, None, marks=pytest.mark.slow),
    pytest.param("mtp-three-layers", "4,1,5", True, None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, shape, overlap, tokens", CASES)
def test_overlapped_rounds_write_what_eager_rounds_write(
    agreeing, recording, monkeypatch, name, shape, overlap, tokens
):
    """Ragged arrivals, stop strings inside accepted runs, limits of one and more tokens, the end of the context, and
    (tokens) too little memory: tokens, accepted counts, events and reasons are equal; aborted answers a beginning."""
    target, draft = agreeing(name)
    behind, launch_after = [], Rounds._launch_after

    def noted(*given):
        following = launch_after(*given)
        behind.extend([] if following is None else [1])
        return following

    monkeypatch.setattr(Rounds, "_launch_after", noted)
    graphed = watched(target, draft, shape, recording, tokens, disable_overlap_schedule=not overlap)
    eager = watched(target, draft, shape, None, tokens)
    ours, theirs = scene(graphed, abort=True), scene(eager, abort=False)
    for mine, other in zip(ours, theirs, strict=True):
        if mine.finish_reason == "abort":
            assert mine.output_ids == other.output_ids[: len(mine.output_ids)]
        else:
            assert told(mine) == told(other)
    if draft is not None:
        assert any(isinstance(one.stop_reason, str) and one.events[-1].truncated for one in ours)
    assert {one.finish_reason for one in theirs} == {"stop", "length"}
    assert any(one.finish_reason == "length" and one.length == CONTEXT for one in ours)
    assert (sum(one.preemptions for one in ours) > 0) == (tokens is not None)
    if overlap:
        assert len(behind) > 10
        assert all(graphed.counts[what] for what in ("ahead", "one round too many", "aborted in flight"))
    else:
        assert not behind and not graphed.counts.total()


@pytest.mark.parametrize(
    "name, shape, verify",
    [
        pytest.param("eagle2", "3,3,8", "target", marks=pytest.mark.slow),
        pytest.param("eagle2", "3,1,4", "block", marks=pytest.mark.slow),
        ("none", "", "target"),
    ],
)
def test_edited_rows_among_others_are_overlapped(agreeing, recording, monkeypatch, name, shape, verify):
    """Penalties, biases, min_tokens and log-probabilities beside greedy and drawn rows, which join and leave: tokens,
    accepted counts, events, reasons and log-probabilities are those of eager rounds, though draft and forward are
    launched before the host knows the tokens that count. Where drafts are drawn by the head, rounds without such rows
    overlap alone."""
    target, draft = agreeing(name)
    edited, choose = [], Rounds.choose

    def noted(rounds: Rounds) -> None:
        flight = rounds._in_flight
        edited.extend([] if flight is None or flight.unchosen is None or flight.states is None else [flight])
        choose(rounds)

    monkeypatch.setattr(Rounds, "choose", noted)
    engines = [watched(target, draft, shape, how, 112, verify=verify) for how in (recording, None)]
    ours, theirs = (scene(one, abort=one is engines[0], kinds=MIXED) for one in engines)
    for mine, other in zip(ours, theirs, strict=True):
        if mine.finish_reason == "abort":
            assert mine.output_ids == other.output_ids[: len(mine.output_ids)]
        else:
            assert told(mine) == told(other)
    assert len(edited) > 10 and engines[0].counts["one round too many"]


@pytest.mark.parametrize("shape, overlap", [("", True), ("3,3,8", True), ("3,3,8", False)])
def test_a_round_is_launched_before_the_last_one_is_read(agreeing, recording, monkeypatch, shape, overlap):
    """And between two launches the host reads nothing else from the device: it never waits for the newest round."""
    target, draft = agreeing("eagle2" if shape else "none")
    reads = HostReads(monkeypatch)

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        replay = recording(run)
        return lambda: (reads.found.append("launch"), replay())

    engine = Engine(
        target, draft, DraftShape.parse(shape) if shape else None, max_running_requests=4,
        capture=capture, cuda_graph_max_bs=3, disable_overlap_schedule=not overlap,
    )  # fmt: skip
    settings = ({}, {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.9})
    params = [SamplingParams(max_tokens=100, seed=i, ignore_eos=True, **one) for i, one in enumerate(settings)]
    requests = [engine.add_request([5 + i] * (3 + 4 * i), one) for i, one in enumerate(params)]
    engine.step()
    reads.found.clear()
    written = [len(one.output_ids) for one in requests]
    assert (max(written) == 1) == overlap
    with reads:
        for _ in range(12):
            touched = engine.step()
            assert touched == requests and all(
                len(one.output_ids) > n for one, n in zip(requests, written, strict=True)
            )
            written = [len(one.output_ids) for one in requests]
    assert reads.found == [*["launch"] * (3 if shape else 2), "tolist"] * 12  # one launch for each part of a round
    lengths = engine._rounds.state.row_states[1, :3].tolist()
    ahead = [length + 1 > one.length for length, one in zip(lengths, requests, strict=True)]
    assert ahead == [overlap] * 3  # what was read is the round before the one that was launched
    late = engine.add_request([9, 8, 7], SamplingParams())
    assert set(engine.step()) == {*requests, late} and late.output_ids  # who comes is not kept waiting
    engine.close()


def test_the_host_edits_while_the_target_computes(agreeing, recording, monkeypatch):
    """One request of three asks for log-probabilities, one has a penalty: draft and forward of a round are launched
    before the host reads the last round's result, and the choice after it. Nothing else is read."""
    target, draft = agreeing("eagle2")
    reads = HostReads(monkeypatch)

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        replay = recording(run)
        return lambda: (reads.found.append("launch"), replay())

    def noted(*given: Any) -> Any:
        reads.found.append("choice")
        return finish(*given)

    engine = Engine(target, draft, DraftShape.parse("3,3,8"), max_running_requests=3, capture=capture)
    monkeypatch.setattr(round, "finish", noted)  # the graphs have their own
    params = [SamplingParams(max_tokens=100, ignore_eos=True, **one) for one in ({}, {"logprobs": 1}, MIXED[4])]
    for i, one in enumerate(params):
        engine.add_request([5 + i] * (3 + 4 * i), one)
    engine.step()
    reads.found.clear()
    with reads:
        for _ in range(12):
            engine.step()
    assert reads.found == ["launch", "launch", "tolist", "choice"] * 12
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", ["3,1,4", "3,3,8"])
def test_the_host_waits_for_the_last_round_alone(agreeing, shape):
    """On a GPU nothing in a step waits for the device, but the event behind the round that is read; pages grow."""
    target, draft = agreeing("eagle2")
    target, draft = replace(target, model=target.model.cuda()), replace(draft, head=draft.head.cuda())
    engine = Engine(target, draft, DraftShape.parse(shape), max_running_requests=ROWS)
    requests = [
        engine.add_request([5 + i] * (3 + 4 * i), SamplingParams(max_tokens=200, ignore_eos=True)) for i in range(4)
    ]
    engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = Engine(target, max_running_requests=ROWS).generate([one.prompt_ids for one in requests], requests[0].params)
    assert all(
        40 < len(one.output_ids) and one.output_ids == two.output_ids[: len(one.output_ids)]
        for one, two in zip(requests, plain, strict=True)
    )
    engine.close()


def test_a_shape_that_is_set_while_a_round_is_in_flight(small_target, build, recording):
    """Recording its rounds then would overwrite the rows that the round in flight has left on the device. They are
    recorded at their first use, and tokens are those of eager rounds."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engines = [watched(small_target, build("eagle3"), "3,1,4", capture).engine for capture in (recording, None)]
    found = []
    for engine in engines:
        request = engine.add_request([5, 6, 7], params)
        for _ in range(3):
            engine.step()
        before = recording.recorded
        engine.set_shape(DraftShape.parse("2,1,3"))
        assert recording.recorded == before
        while engine.has_work():
            engine.step()
        found.append(request.output_ids)
        engine.close()
    assert recording.recorded == 24 and found[0] == found[1]


def test_all_rounds_are_recorded_at_the_start(small_target, build, recording, caplog):
    """Drafts, forward and choices in three kinds of sampling of four buckets, and short prompts; choices of one kind
    where drafts of the others are drawn by the head."""
    with caplog.at_level(logging.INFO, logger="toolkit"):
        engine = watched(small_target, build("eagle3"), "3,1,4", recording).engine
    assert recording.recorded == 21
    assert "21 recorded, of 1, 2, 4, 5 rows" in caplog.text
    engine.generate(
        [[5, 6, 7]] * 7, [SamplingParams(max_tokens=5 + i, temperature=i / 8, top_p=0.9, seed=0) for i in range(7)]
    )
    assert recording.recorded == 21
    engine.set_shape(DraftShape.parse("2,3,6"))
    assert recording.recorded == 41, "those of another shape are recorded when it is set"
    engine.set_shape(DraftShape.parse("2,3,6"))
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9))
    assert recording.recorded == 41
    engine.close()
    drawing = Engine(
        small_target, build("eagle3"), DraftShape.chain(3), max_running_requests=2, verify="block",
        capture=recording,
    )  # fmt: skip
    assert recording.recorded == 41 + 6 + len(PROMPT_SIZES)
    drawing.close()
