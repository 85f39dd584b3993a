"""Who runs in benchmarks/engine_gpu.py, and one turn of each: some rounds of decoding behind prompts of one group.

Ours, in one process on one target:   plain, chain, tree   x   eager, graph, compiled (a graph of compiled layers)
Hugging Face's generate, there too:   static cache, which transformers compiles on a GPU
EAGLE's own engine, in a process of its own (engine_worker.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from engine_process import EngineProcess
from roofline_targets import Subject
from round_parts import Clock
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from toolkit import __version__
from toolkit.infer.cache.cache_manager import MemorySettings
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs.compiled_forward import CompileSettings
from toolkit.infer.graphs.graph_rounds import GraphSettings
from toolkit.infer.graphs.recordings import Capture
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

SETTLING = 4  # rounds before the clock starts: a graph's recording is among them
SLACK = 256  # positions of a row behind its answer
HOWS = ("eager", "graph", "graph-serial", "compiled")  # graph-serial: without overlap; compiled: a graph, with overlap


@dataclass(frozen=True)
class Turn:
    """Seconds of so many rounds of `rows` requests, and the tokens they wrote."""

    seconds: float
    rounds: int
    rows: int
    tokens: int

    @property
    def accept_length(self) -> float:
        return self.tokens / (self.rounds * self.rows)


class Entrant(Protocol):
    """One row of the table. over: the entrant that its speedup is over."""

    name: str
    over: str
    shape: DraftShape | None
    version: str

    def turn(self, prompts: Sequence[Sequence[int]]) -> Turn: ...


@dataclass(frozen=True)
class Mode:
    """One way to run our engine."""

    shape: DraftShape | None
    how: str  # of HOWS

    @property
    def what(self) -> str:
        return "plain" if self.shape is None else "chain" if self.shape.is_chain else "tree"

    @property
    def name(self) -> str:
        return f"ours-{self.what}-{self.how}"

    @property
    def over(self) -> str:
        return "ours-plain-graph" if self.shape is None else f"ours-plain-{self.how}"


@dataclass(frozen=True)
class Sizes:
    """Of one measurement. longest: tokens of the longest prompt. rounds: of a turn. backend: of torch.compile."""

    batch: int
    longest: int
    rounds: int
    backend: str = "inductor"
    whole_prompts: bool = (
        True  # all in one step: with rows that start later, smaller rounds would be recorded on the way
    )

    def room(self, subject: Subject, mode: Mode) -> int:
        """Tokens that an answer may get, all told."""
        if mode.shape is None:
            most = 1
        else:
            most = 1 + (mode.shape.num_steps if subject.forced is None else len(subject.forced.rates))
        return (SETTLING + self.rounds + 4) * most

    def cached(self, subject: Subject, mode: Mode) -> int:
        """Tokens that the engine's cache has to hold."""
        return self.batch * (self.longest + self.room(subject, mode) + SLACK)


def open_mode(subject: Subject, mode: Mode, sizes: Sizes, capture: Capture | None) -> Engine:
    """capture: how rounds are recorded; None: as CUDA graphs."""
    graphs = None
    if mode.how != "eager":
        compiled = CompileSettings(sizes.batch, sizes.backend) if mode.how == "compiled" else None
        # Only what is measured is recorded: every graph takes time and memory.
        graphs = GraphSettings(sizes.batch, capture, compiled, overlap=mode.how != "graph-serial", at_start=False)
    engine = Engine(
        subject.target,
        None if mode.shape is None else subject.draft,
        mode.shape,
        max_running_requests=sizes.batch,
        context_length=sizes.longest + sizes.room(subject, mode),
        memory=MemorySettings(sizes.cached(subject, mode), prefix_cache=False, scattered_pages=True),
        graphs=graphs,
        forced=subject.forced,
    )
    if sizes.whole_prompts:
        engine.scheduler.chunk = sizes.batch * sizes.longest
    return engine


def nothing() -> None:
    pass


