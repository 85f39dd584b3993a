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

import atexit
import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import toolkit
from toolkit.infer.request.params import EngineError
from toolkit.log import get_logger
from toolkit.threads import physical_cores, users_threads

logger = get_logger(__name__)

T = TypeVar("T")
# Timeout of one collective. It is long because ranks load their weights in turn. It does not detect lost ranks: the
# driver waits for the workers' processes, and the workers wait for the end of their pipes.
TIMEOUT = timedelta(hours=2)
NOTICE_S = 2.0  # time to detect the end of another process after a collective failed because of it
RETURN_S = 10.0  # time for a step to return after a rank has ended
STOP_S = 10.0  # time for the workers to end before they are killed


class ParallelError(EngineError):
    """Options that tensor parallelism does not support, or a model that cannot be sharded."""


class RankLostError(RuntimeError):
    """A rank has ended, so the engine cannot continue."""


class Ranks(ABC):
    """rank: 0 to size - 1. device: of the weights, set by `place`."""

    rank: int
    size: int
    device = torch.device("cpu")

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
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # else ranks may wait for each other in a capture
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)

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


# What the driver tells the workers, and what goes with it: a call of its engine to repeat, "load", "decided" or "stop".
Message = tuple[str, Any]
STOP: Message = ("stop", None)


class Driver(Ranks):
    """Rank 0: starts the workers as processes, sends them messages, and detects the end of one.

    Each worker reads its own pipe, whose end also tells it that the driver has ended. If a rank dies, its peers hang in
    a collective (NCCL) or fail there (gloo). So one thread per worker waits for its end. It then kills the others,
    makes the next step raise RankLostError, and ends this process if a step never returns.

    size: number of ranks. worker: the program of a worker process (`python -c`). config: sent to the workers.

    The workers start at once; `join` waits for them. Raises ParallelError for a bad size.
    """

    rank = 0

    def __init__(self, size: int, worker: str, config: object) -> None:
        if size < 2:
            raise ParallelError(f"the number of ranks is {size}; a driver needs 2 or more")
        if dist.is_initialized():
            raise ParallelError(
                "this process is in a torch.distributed group already (torchrun, or another LLM that is still open); "
                "tensor parallel starts its own processes: run it as a plain process, and close the other LLM first"
            )
        self.size, self._config = size, config
        self.lost: str | None = None  # why the group has ended; None: it runs
        self._lock = threading.Lock()  # guards lost and _closed
        self._closed = False
        self._inside = False  # a forward may wait for other ranks
        self._when_lost: Callable[[], None] = lambda: None
        self._store: dist.Store | None = None  # kept while a worker may read it
        prefer_loopback()
        self._processes = [self._launch(rank, worker) for rank in range(1, size)]
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"toolkit-rank-{rank}", daemon=True).start()
        atexit.register(self.close)

    def _launch(self, rank: int, worker: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(Path(toolkit.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "LOCAL_RANK": str(rank)}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, physical_cores() // self.size)))
        command = [sys.executable, "-c", worker]
        # A new session: Ctrl-C goes to the driver only.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call `act`, in another thread, when a rank has ended or the driver has failed within a step."""
        with self._lock:
            self._when_lost = act
            already = self.lost is not None
        if already:
            act()

    def join(self) -> None:
        if self.device.type == "cpu" and users_threads() is None:
            torch.set_num_threads(max(1, physical_cores() // self.size))
        store = self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(1, self.size):
            self._send(rank, ("load", (rank, self.size, store.port, self._config)))
        here = [f"here/{rank}" for rank in range(1, self.size)]
        while not store.check(here):
            self._check()
            time.sleep(0.02)
        self.connect(store)

    def agree(self, decide: Callable[[], T]) -> T:
        value = decide()
        self.tell("decided", value)
        return value

    def tell(self, name: str, given: Any = None) -> None:
        """Send a message to all workers. Raises RankLostError."""
        self._check()
        for rank in range(1, self.size):
            self._send(rank, (name, given))

    def _send(self, rank: int, message: Message) -> None:
        pipe = self._processes[rank - 1].stdin
        assert pipe is not None, "workers are started with a pipe"
        try:
            pickle.dump(message, pipe)
            pipe.flush()
        except OSError as error:
            raise RankLostError(self.lost or f"rank {rank} of {self.size} has ended") from error

    def _check(self) -> None:
        if self.lost is not None:
            raise RankLostError(self.lost)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Context manager for work of all ranks. An error inside ends the group: the ranks are out of step.

        Raises RankLostError if another rank has ended, else the original error.
        """
        self._check()
        self._inside = True
        try:
            yield
        except BaseException as error:
            time.sleep(NOTICE_S if isinstance(error, RuntimeError) else 0)  # a failed collective may come first
            before = self._end_group(f"rank 0 of {self.size} failed: {type(error).__name__}: {error}")
            if before is not None:
                raise RankLostError(before) from error
            raise
        finally:
            self._inside = False

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        said = f"rank {rank} of {self.size} has ended (status {code}); the other ranks cannot go on without it"
        if self._closed or self._end_group(said) is not None:
            return
        logger.error("%s", said)
        time.sleep(RETURN_S)
        if self._inside:
            logger.error("rank 0 still waits for it; this process ends")
            os._exit(1)

    def _end_group(self, why: str) -> str | None:
        """Kill the workers. Returns the earlier reason if the group had ended already, else None."""
        with self._lock:
            before = self.lost
            if before is None:
                self.lost = why
        if before is None:
            for process in self._processes:
                process.kill()
            self._when_lost()
        return before

    def close(self) -> None:
        """Stop the workers and wait for their end. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        for process in self._processes:
            assert process.stdin is not None, "workers are started with a pipe"
            with contextlib.suppress(OSError):
                pickle.dump(STOP, process.stdin)
                process.stdin.close()
        # Before the wait below: NCCL ends a group only when all ranks do. Skipped with NCCL after the loss of a rank,
        # because it would wait for that rank.
        if dist.is_initialized() and (self.lost is None or self.device.type == "cpu"):
            dist.destroy_process_group()
        until = time.monotonic() + STOP_S
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._store = None


def prefer_loopback() -> None:
    """Make gloo use the loopback interface. Its default, the interface of the host name, may be missing or public."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class Worker(Ranks):
    """The ranks, seen from one worker. A thread reads the messages and detects the driver's end."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopping = threading.Event()
        threading.Thread(target=self._read, name="toolkit-messages", daemon=True).start()
        name, given = self.next_message()
        assert name == "load", f"the first message is {name}"
        self.rank, self.size, self._port, self.config = given

    def next_message(self) -> Message:
        """Wait for the next message of the driver and return it."""
        return self._messages.get()

    def join(self) -> None:
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        store.set(f"here/{self.rank}", "")
        self.connect(store)

    def agree(self, decide: Callable[[], T]) -> T:
        name, value = self.next_message()
        if name != "decided":
            raise RankLostError(f"the driver sent {name} where a decision was due")
        decided: T = value
        return decided

    def stopping(self) -> bool:
        """Whether the driver has sent Stop or has ended. Waits up to NOTICE_S seconds."""
        return self._stopping.wait(NOTICE_S)

    def _read(self) -> None:
        while True:
            try:
                message: Message = pickle.load(sys.stdin.buffer)
            except Exception:  # process edge: the pipe ended, perhaps within a message
                self._stopping.set()
                logger.warning("rank 0, the driver, has ended; this rank ends too")
                os._exit(1)  # another thread may hang in a collective
            self._messages.put(message)
            if message == STOP:
                self._stopping.set()
                return
