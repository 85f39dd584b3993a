"""Rank 0 and its worker: what they answer together, what is refused, and how either ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest
import torch

from toolkit.infer.drafters.adaptive import AdaptiveShape, Plan
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.graphs.recordings import WarmUpError
from toolkit.infer.load.llm import LLM
from toolkit.infer.load.load_engine import WORKER, LoadedEngine, closing
from toolkit.infer.parallel.rank_engine import DriversShape, RankEngine
from toolkit.infer.parallel.ranks import ParallelError, RankLostError, Ranks
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams

GREEDY = SamplingParams(max_tokens=12)


class Told(Ranks):
    """A worker's place without a group."""

    def __init__(self, decisions=()):
        self.rank, self.size, self.decisions = 1, 2, iter(decisions)

    def join(self):
        raise AssertionError("the group was joined though something was wrong")

    def agree(self, decide):
        return next(self.decisions)

    def least(self, number):
        return number - 7


def test_a_worker_drafts_what_the_driver_chose():
    """Its own rounds take other times: with them it would draft other shapes, or look when rank 0 does not, and wait in
    other collectives."""
    most = DraftShape.chain(4)
    told = [(Plan(most, 5), False), (Plan(), True), (Plan(), False)]
    chooser = DriversShape(most, Told(list(told)))
    assert [(chooser.choose([]), chooser.probe_due) for _ in range(3)] == told
    chooser.record([], Plan(), [], 0.0, 1e9)  # says nothing
    assert chooser._costs.plain(1) is None


def test_a_rank_without_memory_for_a_prompt_ends(tiny_target, monkeypatch):
    """It read smaller chunks than the others, which waited for it inside their forward."""

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    engine = RankEngine(Told(), tiny_target)
    monkeypatch.setattr(engine._prompts, "_read", full)
    engine.add_request([5] * 90, GREEDY)
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()


def test_a_rank_that_fails_before_a_capture_ends(tiny_target):
    """Else it ran the part eagerly, while the others waited for it in the collectives of their own run."""

    def full(run):
        raise WarmUpError("no room")

    with pytest.raises(WarmUpError):
        RankEngine(Told(), tiny_target, capture=full)


def test_caches_are_of_one_size(tiny_target):
    """Who is let in follows from the pages: each rank would admit by its own free memory. Ranks share a CPU's."""
    config = EngineConfig(verify="target", context_length=64, max_total_tokens=1600)
    assert RankEngine(Told(), tiny_target, config=config)._memory.pool.capacity == 1600 // 16 - 7
    engine = RankEngine(Told(), tiny_target, config=EngineConfig(verify="target", mem_fraction_static=0.5))
    assert engine.config.mem_fraction_static == 0.25


@pytest.mark.process
def test_offline(family, head_for, prompts):
    """The same tokens in two processes, step by step with requests that come, are refused and are aborted; an adaptive
    drafter on each. Then the worker dies in the middle of a step: the step must not wait for it for ever, what serves
    is told, and nothing runs afterwards. A worker that took a seed of rank 0's making for a stated one would follow
    where rank 0 draws, and be found to write other tokens."""
    options = {
        "target": family("llama"),
        "draft": head_for("eagle3", "llama"),
        "device": "cpu",
        "max_running_requests": 3,
    }
    with LLM(**options) as alone:
        wanted = [answer.token_ids for answer in alone.generate(prompts, GREEDY)]
    llm = LLM(**options, tensor_parallel_size=2)
    engine = llm.engine
    assert isinstance(engine.drafter.chooser, DriversShape)
    assert [answer.token_ids for answer in llm.generate(prompts, GREEDY)] == wanted
    hot = dataclasses.replace(GREEDY, max_tokens=40, temperature=1.0, ignore_eos=True)

    def four_tokens(self, requests, lookup):
        self.probe_due = False
        return Plan(DraftShape.chain(4), 5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveShape, "choose", four_tokens)  # on both ranks
        drawn = llm.generate([*prompts, *prompts], hot)
    assert engine.verifier.name == "auto" and sum(answer.acceptance.accepted for answer in drawn) > 0
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    with pytest.raises(EngineError, match="vocabulary"):
        engine.add_request([999], GREEDY)
    engine.step()
    engine.step()
    engine.abort(requests[0])  # its row is taken by another one, on both ranks
    engine.set_shape(DraftShape.chain(2))
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    assert [request.output_ids for request in requests[1:]] == wanted[1:]

    process = engine.driver._processes[0]
    heard, before = threading.Event(), signal.signal(signal.SIGINT, lambda *_: heard.set())
    try:
        lost = r"rank 1 of 2 has ended \(status -9\)"
        opened = LoadedEngine(engine, llm.target, None, None)
        with pytest.raises(ParallelError, match=lost), closing(opened, interrupt=True):
            process.send_signal(signal.SIGSTOP)  # rank 0 waits for it
            timer = threading.Timer(0.5, process.kill)
            timer.start()
            with pytest.raises(RankLostError, match=lost):
                llm.generate(prompts, GREEDY)
            assert heard.wait(10), "what serves was not interrupted"
            with pytest.raises(RankLostError, match=lost):
                llm.generate(prompts, GREEDY)
    finally:
        signal.signal(signal.SIGINT, before)
        llm.close()


@pytest.mark.process
def test_a_worker_ends_with_the_driver():
    """Its pipe closes when rank 0 is killed; it may wait for messages or in a collective then."""
    command = [sys.executable, "-c", WORKER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "rank 0, the driver, has ended" in error


def children(pid):
    """Its child processes."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_server(family, head_for, prompts):
    """HTTP answers are those of one process, greedy and sampled; Ctrl-C ends both processes in order."""
    paths = {"target": family("gemma2"), "draft": head_for("eagle3", "gemma2")}
    sampled = dataclasses.replace(GREEDY, temperature=1.0, seed=3)
    with LLM(**paths, device="cpu") as alone:
        wanted = [answer.text for answer in alone.generate(prompts[:2], [GREEDY, sampled])]
    command = [sys.executable, *"-m toolkit serve --port 0 --device cpu --tensor-parallel-size 2".split()]
    command += [part for name, path in paths.items() for part in (f"--{name}", path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as running:
        try:
            url = running.stdout.readline().split()[-1:]
            assert url, running.communicate(timeout=60)[1]
            workers = children(running.pid)
            assert len(workers) == 1
            name = httpx.get(f"{url[0]}/models", timeout=60).json()["data"][0]["id"]
            fields = {"model": name, "max_tokens": 12, "top_p": 1.0}
            settings = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}]
            bodies = [{**fields, "prompt": prompt, **one} for prompt, one in zip(prompts, settings, strict=False)]
            answers = [httpx.post(f"{url[0]}/completions", json=body, timeout=60).json() for body in bodies]
            assert [answer["choices"][0]["text"] for answer in answers] == wanted
            running.send_signal(signal.SIGINT)
            _, error = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 0, error
    assert "the server has ended" in error and "Traceback" not in error and "the driver, has ended" not in error
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
