"""Recording device work as a CUDA graph, which the host then starts with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolkit.infer.request.errors import EngineError

WARM_UPS = 2  # runs before the capture: kernels are compiled, libraries take their workspaces, tables are made

Run = Callable[[], None]
# Records what a function does with tensors at fixed addresses, and runs it at least once -> what does it again.
Capture = Callable[[Run], Run]


class BrokenCaptureError(EngineError):
    """A capture failed half way: torch may hold the device for capturing still, so that nothing more is recorded."""


class CudaCapture:
    """Graphs that never run at the same time share one pool of memory. Raises EngineError where a round waits for the
    device, or does what else cannot be recorded."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch names the type differently from version to version
        self._stream: torch.cuda.Stream | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []  # kept: the allocator may know them by their address

    def __call__(self, run: Run) -> Run:
        # One for warm-ups and captures: libraries keep a workspace for every stream.
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
        except RuntimeError as error:  # what waits for the device, and memory that the cache has left too little of
            self._failed.append(graph)
            torch.cuda.set_stream(before)  # torch stays on the other stream where the capture cannot be ended
            raise BrokenCaptureError(_told(error)) from error
        self._pool = self._pool or graph.pool()
        return graph.replay


def _told(error: BaseException) -> str:
    # Where ending the capture fails too, what made it fail stands behind that.
    why = error if error.__context__ is None else f"{error.__context__}; {error}"
    return (
        f"a round could not be recorded as a CUDA graph ({why}); leave --cuda-graph-max-bs out, or leave it memory "
        "with a smaller --mem-fraction"
    )
