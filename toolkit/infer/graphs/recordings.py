"""The parts of rounds captured as CUDA graphs. The host replays a graph with one call.

    draft    the head reads its unread positions and builds the trees
    forward  the target reads the trees
    choice   the target's choices, the walk, the caches: all that follows

The graphs of a round hand tensors at fixed addresses to each other: trees, hidden states, features. Lengths, tokens and
sampling settings are in static buffers, which the host fills before a replay. All graphs share one memory pool.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError

WARM_UPS = 2  # runs before the capture: they compile kernels and build tables
ATTEMPTS = 2  # captures of a part before it runs eagerly for good: memory may be short for a moment

Run = Callable[[], None]
# Runs a function on tensors at fixed addresses at least once and captures it. Returns the replay function.
Capture = Callable[[Run], Run]
STEP = 8  # rows between two buckets, from the first bucket of that size on
PROMPT_SIZES = (16, 32, 64, 128)  # tokens; the host launches the layers for far longer than a GPU computes these
SAMPLING_KINDS = {True: "sampled from cut distributions", False: "sampled", None: "greedy"}


class WarmUpError(EngineError):
    """A run before the capture failed. It was a real one: other ranks may still wait in its collectives."""


class BrokenCaptureError(EngineError):
    """A capture could not be ended. torch is still in capture mode, so nothing further is captured."""


class CudaCapture:
    """Captures graphs that share one memory pool; they must never run at the same time.

    Collectives of NCCL are recorded, not run: no rank waits for another in a capture. Raises EngineError if a part
    synchronises with the device or does anything else that a graph does not support."""

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
            raise WarmUpError(_told(error)) from error
        graph, failure = torch.cuda.CUDAGraph(), None
        modes = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
        try:
            with _no_garbage_collection(), torch.cuda.graph(graph, **modes):
                try:
                    run()
                except RuntimeError as error:  # too little memory left by the KV cache: the capture can still be ended
                    failure = _told(error)  # as text: the exception would keep the part's tensors in memory
        except RuntimeError as error:  # the capture is invalid, after a synchronisation
            self._failed.append(graph)
            torch.cuda.set_stream(before)  # torch stays on `stream` if it cannot end the capture
            raise BrokenCaptureError(failure or _told(error)) from error
        if failure is not None:
            self._failed.append(graph)
            raise EngineError(failure)
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
    return (
        f"a part of a round could not be recorded as a CUDA graph ({error}); free memory for it with a smaller "
        "`mem_fraction_static`, or set `disable_cuda_graph`"
    )


def buckets_up_to(rows: int) -> list[int]:
    """The batch sizes to capture: 1, 2, 4, 8, 16, 24, .. and `rows` itself."""
    return sorted({rows, *(one for one in (1, 2, 4) if one < rows), *range(STEP, rows, STEP)})


@dataclass(frozen=True)
class HostTree:
    """The size of trees that the host hands to a recorded forward, in place of those of a recorded draft."""

    nodes: int
    is_chain: bool

    @classmethod
    def holding(cls, nodes: int, is_chain: bool) -> HostTree:
        """The smallest size that such a tree fits in; few sizes for many trees, since each is another graph."""
        return cls(nodes if nodes <= STEP else -(-nodes // STEP) * STEP, is_chain)

    @property
    def name(self) -> str:
        return f"{self.nodes} nodes from the host"


Source = DraftShape | HostTree  # of the trees that the target reads: a recorded draft, or the host


@dataclass(frozen=True)
class Part:
    """A part of the rounds of `bucket` rows. source: of the trees; a draft's is the shape that all its rows have. cut:
    of a choice: rows may have top-k, top-p or min-p; False: they sample without; None: all rows are greedy."""

    what: Literal["draft", "forward", "choice"]
    bucket: int
    source: Source
    cut: bool | None = None

    @property
    def name(self) -> str:
        kind = f", {SAMPLING_KINDS[self.cut]}" if self.what == "choice" else ""
        return f"the {self.what} of {self.bucket} rows, {self.source.name}{kind}"

    @property
    def before(self) -> Part | None:
        """The part whose result it reads."""
        if self.what == "choice":
            return Part("forward", self.bucket, self.source)
        of_draft = self.what == "forward" and isinstance(self.source, DraftShape)
        return Part("draft", self.bucket, self.source) if of_draft else None


@dataclass
class Recorded:
    """A part and its graph. result: what the part returned; a replay writes the same tensors."""

    run: Callable[[], Any]
    result: Any = field(init=False)
    replay: Run = field(init=False)

    def __call__(self) -> None:
        self.result = self.run()
