"""Captures device work as a CUDA graph, which the host replays with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolkit.infer.request.errors import EngineError

WARM_UPS = 2  # runs before the capture: they compile kernels and allocate library workspaces and tables

Run = Callable[[], None]
# Runs a function on tensors at fixed addresses at least once and captures it. Returns the replay function.
Capture = Callable[[Run], Run]


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
        # One stream for warm-ups and captures: libraries keep a workspace per stream.
        stream = self._stream = self._stream or torch.cuda.Stream()
        before = torch.cuda.current_stream()
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run()
            before.wait_stream(stream)
        except RuntimeError as error:
            raise EngineError(_told(error)) from error
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                run()
        except RuntimeError as error:  # a synchronisation, or too little memory left by the KV cache
            self._failed.append(graph)
            torch.cuda.set_stream(before)  # torch stays on `stream` if it cannot end the capture
            raise BrokenCaptureError(_told(error)) from error
        self._pool = self._pool or graph.pool()
        return graph.replay


def _told(error: BaseException) -> str:
    # If ending the capture fails too, the original error is its __context__.
    why = error if error.__context__ is None else f"{error.__context__}; {error}"
    return (
        f"a round could not be recorded as a CUDA graph ({why}); leave --cuda-graph-max-bs out, or leave it memory "
        "with a smaller --mem-fraction"
    )
