"""One process's place among the N of one machine that run one engine together (tensor parallel).

Every rank runs the same engine on the same requests and takes the same decisions, each with its part of the weights and
of the cache. Rank 0, the driver, is the user's process; it starts the others and tells them what it is asked to do:

    rank 0    HTTP, LLM --> DriverEngine   add, abort, step   ---- collectives inside a forward ----+
                               |  messages, through a pipe each                                     |
    rank r                     +-----> RankEngine   add, abort, step  ----------------------------+

What could differ between ranks is taken from rank 0 (`agree`: choices that depend on the clock) or is the least of all
(`least`: free memory). Random numbers are functions of a request's seed. Sums over ranks leave the same bits on all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit.infer.cache.cache_manager import CPU_SHARE, MemorySettings
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.request.errors import EngineError

T = TypeVar("T")
# Of one collective. Ranks read their weights one after the other; a rank that dies is noticed by other means.
PATIENCE = timedelta(hours=2)


class ParallelError(EngineError):
    """What tensor parallel does not go with, or weights that cannot be divided among the ranks."""


class RankLostError(RuntimeError):
    """A rank has ended: the engine that all of them run together cannot go on."""


class Ranks(ABC):
    """rank of size, from 0. device: where its weights lie, known from `place` on. mesh: all ranks in a line, from
    `connect` on; of the CPU, as weights are divided where they were read."""

    rank: int
    size: int
    device = torch.device("cpu")
    mesh: DeviceMesh

    def place(
        self, device: torch.device, *, quantization: str | None, torch_compile: bool, graphs: bool
    ) -> torch.device:
        """This rank's device of that kind. Raises ParallelError for what does not go with several ranks."""
        for wanted, what, instead in (
            (quantization, f"{quantization} weights", "--quantization none keeps the target as it is"),
            (torch_compile, "compiled layers", "leave --torch-compile out"),
            (graphs, "CUDA graphs", "leave --cuda-graph-max-bs out"),
        ):
            if wanted:
                raise ParallelError(f"tensor parallel over {self.size} ranks does not go with {what}: {instead}")
        if device.type == "cuda":
            found = torch.cuda.device_count()
            if device.index is not None or self.size > found:
                raise ParallelError(
                    f"tensor parallel over {self.size} ranks needs the GPUs cuda:0 to cuda:{self.size - 1}; there are "
                    f"{found}, and the device is {device}: use --device cuda or cpu, and as many ranks as GPUs at most"
                )
            device = torch.device("cuda", self.rank)
            torch.cuda.set_device(device)
        self.device = device
        return device

    @abstractmethod
    def join(self) -> None:
        """Return when all ranks are there. Raises RankLostError."""

    @abstractmethod
    def agree(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides; `decide` is called there alone."""

    def connect(self, store: dist.Store) -> None:
        """torch's process group: NCCL between GPUs, gloo between CPUs, and for what lies on the host."""
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=PATIENCE)
        self.mesh = init_device_mesh("cpu", (self.size,))

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        found = torch.tensor(number)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def in_turn(self, work: Callable[[], T]) -> T:
        """One rank after the other: what each holds for a while is not held by all at once."""
        for turn in range(self.size):
            if turn == self.rank:
                result = work()
            self.least(0)
        return result

    def memory(self, settings: MemorySettings) -> MemorySettings:
        """Caches of one size on all ranks, which share the memory of a CPU."""
        own = {field.name: getattr(settings, field.name) for field in fields(MemorySettings)}
        if self.device.type == "cpu" and settings.max_total_tokens is None:
            own["fraction"] = (settings.fraction or CPU_SHARE) / self.size
        return _EqualMemory(**own, least=self.least)


@dataclass(frozen=True)
class _EqualMemory(MemorySettings):
    """Who is let in, and whose prefixes go, follows from the number of pages."""

    least: Callable[[int], int] = int

    def _pages(self, shape: KVShape, max_batch: int, max_context: int) -> int:
        return self.least(super()._pages(shape, max_batch, max_context))
