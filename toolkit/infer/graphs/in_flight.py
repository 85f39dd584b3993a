"""A round that was launched and whose results are on their way to the host.

Shapes: B rows of requests, A longest accepted path (root included).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.infer.graphs.recordings import Kind, Recorded
from toolkit.infer.graphs.round_state import RowState
from toolkit.infer.request.request import Request
from toolkit.infer.verify.walk import VerifyResult, result_from


class HostCopy:
    """A copy of `found` as the device will have left it after all that was launched so far, on the host."""

    def __init__(self, found: Tensor) -> None:
        self._over: torch.cuda.Event | None = None
        if found.device.type == "cuda":
            self._numbers = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._numbers.copy_(found, non_blocking=True)
            self._over = torch.cuda.Event()
            self._over.record()
        else:
            self._numbers = found.clone()

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

    def walk(self) -> VerifyResult:
        """What it has found, once it is over."""
        return result_from(self.results.read())

    def left(self, result: VerifyResult) -> list[RowState]:
        """Where its rows stand behind it."""
        assert self.stood is not None, "rounds land in the order in which they were launched"
        rows = zip(self.stood, result.accepted, result.path_tokens, strict=True)
        return [(tokens[-1], stood[1] + accepted + 1, accepted + 1, 1) for stood, accepted, tokens in rows]
