"""Rounds captured as CUDA graphs, by kind. The host replays a graph with one call.

All kinds are captured at the start, those of another draft shape when it is set (or, while a round is in flight, at
their first use). The largest bucket is captured
first, so that the smaller ones reuse its memory pool on a GPU. Lengths, tokens and sampling settings are in static
buffers, which the host fills before a replay.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.cache.round_state import RoundRows, RoundState
from toolkit.infer.drafters.draft_rollout import DraftSampling
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.graphs.compiled_forward import CompiledForward
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, root_only
from toolkit.infer.request.params import CompileError, EngineError
from toolkit.infer.verify.sampler import NodeSampler, recorded_sampler
from toolkit.log import Progress, get_logger

logger = get_logger(__name__)

WARM_UPS = 2  # runs before the capture: they compile kernels and build tables

Run = Callable[[], None]
# Runs a function on tensors at fixed addresses at least once and captures it. Returns the replay function.
Capture = Callable[[Run], Run]
Propose = Callable[[RoundRows], DraftTree]
# The engine's round. Returns `AcceptedPath.numbers` of the accepted paths.
RunRound = Callable[[RoundRows, Propose, NodeSampler], Tensor]
STEP = 8  # rows between two buckets, from the first bucket of that size on
SAMPLING_KINDS = {True: "sampled from cut distributions", False: "sampled", None: "greedy"}


class BrokenCaptureError(EngineError):
    """A capture failed half way. torch may still be in capture mode, so no further round is captured."""


class CudaCapture:
    """Captures graphs that share one memory pool; they must never run at the same time.

    Raises EngineError if a round synchronises with the device or does anything else that a graph does not support."""

    def __init__(self) -> None:
        self._pool: Any = None  # the type's name differs between torch versions
        self._stream: torch.cuda.Stream | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []  # kept alive: the allocator may still refer to them

    def __call__(self, run: Run) -> Run:
        # Graphs refer to cuBLAS's workspace of their stream, and torch.compile frees it when it captures graphs itself.
        # No warm-up runs on this stream (one of torch's 32): its workspace is in the graphs' pool, for them alone.
        stream = self._stream = self._stream or torch.cuda.Stream()
        before = torch.cuda.current_stream()
        try:
            for _ in range(WARM_UPS):
                run()
        except RuntimeError as error:
            raise EngineError(_told(error)) from error
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool, stream=stream):
                run()
        except RuntimeError as error:  # a synchronisation, or too little memory left by the KV cache
            self._failed.append(graph)
            torch.cuda.set_stream(before)  # torch stays on `stream` if it cannot end the capture
            raise BrokenCaptureError(_told(error)) from error
        self._pool = self._pool or graph.pool()
        return graph.replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Context manager: objects in cycles stay. What is freed inside a capture, such as another graph, would end it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _told(error: BaseException) -> str:
    # If ending the capture fails too, the original error is its __context__.
    why = error if error.__context__ is None else f"{error.__context__}; {error}"
    return (
        f"a round could not be recorded as a CUDA graph ({why}); free memory for it with a smaller "
        "`mem_fraction_static`, or set `disable_cuda_graph`"
    )


def buckets_up_to(rows: int) -> list[int]:
    """The batch sizes to capture: 1, 2, 4, 8, 16, 24, .. and `rows` itself."""
    return sorted({rows, *(one for one in (1, 2, 4) if one < rows), *range(STEP, rows, STEP)})


@dataclass(frozen=True)
class Kind:
    """The rounds that one graph can run. shape None: plain decoding. cut: rows may have top-k, top-p or min-p; None:
    all rows are greedy."""

    bucket: int
    shape: DraftShape | None
    cut: bool | None

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that a round commits per row."""
        return 1 if self.shape is None else self.shape.num_steps + 1

    @property
    def name(self) -> str:
        what = "plain decoding" if self.shape is None else self.shape.name
        return f"{self.bucket} rows of {what}, {SAMPLING_KINDS[self.cut]}"


@dataclass
class Recorded:
    """A round and its graph. numbers: `AcceptedPath.numbers` of the last run or replay."""

    round: Callable[[], Tensor]
    numbers: Tensor = field(init=False)
    replay: Run = field(init=False)

    def __call__(self) -> None:
        self.numbers = self.round()


