"""A launched round whose results the host has not read yet.

Shapes: B rows of requests, A longest accepted path (root included).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.infer.cache.round_state import RowState
from toolkit.infer.graphs.recordings import Kind, Recorded
from toolkit.infer.kernels.tree_reference import Followed
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult, read_result


class HostCopy:
    """An asynchronous copy of `numbers` to the host, in stream order after all work launched so far."""

    def __init__(self, numbers: Tensor) -> None:
        self._over: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._over = torch.cuda.Event()
            self._over.record()
        else:
            self._numbers = numbers.clone()

    def read(self) -> Tensor:
        """Wait for the copy, but not for later work, and return it."""
        if self._over is not None:
            self._over.synchronize()
        return self._numbers


@dataclass(eq=False)
class InFlight:
    """requests: by row. stood: the rows' states at its begin; None until the previous round has landed."""

    requests: list[Request]
    kind: Kind
    recorded: Recorded
    stood: list[RowState] | None
    results: HostCopy
    began: float = field(default_factory=time.perf_counter)  # at the earliest the landing of the previous round

    @property
    def most(self) -> int:
        """The largest number of tokens that it commits per row."""
        return 1 if self.kind.shape is None else self.kind.shape.num_steps + 1

    def result(self) -> VerifyResult:
        """Wait for the round and return its result."""
        return read_result(Followed(self.results.read()))