class Ours:
    """One engine that stays open."""

    version = __version__

    def __init__(self, subject: Subject, mode: Mode, sizes: Sizes, clock: Clock, capture: Capture | None) -> None:
        self.name, self.over, self.shape = mode.name, mode.over, mode.shape
        self._rounds, self._clock = sizes.rounds, clock
        self._params = SamplingParams(max_tokens=sizes.room(subject, mode), ignore_eos=True)
        self._engine = open_mode(subject, mode, sizes, capture)

    def turn(
        self, prompts: Sequence[Sequence[int]], began: Callable[[], None] = nothing, ended: Callable[[], None] = nothing
    ) -> Turn:
        """began, ended: called where the rounds that count begin and end."""
        requests = [self._engine.add_request(list(prompt), self._params) for prompt in prompts]
        while not all(request.ready for request in requests):
            self._engine.step()
        for _ in range(SETTLING):
            self._engine.step()
        before = sum(len(request.output_ids) for request in requests)
        self._clock.wait()
        began()
        started = time.perf_counter()
        for _ in range(self._rounds):
            self._engine.step()
        ended()
        self._clock.wait()
        seconds = time.perf_counter() - started
        assert not any(request.finished for request in requests), f"{self.name}: an answer ended while it was measured"
        tokens = sum(len(request.output_ids) for request in requests) - before
        for request in requests:
            self._engine.abort(request)
        return Turn(seconds, self._rounds, len(requests), tokens)

    def close(self) -> None:
        """Its memory is free for the next."""
        self._engine.close()
        del self._engine


class _Ticks(StoppingCriteria):
    """When the tokens of these numbers were there; stops nothing."""

    def __init__(self, clock: Clock, numbers: Sequence[int]) -> None:
        self._clock, self._numbers, self._seen = clock, numbers, 0
        self.at: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_more: Any) -> Any:
        if self._seen in self._numbers:
            self._clock.wait()
            self.at.append(time.perf_counter())
        self._seen += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class HuggingFace:
    """transformers' `generate` with a static cache. Prompts are padded on the left to one length: another length
    would be compiled anew."""

    name, over, shape, version = "hf-generate-static", "ours-plain-graph", None, transformers.__version__

    def __init__(self, subject: Subject, sizes: Sizes, clock: Clock) -> None:
        self._model, self._sizes, self._clock = subject.target.model, sizes, clock
        self._settings = GenerationConfig(
            max_new_tokens=SETTLING + sizes.rounds + 1, do_sample=False, cache_implementation="static", pad_token_id=0
        )

    def turn(self, prompts: Sequence[Sequence[int]]) -> Turn:
        longest, device = self._sizes.longest, self._model.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        ticks = _Ticks(self._clock, (SETTLING, SETTLING + self._sizes.rounds))
        own = self._model.generation_config
        # `generate` fills gaps of its settings from there: the target's stop ids would come back.
        self._model.generation_config = GenerationConfig(pad_token_id=0)
        try:
            self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=self._settings,
                stopping_criteria=StoppingCriteriaList([ticks]),
            )
        finally:
            self._model.generation_config = own
        first, last = ticks.at
        return Turn(last - first, self._sizes.rounds, len(prompts), self._sizes.rounds * len(prompts))


class EagleOwn:
    """EAGLE's own engine. Its prefill is taken off by a second answer, of few tokens."""

    name, over = "eagle-own-tree", "ours-plain-graph"

    def __init__(self, process: EngineProcess, shape: DraftShape, tokens: int) -> None:
        assert process.version is not None
        self.shape, self.version, self._process, self._tokens = shape, process.version, process, tokens

    def turn(self, prompts: Sequence[Sequence[int]]) -> Turn:
        short, whole = (self._process.answer(prompts, tokens) for tokens in (SETTLING, SETTLING + self._tokens))
        steps, accepted = (whole[key] - short[key] for key in ("verify_steps", "accepted"))
        # It writes whole runs; the last one counts with all of its tokens.
        return Turn(whole["seconds"] - short["seconds"], steps, len(prompts), steps + accepted)
