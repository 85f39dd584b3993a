"""Tensor parallelism: one engine on N processes (ranks) of a machine.

Every rank runs the same engine on the same requests and makes the same decisions, with its shard of the weights and of
the cache. Rank 0, the driver, is the user's process. It starts the workers and sends them its own calls:

    driver    HTTP, LLM --> DriverEngine   add, abort, step   ---- collectives inside a forward ----+
                               |  messages, one pipe per worker                                     |
    worker r                   +-----> RankEngine   add, abort, step  ------------------------------+

The order of the messages is the order of the driver's own calls. The driver decides what could differ between ranks
(`agree`: choices that depend on the clock), or the ranks use the minimum (`least`: free memory). Random numbers depend
on a request's seed only. Sums over ranks have the same bits on all ranks.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit.infer.cache.cache_manager import CPU_SHARE, MemorySettings
from toolkit.infer.cache.cache_size import Need
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams
from toolkit.infer.request.request import Request

T = TypeVar("T")
# Timeout of one collective. It is long because ranks load their weights in turn. It does not detect lost ranks: the
# driver waits for the workers' processes, and the workers wait for the end of their pipes.
TIMEOUT = timedelta(hours=2)


class ParallelError(EngineError):
    """Options that tensor parallelism does not support, or a model that cannot be sharded."""


class RankLostError(RuntimeError):
    """A rank has ended, so the engine cannot continue."""


class Ranks(ABC):
    """rank: 0 to size - 1. device: of the weights, set by `place`. mesh: a 1-D mesh of all ranks, set by `connect`; on
    the CPU, where weights are loaded and sharded."""

    rank: int
    size: int
    device = torch.device("cpu")
    mesh: DeviceMesh

    def place(self, device: torch.device, *, quantization: str | None) -> torch.device:
        """Select this rank's device of that type. Returns it.

        Raises ParallelError for quantised weights, a device with an index (cuda:N), or fewer GPUs than ranks."""
        if quantization is not None:
            raise ParallelError(
                f"`tensor_parallel_size` is {self.size} and the target has {quantization} weights; they cannot be "
                "combined: set `quantization` to none, or use one process"
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
        """The driver's decision on all ranks. Only the driver calls `decide`."""

    def connect(self, store: dist.Store) -> None:
        """Start torch's process group: NCCL for tensors on GPUs, gloo for tensors on the host."""
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        self.mesh = init_device_mesh("cpu", (self.size,))

    def least(self, number: int) -> int:
        """The minimum of `number` over all ranks."""
        found = torch.tensor(number)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` on one rank after the other, so that only one rank at a time has its peak memory."""
        for turn in range(self.size):
            if turn == self.rank:
                result = work()
            self.least(0)
        return result

    def memory(self, settings: MemorySettings) -> MemorySettings:
        """Settings for caches of the same size on all ranks. Ranks on a CPU share its memory."""
        own = {field.name: getattr(settings, field.name) for field in fields(MemorySettings)}
        if self.device.type == "cpu" and settings.max_total_tokens is None:
            own["mem_fraction_static"] = (settings.mem_fraction_static or CPU_SHARE) / self.size
        return _EqualMemory(**own, least=self.least)


@dataclass(frozen=True)
class _EqualMemory(MemorySettings):
    """The same context and number of pages on all ranks, so that admission and eviction are the same on all ranks."""

    least: Callable[[int], int] = int

    def context(self, shape: KVShape, max_running_requests: int, asked: int | None, longest: int, *beside: int) -> int:
        return self.least(super().context(shape, max_running_requests, asked, longest, *beside))

    def _pages(self, shape: KVShape, needed: Need) -> int:
        return self.least(super()._pages(shape, needed))


@dataclass(frozen=True)
class Load:
    """Join the group with its store at `port` as `rank`, and load the engine that `config` describes."""

    rank: int
    size: int
    port: int
    config: object


@dataclass(frozen=True)
class Add:
    """A new request. arrival: its number in the engine of each rank."""

    arrival: int
    prompt_ids: list[int]
    params: SamplingParams
    speculative: bool
    shape: DraftShape | None
    verify: str | None
    priority: int
    states_seed: bool  # the caller set a seed; `params` here always has one


@dataclass(frozen=True)
class Abort:
    """End the request of that arrival."""

    arrival: int


@dataclass(frozen=True)
class Step:
    """Run one round. written: the driver's result of `written` before it."""

    written: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Reshape:
    """Draft with another shape from the next step on."""

    shape: DraftShape


@dataclass(frozen=True)
class Decided:
    """A decision of the driver within a round."""

    value: Any


@dataclass(frozen=True)
class Stop:
    """Close the engine and end the process."""


WorkerMessage = Load | Add | Abort | Step | Reshape | Decided | Stop


def written(running: Sequence[Request]) -> tuple[tuple[int, int, int], ...]:
    """Per row: arrival of its request, number of output tokens, last token. Equal on all ranks before every round."""
    return tuple((request.arrival, len(request.output_ids), request.output_ids[-1]) for request in running)


def send(message: WorkerMessage, pipe: IO[bytes]) -> None:
    """Write a message to a pipe. Raises OSError if the pipe has no reader."""
    pipe.write(pickle.dumps(message))
    pipe.flush()


def receive(pipe: IO[bytes]) -> WorkerMessage:
    """Read the driver's next message. Raises EOFError if the driver has ended, UnpicklingError if within a message."""
    message: WorkerMessage = pickle.load(pipe)
    return message
