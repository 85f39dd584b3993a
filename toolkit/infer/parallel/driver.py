"""The driver, rank 0: starts the workers as processes, sends them messages, and detects the end of a worker.

Each worker reads its own pipe. The end of the pipe also tells the worker that the driver has ended. If a rank dies, its
peers hang in a collective (NCCL) or fail there (gloo). So one thread per worker waits for its end. It then kills the
other workers, makes the next step raise RankLostError, and ends this process if a step never returns.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

import toolkit
from toolkit.infer.parallel.ranks import Decided, Load, ParallelError, RankLostError, Ranks, Stop, WorkerMessage, send
from toolkit.log import get_logger
from toolkit.threads import physical_cores, users_threads

logger = get_logger(__name__)

T = TypeVar("T")
NOTICE_S = 3.0  # time to detect a rank's end after a collective failed because of it
RETURN_S = 10.0  # time for a step to return after a rank has ended
STOP_S = 10.0  # time for the workers to end before they are killed


class Driver(Ranks):
    """size: number of ranks. worker: the module that a worker process runs (`python -m`). config: sent to the workers.

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
        self._noticed = threading.Event()
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
        command = [sys.executable, "-m", worker]
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

    # -- methods of all ranks ------------------------------------------------------------------------------------------

    def join(self) -> None:
        if self.device.type == "cpu" and users_threads() is None:
            torch.set_num_threads(max(1, physical_cores() // self.size))
        store = self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(1, self.size):
            self._send(rank, Load(rank, self.size, store.port, self._config))
        here = [f"here/{rank}" for rank in range(1, self.size)]
        while not store.check(here):
            self._check()
            time.sleep(0.02)
        self.connect(store)

    def agree(self, decide: Callable[[], T]) -> T:
        value = decide()
        self.tell(Decided(value))
        return value

    # -- messages to the workers ---------------------------------------------------------------------------------------

    def tell(self, message: WorkerMessage) -> None:
        """Send a message to all workers. Raises RankLostError."""
        self._check()
        for rank in range(1, self.size):
            self._send(rank, message)

    def _send(self, rank: int, message: WorkerMessage) -> None:
        pipe = self._processes[rank - 1].stdin
        assert pipe is not None, "workers are started with a pipe"
        try:
            send(message, pipe)
        except OSError as error:
            self._noticed.wait(NOTICE_S)
            raise RankLostError(self.lost or f"rank {rank} of {self.size} does not read messages any more") from error

    def _check(self) -> None:
        if self.lost is not None:
            raise RankLostError(self.lost)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Context manager for work of all ranks. An error inside ends the group: the ranks are out of step.

        Raises RankLostError if the end of another rank was the cause, else the original error.
        """
        self._check()
        self._inside = True
        try:
            yield
        except BaseException as error:
            # A failed collective may be the first sign of the end of another rank.
            if isinstance(error, RuntimeError):
                self._noticed.wait(NOTICE_S)
            before = self._end_group(f"rank 0 of {self.size} failed: {type(error).__name__}: {error}")
            if before is not None and not isinstance(error, RankLostError):
                raise RankLostError(before) from error
            raise
        finally:
            self._inside = False

    # -- loss of a rank and close --------------------------------------------------------------------------------------

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}; its message is above"
        said = f"rank {rank} of {self.size} has ended ({how}); the other ranks cannot go on without it"
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
            self._noticed.set()
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
                send(Stop(), process.stdin)
            with contextlib.suppress(OSError):
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
