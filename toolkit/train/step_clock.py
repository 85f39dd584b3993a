"""Measures the seconds of a training step by part, without synchronising a GPU during the step."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepClock:
    """`with clock.part("head"):` adds to the time of a part, without that of parts inside it.

    `clock.part("head")(call)` is `call` with its time measured.

    On a GPU it records CUDA events; `read` waits for them at the end of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._spans: list[tuple[str, str | None, Any, Any]] = []  # part, the part around it, from, to
        self._open: list[str] = []
        self._began = time.perf_counter()

    def restart(self) -> None:
        self._spans.clear()
        self._began = time.perf_counter()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        around = self._open[-1] if self._open else None
        self._open.append(name)
        began = self._mark()
        try:
            yield
        finally:
            self._spans.append((name, around, began, self._mark()))
            self._open.pop()

    def read(self) -> dict[str, float]:
        """Seconds since `restart` (key "step"), and of each part."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        seconds = {"step": time.perf_counter() - self._began}
        for name, around, began, ended in self._spans:
            took = began.elapsed_time(ended) / 1000 if self._on_gpu else ended - began
            seconds[name] = seconds.get(name, 0.0) + took
            if around is not None:
                seconds[around] = seconds.get(around, 0.0) - took
        return seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU the peak of allocated tensors since the step began; elsewhere the peak memory of this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Kilobytes on Linux (getrusage(2)), bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
