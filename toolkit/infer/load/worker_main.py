"""`python -m toolkit.infer.load.worker_main`: one of the ranks 1..N-1, which rank 0 starts and feeds through stdin."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from toolkit.infer.load.load_engine import open_engine
from toolkit.infer.parallel.messages import Decided, Message, Open, Stop, receive
from toolkit.infer.parallel.rank_engine import run_worker
from toolkit.infer.parallel.ranks import RankLostError, Ranks
from toolkit.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
NOTICE_S = 2.0  # within which rank 0's end is noticed after a collective failed because of it


class Worker(Ranks):
    """The ranks as one of the others sees them. A thread reads the messages, so that rank 0's end is never missed."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopping = threading.Event()
        threading.Thread(target=self._read, name="toolkit-messages", daemon=True).start()
        first = self.next_message()
        assert isinstance(first, Open), f"the first message is {first}"
        self.rank, self.size, self._port = first.rank, first.size, first.port
        self.options: dict[str, Any] = first.options

    def next_message(self) -> Message:
        """The next thing to do; waits for it."""
        return self._messages.get()

    def join(self) -> None:
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        store.set(f"here/{self.rank}", "")
        self.connect(store)

    def agree(self, decide: Callable[[], T]) -> T:
        message = self.next_message()
        if not isinstance(message, Decided):
            raise RankLostError(f"rank 0 sent {type(message).__name__} where a decision was due")
        value: T = message.value
        return value

    def ended_by_driver(self) -> bool:
        """Whether rank 0 has told this rank to end, or is about to be found dead."""
        return self._stopping.wait(NOTICE_S)

    def _read(self) -> None:
        while True:
            try:
                message = receive(sys.stdin.buffer)
            except Exception:  # process edge: no order, or half of one
                self._stopping.set()
                logger.warning("rank 0 has gone; this rank ends")
                os._exit(1)  # the other threads may wait in a collective for ever
            self._messages.put(message)
            if isinstance(message, Stop):
                self._stopping.set()
                return


def main() -> None:
    """Runs until rank 0 stops it. Ends with status 1 when anything failed."""
    worker = Worker()
    try:
        opened = open_engine(**worker.options, ranks=worker)
        run_worker(opened.engine, worker.next_message)
    except BaseException as error:  # process edge: whatever it is, rank 0 must notice it
        if not worker.ended_by_driver():
            logger.error("rank %d failed: %s: %s", worker.rank, type(error).__name__, error, exc_info=error)
        os._exit(1)  # ending in order would wait for the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
