"""Rounds that were recorded once, on one batch, write what eager rounds write, on every other."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine import round
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs.recordings import BrokenCaptureError, GraphSettings, buckets_up_to
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "drawn": [{"temperature": 0.8}, {}],
    "cut": [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5, "min_p": 0.01}, {}],
    # Rounds with such a row run eagerly, those before and after it recorded.
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


def engine_with(target: Any, draft: Any, shape: str, graphs: GraphSettings | None, tokens: int | None = None) -> Engine:
    return Engine(
        target, draft, None if draft is None else DraftShape.parse(shape), max_running_requests=ROWS, graphs=graphs,
        memory=MemorySettings(tokens, chunked_prefill_size=16, scattered_pages=True),
        context_length=None if tokens is None else 128,
    )  # fmt: skip


CASES = [
    ("none", "", "drawn"),
    ("eagle3", "3,1,4", "cut"),
    ("eagle3", "3,3,8", "asking"),
    ("mtp-three-layers", "4,1,5", "greedy"),
    ("dspark", "4,1,5", "cut"),
    ("dflash", "3,3,8", "asking"),
    pytest.param("eagle3", "3,1,4", "greedy", marks=pytest.mark.slow),
    pytest.param("eagle3", "3,3,8", "greedy", marks=pytest.mark.slow),
    pytest.param("eagle3", "3,3,8", "drawn", marks=pytest.mark.slow),
    pytest.param("eagle2", "3,3,8", "cut", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, shape, settings", CASES)
def test_recorded_rounds_write_what_eager_rounds_write(small_target, build, recording, name, shape, settings):
    """Recorded on padding, run on seven requests in five rows (three buckets or more), then on others: a length, a
    page, a token or a setting that was the host's when it was recorded would be the wrong one."""
    draft = None if name == "none" else build(name)
    graphed = engine_with(small_target, draft, shape, GraphSettings(ROWS, recording))
    eager = engine_with(small_target, draft, shape, None)
    for seed in (1, 2):
        found = answers(graphed, settings, seed)
        assert found == answers(eager, settings, seed)
    assert draft is None or any(max(accepted) > 0 for _, accepted in found)
    assert recording.recorded >= (1 if settings == "asking" else 3)
    graphed.close(), eager.close()


def grammar_answers(engine: Engine) -> list[list[int]]:
    """What rows with a grammar and rows without one write; the engine's rounds are recorded before and after."""
    params = [SamplingParams(max_tokens=30 - 9 * (i % 2), regex="(fox|dog){2,6}" if i % 2 else None) for i in range(6)]
    return [one.output_ids for one in engine.generate([[5 + i] for i in range(6)], params)]


def test_grammars_run_eagerly(tiny_target, tiny_draft, recording):
    """A recorded round would choose tokens outside of the grammar."""
    pytest.importorskip("llguidance")
    graphed = engine_with(tiny_target, tiny_draft, "3,3,8", GraphSettings(ROWS, recording))
    eager = engine_with(tiny_target, tiny_draft, "3,3,8", None)
    assert grammar_answers(graphed) == grammar_answers(eager)
    assert recording.recorded >= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name, shape, settings", CASES)
def test_cuda_graphs_write_what_eager_rounds_write(small_target, build, name, shape, settings):
    """The same with real graphs, on kernels: fp32, where tokens are equal."""
    draft = None if name == "none" else build(name)
    if draft is not None:
        draft = replace(draft, head=copy.deepcopy(draft.head).cuda())
    target = replace(small_target, model=copy.deepcopy(small_target.model).cuda())
    graphed = engine_with(target, draft, shape, GraphSettings(ROWS))
    eager = engine_with(target, draft, shape, None)
    for seed in (1, 2):
        assert answers(graphed, settings, seed) == answers(eager, settings, seed)
    graphed.close(), eager.close()


def test_graphs_where_pages_run_out(small_target, build, recording):
    """Rows lose their pages and come back on others, some of them a prefix that they share."""
    graphed, eager = (
        engine_with(small_target, build("eagle3"), "3,3,8", graphs, tokens=200)
        for graphs in (GraphSettings(3, recording), None)  # rounds of 4 and 5 rows run eagerly
    )
    preempted = graphed.scheduler._preempt
    times: list[int] = []
    graphed.scheduler._preempt = lambda: times.append(1) or preempted()
    assert answers(graphed, "greedy", tokens=40) == answers(eager, "greedy", tokens=40)
    assert recording.recorded and times
    graphed.close(), eager.close()


@pytest.mark.slow
def test_another_shape_is_another_recording(small_target, build, recording):
    """A wider shape leaves more to read for the next round, so that what was recorded before reads old memory."""
    engine = engine_with(small_target, build("eagle3"), "5,3,12", GraphSettings(ROWS, recording))
    eager = engine_with(small_target, build("eagle3"), "5,3,12", None)
    for shape in ("2,1,3", "5,3,12", "2,1,3"):
        for one in (engine, eager):
            one.set_shape(DraftShape.parse(shape))
        assert answers(engine, "greedy") == answers(eager, "greedy")
    engine.close(), eager.close()


