"""Where the time of a round goes, part by part; and what the card's memory moves in a second.

    draft     the head's forwards, its read of what was committed before (EAGLE's "extend") included, and its picks
    build     the tree of the best candidates
    verify    the target's forward over every node, output matrix included
    sample    the target's choices, and the walk through the tree
    compact   keys of accepted nodes move to their places; what the next draft reads is kept
    host      everything else: scheduling, commits, reading the result, waiting for launches

The engine's functions are wrapped while it is measured. Eager rounds leave a stamp wherever a part begins. A recorded
round has no inside to stamp, so it is recorded as one graph a part, which share their memory and are started one after
the other with a stamp between them. Stamps are CUDA events; without a GPU, the host's clock.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.drafters import head_drafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.drafters.ngram_drafter import NgramDrafter
from toolkit.infer.engine import round as engine_round
from toolkit.infer.graphs.recordings import WARM_UPS, Run
from toolkit.infer.request.errors import EngineError
from toolkit.infer.verify.forced import ForcedAcceptance
from toolkit.targets.target import Target

HOST = "host"
PARTS: tuple[tuple[Any, str, str], ...] = (
    (HeadDrafter, "draft", "draft"),
    (NgramDrafter, "propose", "draft"),
    (head_drafter, "chain_tree", "build"),
    (head_drafter, "rerank", "build"),
    (TargetForward, "__call__", "verify"),
    (Target, "logits", "verify"),
    (engine_round, "choose_tokens", "sample"),
    (ForcedAcceptance, "__call__", "sample"),
    (engine_round, "follow", "sample"),
    (HeadDrafter, "keep_features", "compact"),
    (engine_round, "compact", "compact"),
    (engine_round, "advance", "compact"),
)
NAMES = (*dict.fromkeys(part for _, _, part in PARTS), HOST)


class Clock:
    """Stamps in the order of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"

    def stamp(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.on_device:
            torch.cuda.synchronize()

    def seconds(self, first: Any, last: Any) -> float:
        """Between two stamps; the device has done both."""
        return first.elapsed_time(last) / 1e3 if self.on_device else last - first

    def median(self, launch: Callable[[], Any], times: int) -> float:
        """Seconds of a launch, after two that do not count."""
        for _ in range(2):
            launch()
        stamps = [self.stamp()]
        for _ in range(times):
            launch()
            stamps.append(self.stamp())
        self.wait()
        took = [self.seconds(*pair) for pair in zip(stamps, stamps[1:], strict=False)]
        return sorted(took)[times // 2]


class RoundParts:
    """Stamps of one engine's rounds, and the capture of its recorded ones: GraphSettings(rows, RoundParts(clock))."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._inside = [HOST]
        self._stamps: list[tuple[str, Any]] = []
        self._kept: list[tuple[str, Any]] = []
        self._cut: Callable[[str], None] | None = None  # what a change of parts does while a round is recorded
        self.recorded = 0
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """The engine's functions say which part they are."""
        owns = [getattr(owner, name) for owner, name, _ in PARTS]
        for (owner, name, part), own in zip(PARTS, owns, strict=True):
            setattr(owner, name, self._wrapped(own, part))
        try:
            yield
        finally:
            for (owner, name, _), own in zip(PARTS, owns, strict=True):
                setattr(owner, name, own)

    def restart(self) -> None:
        """Forget the stamps so far; the host's time begins."""
        self._stamps, self._kept = [(HOST, self._clock.stamp())], []

    def stop(self) -> None:
        """What comes after does not count."""
        self._stamp(HOST)
        self._stamps, self._kept = [], self._stamps

    def seconds(self) -> dict[str, float]:
        """Of every part between `restart` and `stop`."""
        self._clock.wait()
        found = dict.fromkeys(NAMES, 0.0)
        for (part, began), (_, ended) in zip(self._kept, self._kept[1:], strict=False):
            found[part] += self._clock.seconds(began, ended)
        return found

    def _wrapped(self, own: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(own)
        def measured(*args: Any, **keywords: Any) -> Any:
            # Heads that share the target's output matrix score their drafts by it: that is drafting.
            drafting = part == "verify" and self._inside[-1] == "draft"
            self._inside.append("draft" if drafting else part)
            self._change()
            try:
                return own(*args, **keywords)
            finally:
                self._inside.pop()
                self._change()

        return measured

    def _change(self) -> None:
        (self._cut or self._stamp)(self._inside[-1])

    def _stamp(self, part: str) -> None:
        self._stamps.append((part, self._clock.stamp()))

    # -- recorded rounds -----------------------------------------------------------------------------------------------

    def __call__(self, run: Run) -> Run:
        """Records a round, part by part. Raises EngineError where it cannot be recorded."""
        if not self._clock.on_device:
            run()
            self.recorded += 1
            return run
        try:
            segments = self._record(run)
        except RuntimeError as error:
            raise EngineError(f"a round could not be recorded part by part ({error})") from error
        finally:
            self._cut = None
        self.recorded += 1

        def replay() -> None:
            for part, graph in segments:
                self._stamp(part)
                graph.replay()
            self._stamp(HOST)

        return replay

    def _record(self, run: Run) -> list[tuple[str, torch.cuda.CUDAGraph]]:
        pool = torch.cuda.graph_pool_handle()
        segments: list[tuple[str, torch.cuda.CUDAGraph]] = []

        def begin(part: str) -> None:
            segments.append((part, torch.cuda.CUDAGraph()))
            segments[-1][1].capture_begin(pool=pool)

        def cut(part: str) -> None:
            if part != segments[-1][0]:
                segments[-1][1].capture_end()
                begin(part)

        self._stream = self._stream or torch.cuda.Stream()
        for _ in range(WARM_UPS):  # not on the stream that captures: see CudaCapture
            run()
        torch.cuda.synchronize()
        gc.collect()
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # between two parts
            begin(self._inside[-1])
            self._cut = cut
            try:
                run()
            finally:
                self._cut = None
                segments[-1][1].capture_end()
        torch.cuda.synchronize()
        return segments


def bandwidth(clock: Clock, device: torch.device, size: int) -> dict[str, float]:
    """Bytes a second of a copy (read and written), and of a sum (read), of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copied = clock.median(lambda: target.copy_(source), 20)
    summed = clock.median(lambda: source.sum(), 20)
    return {"copy": 2 * source.nbytes / copied, "read": source.nbytes / summed}
