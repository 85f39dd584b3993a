"""What a pretended CUDA device has seen: launches, waits of the host, uploads."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

OF_INTEREST = ("/toolkit/", "/transformers/models/", "/transformers/")


class MixedDevicesError(RuntimeError):
    """An operation on tensors of both devices, which CUDA refuses."""


class CaptureError(RuntimeError):
    """The host read from the device or wrote to it while a graph was recorded, which ends the recording."""


@dataclass
class Seen:
    """launches: operations that start a kernel, by name. reads: where the host waited for the device. uploads: where it
    copied from pageable memory, which waits too. pinned: number of uploads from pinned memory, which do not.
    recordings, replays: of rounds. bytes: of all arguments and results of launches.
    """

    launches: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    pinned: int = 0
    recordings: int = 0
    replays: int = 0
    bytes: int = 0
    capturing: bool = False

    def clear(self) -> None:
        """Forget what was launched, read and uploaded. The rest stays."""
        self.launches.clear(), self.reads.clear(), self.uploads.clear()
        self.pinned = self.bytes = 0

    def launch(self, name: str) -> None:
        self.launches[name] += 1

    def move(self, *tensors: Tensor) -> None:
        self.bytes += sum(one.numel() * one.element_size() for one in tensors)

    def read(self, what: str) -> None:
        self.reads[self._while_idle(what)] += 1

    def upload(self, what: str, *, pinned: bool = False) -> None:
        line = self._while_idle(what)
        if pinned:
            self.pinned += 1
        else:
            self.uploads[line] += 1

    def _while_idle(self, what: str) -> str:
        line = f"{what} at {caller()}"
        if self.capturing:
            raise CaptureError(f"{line}: not permitted while a stream is capturing")
        return line


def caller() -> str:
    """The innermost line of the package or of a model that led here, as path:line."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for part in OF_INTEREST:
            if part in path:
                return f"{part.strip('/').split('/')[0]}/{path.rsplit(part, 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a test"


seen = Seen()
