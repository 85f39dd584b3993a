"""One process's place among the N processes of a machine that run one engine together (tensor parallel).

Every rank runs the same engine on the same requests and takes the same decisions, with its part of the weights and of
the cache. Rank 0, the driver, is the user's process; it starts the workers and sends them what it is asked to do:

    driver    HTTP, LLM --> DriverEngine   add, abort, step   ---- collectives inside a forward ----+
                               |  messages, through a pipe each                                     |
    worker r                   +-----> RankEngine   add, abort, step  ----------------------------+

What could differ between ranks is decided by the driver (`agree`: choices that depend on the clock) or is the minimum
over all (`least`: free memory). Random numbers depend on a request's seed alone. Sums over ranks have the same bits on
all of them.
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
# Of one collective: ranks read their weights one after the other. The end of a rank is noticed by other means.
TIMEOUT = timedelta(hours=2)


class ParallelError(EngineError):
    """Options that tensor parallelism does not support, or a model that cannot be divided among the ranks."""


class RankLostError(RuntimeError):
    """A rank has ended; the engine that all of them run together cannot go on."""


class Ranks(ABC):
    """rank: from 0 to size - 1. device: of its weights, set by `place`. mesh: all ranks in a line, set by `connect`; of
    the CPU, where weights are read and divided."""

    rank: int
    size: int
    device = torch.device("cpu")
    mesh: DeviceMesh

    def place(self, device: torch.device, *, quantization: str | None) -> torch.device:
        """This rank's device of that type. Raises ParallelError for weights or a device that cannot be divided."""
        if quantization is not None:
            raise ParallelError(
                f"`tensor_parallel_size` is {self.size}, which does not go with {quantization} weights; set "
                "`quantization` to none, or use one process"
            )
        if device.type == "cuda":
            found = torch.cuda.device_count()
            if device.index is not None or self.size > found:
                raise ParallelError(
                    f"`tensor_parallel_size` is {self.size}, which needs the GPUs cuda:0 to cuda:{self.size - 1}; "
                    f"there are {found}, and the device is {device}: set `device` to cuda or cpu, with a GPU per rank"
                )
            device = torch.device("cuda", self.rank)
            torch.cuda.set_device(device)
        self.device = device
        return device

    @abstractmethod
    def join(self) -> None:
        """Wait until all ranks have started. Raises RankLostError."""

    @abstractmethod
    def agree(self, decide: Callable[[], T]) -> T:
        """The driver's decision; `decide` is called on the driver alone."""

    def connect(self, store: dist.Store) -> None:
        """Start torch's process group: NCCL between GPUs, gloo between CPUs and for tensors on the host."""
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        self.mesh = init_device_mesh("cpu", (self.size,))

    def least(self, number: int) -> int:
        """The minimum of the ranks' numbers."""
        found = torch.tensor(number)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` on one rank after the other, so that its peak memory is needed once."""
        for turn in range(self.size):
            if turn == self.rank:
                result = work()
            self.least(0)
        return result

    def memory(self, settings: MemorySettings) -> MemorySettings:
        """Settings that give all ranks caches of one size; ranks on a CPU share its memory."""
        own = {field.name: getattr(settings, field.name) for field in fields(MemorySettings)}
        if self.device.type == "cpu" and settings.max_total_tokens is None:
            own["mem_fraction_static"] = (settings.mem_fraction_static or CPU_SHARE) / self.size
        return _EqualMemory(**own, least=self.least)


@dataclass(frozen=True)
class _EqualMemory(MemorySettings):
    """The same number of pages on all ranks: admission of requests and eviction of prefixes follow from it."""

    least: Callable[[int], int] = int

    def _pages(self, shape: KVShape, max_batch: int, max_context: int) -> int:
        return self.least(super()._pages(shape, max_batch, max_context))
