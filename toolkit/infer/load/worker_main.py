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
from toolkit.infer.parallel.rank_engine import obey
from toolkit.infer.parallel.messages import Decided, Open, Order, Stop, receive
from toolkit.infer.parallel.ranks import RankLostError, Ranks
from toolkit.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
NOTICE_S = 2.0  # within which rank 0's end is noticed after a collective failed because of it


class Follower(Ranks):
    """The ranks as one of the others sees them. A thread reads the orders, so that rank 0's end is never missed."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._stopping = threading.Event()
        threading.Thread(target=self._read, name="toolkit-orders", daemon=True).start()
        first = self.next_order()
        assert isinstance(first, Open), f"the first order is {first}"
        self.rank, self.size, self._port = first.rank, first.size, first.port
        self.options: dict[str, Any] = first.options

    def next_order(self) -> Order:
        """The next thing to do; waits for it."""
        return self._orders.get()

    def join(self) -> None:
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        store.set(f"here/{self.rank}", "")
        self.connect(store)

    def agree(self, decide: Callable[[], T]) -> T:
        order = self.next_order()
        if not isinstance(order, Decided):
            raise RankLostError(f"rank 0 sent {type(order).__name__} where a decision was due")
        value: T = order.value
        return value

    def ended_by_leader(self) -> bool:
        """Whether rank 0 has told this rank to end, or is about to be found dead."""
        return self._stopping.wait(NOTICE_S)

    def _read(self) -> None:
        while True:
            try:
                order = receive(sys.stdin.buffer)
            except Exception:  # process edge: no order, or half of one
                self._stopping.set()
                logger.warning("rank 0 has gone; this rank ends")
                os._exit(1)  # the other threads may wait in a collective for ever
            self._orders.put(order)
            if isinstance(order, Stop):
                self._stopping.set()
                return


def main() -> None:
    """Runs until rank 0 stops it. Ends with status 1 when anything failed."""
    follower = Follower()
    try:
        opened = open_engine(**follower.options, ranks=follower)
        obey(opened.engine, follower.next_order)
    except BaseException as error:  # process edge: whatever it is, rank 0 must notice it
        if not follower.ended_by_leader():
            logger.error("rank %d failed: %s: %s", follower.rank, type(error).__name__, error, exc_info=error)
        os._exit(1)  # ending in order would wait for the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