@dataclass
class Recordings:
    """buckets: batch sizes. rows: the engine's largest batch, captured or not. head: None for plain decoding. compiled:
    the layers of rounds of up to torch_compile_max_bs rows; None: rounds are not compiled."""

    run_round: RunRound
    state: RoundState
    head: HeadDrafter | None
    buckets: list[int]
    rows: int
    capture: Capture | None
    compiled: CompiledForward | None
    torch_compile_max_bs: int
    _made: dict[Kind, Recorded] = field(default_factory=dict)
    _failed: set[Kind] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)  # reasons of failures
    _broken: str | None = None  # why no further round is captured
    _held: Tensor | None = None  # the buffer of unread features that the graphs use

    def __post_init__(self) -> None:
        self._capture = self.capture or CudaCapture()

    def record_all(self, shape: DraftShape | None, *, drawn: bool) -> None:
        """Capture every bucket of that draft shape, in every kind of sampling or (not drawn) greedy only.

        What is captured already stays.
        """
        started = time.perf_counter()
        distributions = list(SAMPLING_KINDS) if drawn else [None]
        self._hold(shape)
        kinds = [Kind(bucket, shape, cut) for bucket in reversed(self.buckets) for cut in distributions]
        kinds = [one for one in kinds if one not in self._made and one not in self._failed]
        if not kinds:
            return
        with Progress(len(kinds), "recording CUDA graphs", "graph") as bar:
            for kind in kinds:
                self.of(kind)
                bar.update()
        made, rows = sum(one in self._made for one in kinds), ", ".join(map(str, self.buckets))
        logger.info("cuda graphs: %d recorded, of %s rows, in %.1f s", made, rows, time.perf_counter() - started)

    def of(self, kind: Kind) -> Recorded | None:
        """The recording of that kind, captured at its first use. Returns None if the capture failed; the log says why,
        once for each reason. Raises CompileError."""
        self._hold(kind.shape)
        if kind in self._made or kind in self._failed:
            return self._made.get(kind)
        why = self._broken or self._try(kind)
        if why is not None:
            self._failed.add(kind)
            if why not in self._said:
                logger.warning("cuda graphs: %s, and others perhaps, run eagerly: %s", kind.name, why)
            self._said.add(why)
        return self._made.get(kind)

    def _try(self, kind: Kind) -> str | None:
        """Capture that kind. Returns the reason as text if it failed: the exception would keep the round's frames, and
        with them its tensors, in memory."""
        try:
            self._made[kind] = self._record(kind)
        except CompileError:
            raise
        except EngineError as error:
            if isinstance(error, BrokenCaptureError):
                self._broken = str(error)
            return str(error)
        return None

    def _hold(self, shape: DraftShape | None) -> None:
        """Allocate the head's input buffers for rounds of that shape. If they move, drop all graphs."""
        if self.head is None or shape is None:
            return
        inputs = self.head.inputs
        inputs.hold(self.rows, shape.num_steps + 1)
        if inputs.features is not self._held:  # the buffers grew: the graphs read the old ones
            self._made.clear()
            self._failed.clear()
            self._capture = self.capture or CudaCapture()  # a memory pool ends with its graphs
            self._held = inputs.features

    def _record(self, kind: Kind) -> Recorded:
        """Capture on padding rows, so that no request's pages change. Restore the rows' unread features afterwards."""
        rows, sampler = self.state.rows(kind.bucket), recorded_sampler(self.state, kind.bucket, kind.cut)
        recorded = Recorded(partial(self.run_round, rows, self._propose(kind), sampler))
        stores = [] if self.head is None else self.head.inputs.stores
        before = [store[: kind.bucket].clone() for store in stores]
        self.state.set_rows([], kind.bucket)
        self.state.set_tables(0, kind.bucket)
        try:
            compiled = self.compiled if kind.bucket <= self.torch_compile_max_bs else None
            run = recorded if compiled is None else compiled.around(recorded)
            recorded.replay = self._capture(run)
        finally:
            for store, kept in zip(stores, before, strict=True):
                store[: kind.bucket] = kept
        return recorded

    def _propose(self, kind: Kind) -> Propose:
        head, shape = self.head, kind.shape
        if head is None or shape is None:
            return lambda rows: root_only(rows.roots)
        own, unread = [shape] * kind.bucket, shape.num_steps + 1
        return lambda rows: head.draft(rows, shape, own, DraftSampling(), unread)
