"""Rounds that were recorded once, on one batch, write what eager rounds write, on every other."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.attention import linear_layers
from toolkit.infer.engine import round
from toolkit.infer.engine.config import ConfigError
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs import recordings
from toolkit.infer.graphs.recordings import WARM_UPS, BrokenCaptureError, CudaCapture
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "drawn": [{"temperature": 0.8}, {}],
    "cut": [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5, "min_p": 0.01}, {}],
    # The tokens of rounds with such a row are chosen eagerly, on the states of a recorded forward.
    "asking": [{}, {"temperature": 0.8}, {"logprobs": 1, "max_tokens": 9}, {}, {"presence_penalty": 0.5}],
}
LENGTHS = (5, 19, 2, 33, 9, 14, 3)
ROWS = 5


def answers(engine: Engine, settings: str, seed: int = 1, tokens: int = 12) -> list[tuple[list[int], list[int]]]:
    """What was written, and how many drafts each step accepted (a head that reads wrongly leaves the tokens right).

    Ragged prompts with ragged ends, so that rows move and buckets change; integrity is checked after every step.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = SETTINGS[settings]
    requests = []
    for i, length in enumerate(LENGTHS):
        prompt = torch.randint(1, 24, (length,), generator=generator).tolist()
        params = SamplingParams(**{"max_tokens": tokens + i, "seed": i, **kinds[i % len(kinds)]})
        requests.append(engine.add_request(prompt, params, speculative=(i, settings) != (3, "asking")))
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    return [(request.output_ids, [event.accepted for event in request.events]) for request in requests]


def engine_with(
    target: Any, draft: Any, shape: str, capture: Any = None, tokens: int | None = None, **options: Any
) -> Engine:
    """With `capture` rounds are recorded by it; without, they run eagerly on a CPU."""
    return Engine(
        target, draft, DraftShape.parse(shape) if shape else None, capture=capture,
        **{"max_running_requests": ROWS, "max_total_tokens": tokens, "chunked_prefill_size": 16,
           "context_length": None if tokens is None else 128, **options},
    )  # fmt: skip


