"""A round that was launched and whose results are on their way to the host.

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
from toolkit.infer.verify.walk import VerifyResult, read_result


class HostCopy:
    """A copy of `numbers` on the host, as the device will have left them after all that was launched so far."""

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
        """Waits for that, and for nothing that was launched later."""
        if self._over is not None:
            self._over.synchronize()
        return self._numbers


@dataclass(eq=False)
class InFlight:
    """requests: by row. stood: where the rows stood when it began; None until the round before it has landed."""

    requests: list[Request]
    kind: Kind
    recorded: Recorded
    stood: list[RowState] | None
    results: HostCopy
    began: float = field(default_factory=time.perf_counter)  # no sooner than the round before it was over

    @property
    def most(self) -> int:
        """Tokens that it commits of a row, at most."""
        return 1 if self.kind.shape is None else self.kind.shape.num_steps + 1

    def result(self) -> VerifyResult:
        """What the host needs to know of it; waits until it is over."""
        return read_result(Followed(self.results.read()))