def test_a_second_engine_on_the_same_head_leaves_recordings_alone(small_target, build, recording):
    """Its longer rows need longer tables of the head's rotation than those whose addresses the first one recorded."""
    draft = build("eagle2")
    draft = replace(draft, head=copy.deepcopy(draft.head))  # nobody else has made its tables yet
    first = engine_with(small_target, draft, "3,3,8", GraphSettings(ROWS, recording), tokens=640)
    wanted = answers(first, "greedy")
    longer = MemorySettings(chunked_prefill_size=4096, scattered_pages=True)
    second = Engine(
        small_target,
        draft,
        DraftShape.parse("3,3,8"),
        max_running_requests=2,
        graphs=GraphSettings(1, recording),
        memory=longer,
    )
    assert len(draft.head.rope._outgrown) == 1
    assert answers(first, "greedy") == wanted
    first.close(), second.close()


def wrong_lengths(monkeypatch):
    """Rounds whose target reads the lengths that rows had when the round was recorded."""
    own = round.forward_tree

    def lengths_of_then(context, rows, tree):
        then = torch.stack([torch.full((), length) for length in rows.lengths.tolist()])
        return own(context, replace(rows, lengths=then), tree)

    monkeypatch.setattr(round, "forward_tree", lengths_of_then)


@pytest.mark.parametrize("shape", ["3,1,4", "3,3,8"])
def test_a_number_of_the_host_is_noticed(small_target, build, recording, monkeypatch, shape):
    """Else the tests above would say nothing."""
    wrong_lengths(monkeypatch)
    graphed = engine_with(small_target, build("eagle3"), shape, GraphSettings(ROWS, recording))
    assert answers(graphed, "greedy") != answers(engine_with(small_target, build("eagle3"), shape, None), "greedy")
    for refused in (lambda: torch.tensor([1, 2]), lambda: torch.ones(2).sum().item(), lambda: torch.ones(2).nonzero()):
        with pytest.raises(AssertionError, match="cannot be captured"):
            recording(refused)


def test_what_is_not_recorded_is_said_once(small_target, build, recording, caplog):
    """N-gram lookup decides on the host; the tokens are the same."""
    engine = engine_with(small_target, build("ngram"), "3,1,4", GraphSettings(ROWS, recording))
    with caplog.at_level(logging.INFO, logger="toolkit"):
        assert answers(engine, "greedy") == answers(engine_with(small_target, build("ngram"), "3,1,4", None), "greedy")
    said = [one.getMessage() for one in caplog.records if "eagerly" in one.getMessage()]
    assert len(said) == 1 and "NgramDrafter" in said[0] and not recording.recorded


@pytest.mark.parametrize(("shape", "at_start"), [("5,3,12", True), ("3,3,8", True), ("3,3,8", False)])
def test_a_round_that_cannot_be_recorded_runs_eagerly(small_target, build, recording, caplog, shape, at_start):
    """After it has run and overwritten what waits in the rows that it was recorded on, as a device that is out of
    memory would let it: at the start, for another shape, and between rounds. Requests go on as if there were no graphs
    for every second kind of round. The log says it once for each shape, or once for a kind that comes later."""
    calls = itertools.count()

    def out_of_memory(run):
        if next(calls) % 2 == 0:
            run()
            raise EngineError("a round could not be recorded")
        return recording(run)

    graphed = engine_with(
        small_target, build("eagle3"), "5,3,12", GraphSettings(ROWS, out_of_memory, at_start=at_start)
    )
    eager = engine_with(small_target, build("eagle3"), "5,3,12", None)
    with caplog.at_level(logging.INFO, logger="toolkit"):
        for one in (graphed, eager):
            one.set_shape(DraftShape.parse(shape))
        before = recording.recorded
        for settings in ("greedy", "drawn"):
            assert answers(graphed, settings) == answers(eager, settings)
    said = [one.getMessage() for one in caplog.records if "could not be recorded" in one.getMessage()]
    again = recording.recorded - before
    if at_start:
        assert (len(said), again) == (1 if shape == "5,3,12" else 2, 0)
    else:
        assert len(said) > 1 <= again
    graphed.close(), eager.close()


@pytest.mark.parametrize("failure, attempts", [(EngineError, 9), (BrokenCaptureError, 1)])
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
        engine = engine_with(small_target, None, "", GraphSettings(4, out_of_memory))
        assert len(taken) == attempts and taken[-1]() is None
    finally:
        gc.enable()
    engine.close()


def test_what_cannot_be_recorded_is_refused(small_target, recording):
    with pytest.raises(EngineError, match="scattered"):
        Engine(small_target, graphs=GraphSettings(4, recording))


def test_buckets():
    """Every number of rows has one, and few rows share it with many."""
    assert [buckets_up_to(one) for one in (1, 3, 8, 20)] == [
        [1], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 16, 20],
    ]  # fmt: skip
