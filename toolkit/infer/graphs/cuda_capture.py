"""Recording device work as a CUDA graph, which the host then starts with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolkit.infer.errors import EngineError

WARM_UPS = 2  # runs before the capture: kernels are compiled, libraries take their workspaces, tables are made

Run = Callable[[], None]
# Records what a function does with tensors at fixed addresses, and runs it at least once -> what does it again.
Capture = Callable[[Run], Run]


class CudaCapture:
    """Graphs that never run at the same time share one pool of memory. Raises EngineError where a round waits for the
    device, or does what else cannot be recorded."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch names the type differently from version to version

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                run()
        except RuntimeError as error:  # what waits for the device, and memory that the cache has left too little of
            raise EngineError(
                f"a round could not be recorded as a CUDA graph ({error}); leave --cuda-graph-max-bs out, or leave it "
                "memory with a smaller --mem-fraction"
            ) from error
        self._pool = self._pool or graph.pool()
        return graph.replay