HOST: dict[str, dict[str, Any]] = {"composed": {"lookup": True}, "adaptive": {"adaptive": True}}  # beside a head
CASES = [
    ("eagle3", "3,1,4", "cut"),
    pytest.param("eagle3", "3,3,8", "asking", marks=pytest.mark.slow),
    ("mtp-three-layers", "4,1,5", "greedy"),
    pytest.param("composed", "3,3,8", "asking", marks=pytest.mark.slow),
    pytest.param("ngram", "12,1,13", "drawn", marks=pytest.mark.slow),
    pytest.param("dspark", "4,1,5", "cut", marks=pytest.mark.slow),
    pytest.param("dspark-dfly", "4,3,8", "greedy", marks=pytest.mark.slow),
    pytest.param("eagle2", "3,3,8", "drawn", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, shape, settings", [*CASES, ("adaptive", "3,3,8", "asking")])
def test_recorded_rounds_write_what_eager_rounds_write(small_target, build, recording, name, shape, settings):
    """Recorded on padding, run on seven requests in five rows (three buckets or more), then on others: a length, a
    page, a token or a setting that was the host's when it was recorded would be the wrong one. No forward is eager,
    whatever the host has to do between the parts of a round."""
    draft = None if name == "none" else build("eagle3" if name in HOST else name)
    options = HOST.get(name, {})
    graphed = engine_with(small_target, draft, shape, recording, **options)
    eager = engine_with(small_target, draft, shape, **options)
    for seed in (1, 2):
        found, wanted = answers(graphed, settings, seed), answers(eager, settings, seed)
        if name == "adaptive":  # what it drafts depends on the clock
            found, wanted = ([tokens for tokens, _ in one] for one in (found, wanted))
        assert found == wanted
    assert name in ("none", "adaptive") or any(max(accepted) > 0 for _, accepted in found)
    assert recording.recorded >= 3 and graphed.eager_rounds == 0
    graphed.close(), eager.close()


def test_padding_rows_beside_trees_of_the_host(small_target, build, recording):
    """Three requests from the start, in rounds of four rows; the first drafts nothing, so trees come from the host."""
    found = []
    for capture in (recording, None):
        engine = engine_with(small_target, build("eagle3"), "3,3,8", capture)
        requests = [
            engine.add_request([5, 6, 7 + i], SamplingParams(max_tokens=30, ignore_eos=True), speculative=i > 0)
            for i in range(3)
        ]
        while engine.has_work():
            engine.step()
        found.append([one.output_ids for one in requests])
        engine.close()
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name, shape, settings", CASES)
def test_cuda_graphs_write_what_eager_rounds_write(small_target, build, name, shape, settings):
    """The same with real graphs, on kernels: fp32, where tokens are equal."""
    draft = None if name == "none" else build("eagle3" if name in HOST else name)
    if isinstance(draft, DraftCheckpoint):
        draft = replace(draft, head=copy.deepcopy(draft.head).cuda())
    target = replace(small_target, model=copy.deepcopy(small_target.model).cuda())
    graphed = engine_with(target, draft, shape, **HOST.get(name, {}))
    eager = engine_with(target, draft, shape, disable_cuda_graph=True, **HOST.get(name, {}))
    for seed in (1, 2):
        assert answers(graphed, settings, seed) == answers(eager, settings, seed)
    graphed.close(), eager.close()


@pytest.mark.parametrize("name", ["eagle3", "mtp-three-layers"])
def test_a_short_prompt_is_read_by_a_graph(small_target, build, recording, name):
    """Below, at and above each recorded size, in chunks, after a prefix of another prompt, beside a running request.
    States of padding, of another row or of other positions would change tokens, log-probabilities or, through the
    head, what is accepted."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 24, (length,), generator=generator).tolist() for length in (1, 15, 16, 17, 32, 33, 65)]
    prompts += [prompts[5][:32] + prompts[3], prompts[6][:48] + [9]]
    found, logprobs, others = [], [], []
    for capture in (recording, None):
        engine = engine_with(small_target, build(name), "3,1,4", capture, chunked_prefill_size=32)
        beside = engine.add_request([3, 4], SamplingParams(max_tokens=200, ignore_eos=True))
        engine.step()
        if capture is not None:
            engine._prompts._forward = None  # nothing is read without a graph
        for i, prompt in enumerate(prompts):
            request = engine.add_request(prompt, SamplingParams(max_tokens=7, prompt_logprobs=1 if i % 4 else None))
            while not request.finished:
                engine.step()
                engine.check_integrity()
            accepted = [event.accepted for event in request.events]
            found.append((request.output_ids, accepted, request.cached_tokens))
            logprobs.append([one.logprob for one in request.prompt_logprobs])
        others.append(beside.output_ids[:40])
        engine.close()
    half = len(prompts)
    assert found[:half] == found[half:] and any(max(accepted) > 0 for _, accepted, _ in found) and found[-1][2] > 0
    assert others[0] == others[1] and len(others[0]) == 40
    assert logprobs[:half] == [pytest.approx(one, abs=1e-4) for one in logprobs[half:]]


@pytest.mark.parametrize("at_start", [True, False])
def test_a_capture_after_a_round_with_the_host(small_target, build, recording, at_start):
    """The rows of that round are gone: a capture at the begin of a later round, or for another shape, must not set
    them again."""
    engines = [
        engine_with(small_target, build("eagle3"), "3,1,4", one, short_lived=not at_start) for one in (recording, None)
    ]
    asking = [SamplingParams(max_tokens=3 + i, logprobs=1) for i in range(4)]
    found = []
    for engine in engines:
        engine.generate([[5, 6, 7], [8, 9], [3, 4, 5, 6], [9]], asking)
        engine.generate([[7, 8]], SamplingParams(max_tokens=9))
        engine.set_shape(DraftShape.parse("2,1,3"))
        found.append([one.output_ids for one in engine.generate([[7, 8, 9]], SamplingParams(max_tokens=9))])
        engine.close()
    assert found[0] == found[1]


@pytest.mark.slow
def test_another_shape_is_another_recording(small_target, build, recording):
    """A wider shape leaves more to read for the next round, so that what was recorded before reads old memory."""
    engine = engine_with(small_target, build("eagle3"), "5,3,12", recording)
    eager = engine_with(small_target, build("eagle3"), "5,3,12")
    for shape in ("2,1,3", "5,3,12", "2,1,3"):
        for one in (engine, eager):
            one.set_shape(DraftShape.parse(shape))
        assert answers(engine, "greedy") == answers(eager, "greedy")
    engine.close(), eager.close()


def test_rounds_draft_the_shape_of_their_number_of_rows(small_target, build, recording):
    """A tree alone, chains in a batch: each from a recording, the tokens those of plain decoding."""
    tree, chain = DraftShape.parse("3,3,8"), DraftShape.chain(2)
    engine = engine_with(small_target, build("eagle3"), "3,3,8", recording, by_rows={1: tree, 4: chain})
    plain = engine_with(small_target, None, "")
    seen, begin = set(), engine._rounds.graphs.begin

    def begun(requests):
        kind = begin(requests)
        return seen.add((len(requests), kind and kind.shape)) or kind

    engine._rounds.graphs.begin = begun
    written = [[tokens for tokens, _ in answers(one, "greedy")] for one in (engine, plain)]
    assert written[0] == written[1]
    assert {shape for rows, shape in seen if rows == 5} == {chain}, "the shape of the most rows, beyond them too"
    # Alone after a batch, the head has no more to read than a round of the tree leaves.
    assert {shape for rows, shape in seen if rows == 1} == {tree}
    engine.close(), plain.close()


def test_a_number_of_the_host_is_noticed(small_target, build, recording, monkeypatch):
    """Else the tests above would say nothing."""
    own = round.forward_tree

    def lengths_of_then(context, rows, tree):
        then = torch.stack([torch.full((), length) for length in rows.lengths.tolist()])
        return own(context, replace(rows, lengths=then), tree)

    monkeypatch.setattr(round, "forward_tree", lengths_of_then)
    graphed, eager = (engine_with(small_target, build("eagle3"), "3,3,8", how) for how in (recording, None))
    assert answers(graphed, "greedy") != answers(eager, "greedy")
    for refused in (lambda: torch.tensor([1, 2]), lambda: torch.ones(2).sum().item(), lambda: torch.ones(2).nonzero()):
        with pytest.raises(AssertionError, match="cannot be captured"):
            recording(refused)


@pytest.mark.parametrize("at_start", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_part_that_cannot_be_recorded_runs_eagerly(small_target, build, recording, caplog, at_start):
    """After it has run and overwritten what waits in the rows that it was recorded on, as a device that is out of
    memory would let it: at the start, for another shape, and between the parts of a round. Requests go on; what fails
    twice is not tried again; the log says the reason once."""
    calls = itertools.count()

    def out_of_memory(run):
        if next(calls) % 3 < 2:
            run()
            raise EngineError("a round could not be recorded")
        return recording(run)

    graphed = engine_with(small_target, build("eagle3"), "5,3,12", out_of_memory, short_lived=not at_start)
    eager = engine_with(small_target, build("eagle3"), "5,3,12")
    with caplog.at_level(logging.INFO, logger="toolkit"):
        for one in (graphed, eager):
            one.set_shape(DraftShape.parse("3,3,8"))
        for settings in ("greedy", "drawn"):
            assert answers(graphed, settings) == answers(eager, settings)
        tried = next(calls)
        assert answers(graphed, settings) == answers(eager, settings)
    said = [one.getMessage() for one in caplog.records if "could not be recorded" in one.getMessage()]
    assert recording.recorded and graphed.eager_rounds and next(calls) == tried + 1 and len(said) == 1
    graphed.close(), eager.close()


@pytest.mark.parametrize("failure, attempts", [(EngineError, 4), (BrokenCaptureError, 1)])
def test_a_failed_recording_keeps_no_memory(small_target, failure, attempts):
    """The largest round is tried first; what it took before memory ran out has to be free for the next one, and for
    eager rounds."""
    taken: list[weakref.ref] = []

    def out_of_memory(run):
        assert all(one() is None for one in taken), "tensors of a failed attempt are still there"
        logits = torch.zeros(9)
        taken.append(weakref.ref(logits))
        try:
            raise RuntimeError("CUDA out of memory")
        except RuntimeError as error:
            raise failure("a round could not be recorded") from error

    gc.disable()  # memory must not wait for a cycle to be found
    try:
        engine = engine_with(small_target, None, "", out_of_memory, cuda_graph_max_bs=4)
        assert len(taken) == attempts and taken[-1]() is None
    finally:
        gc.enable()
    engine.close()


def test_a_closed_engine_keeps_no_graph(small_target, build, recording):
    """NCCL waits in its end for the end of all graphs with its collectives; a cycle would be found too late."""
    replays: list[weakref.ref] = []

    def capture(run):
        replay = recording(run)
        replays.append(weakref.ref(replay))
        return replay

    engine = engine_with(small_target, build("eagle3"), "3,1,4", capture, cuda_graph_max_bs=1)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    gc.disable()
    try:
        engine.close()
        assert replays and not any(one() for one in replays)
    finally:
        gc.enable()


def test_what_no_graph_can_run_is_refused(small_target, build, recording, monkeypatch):
    """Asked for, it is an error; else one line of the log says why rounds run eagerly."""
    monkeypatch.setattr(linear_layers, "linear_layers", lambda config: {0})
    with pytest.raises(ConfigError, match="`cuda_graph_max_bs` is 4, but no round.*has linear-attention layers"):
        engine_with(small_target, build("ngram"), "3,1,4", recording, cuda_graph_max_bs=4)
    engine = engine_with(small_target, build("ngram"), "3,1,4", recording)
    assert not engine.has_graphs and not recording.recorded
    engine.close()


# -- the capture itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch) -> SimpleNamespace:
    """torch.cuda as far as a capture uses it, with torch's own fault: one that fails is left on its stream."""
    state = SimpleNamespace(current="default", invalid=False)

    @contextmanager
    def graph(_graph, pool, stream, capture_error_mode):
        before, state.current = state.current, stream
        yield
        if state.invalid:
            raise RuntimeError("capture was invalidated")
        state.current = before

    cuda = SimpleNamespace(
        Stream=object, CUDAGraph=lambda: None, graph=graph, current_stream=lambda: state.current,
        set_stream=lambda one: setattr(state, "current", one),
    )  # fmt: skip
    monkeypatch.setattr(recordings.torch, "cuda", cuda)
    return state


@pytest.mark.parametrize("fails_in, invalid", [(1, False), (WARM_UPS + 1, False), (WARM_UPS + 1, True)])
def test_a_failure_tells_its_cause_and_leaves_the_stream(stand_in, fails_in, invalid) -> None:
    """What runs next would else run beside the default stream, unordered; only a capture that cannot be ended ends all
    recording."""
    runs = []

    def run() -> None:
        runs.append(1)
        if len(runs) == fails_in:
            stand_in.invalid = invalid
            raise RuntimeError("somebody read a number")

    with pytest.raises(EngineError, match="somebody read a number.*or set `disable_cuda_graph`") as found:
        CudaCapture()(run)
    assert isinstance(found.value, BrokenCaptureError) == invalid
    assert stand_in.current == "default"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_keep_the_workspaces_of_their_products() -> None:
    """torch.compile frees all workspaces of cuBLAS before it captures a graph. This product needs one: one row by 4096
    columns is split over the columns."""
    torch._C._cuda_clearCublasWorkspaces()  # an earlier test may have used the stream
    row, matrix = torch.randn(1, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    row, matrix, out = row.bfloat16(), matrix.bfloat16(), torch.zeros(1, 4096, device="cuda").bfloat16()
    capture = CudaCapture()
    replay = capture(lambda: out.copy_(row @ matrix))
    replay()
    expected = out.clone()
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.stream(capture._stream):  # memory that is freed goes to its own stream first
        others = [torch.full((2**21,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    out.zero_()
    replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and all(other.eq(7).all() for other in others)
