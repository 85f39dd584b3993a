"""A worker: a rank that loads the engine and repeats the driver's calls on it, according to the driver's messages."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from toolkit.infer.engine.engine import Engine
from toolkit.infer.parallel.messages import Abort, Add, Decided, Load, Message, Reshape, Step, Stop, receive
from toolkit.infer.parallel.rank_engine import RankEngine
from toolkit.infer.parallel.ranks import RankLostError, Ranks
from toolkit.infer.request.request import Request
from toolkit.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
NOTICE_S = 2.0  # time to detect the driver's end after a collective failed because of it


class Worker(Ranks):
    """The ranks, seen from one worker. A thread reads the messages and detects the driver's end."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopping = threading.Event()
        threading.Thread(target=self._read, name="toolkit-messages", daemon=True).start()
        first = self.next_message()
        assert isinstance(first, Load), f"the first message is {first}"
        self.rank, self.size, self._port = first.rank, first.size, first.port
        self.config: Any = first.config

    def next_message(self) -> Message:
        """Wait for the next message of the driver and return it."""
        return self._messages.get()

    def join(self) -> None:
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        store.set(f"here/{self.rank}", "")
        self.connect(store)

    def agree(self, decide: Callable[[], T]) -> T:
        message = self.next_message()
        if not isinstance(message, Decided):
            raise RankLostError(f"the driver sent {type(message).__name__} where a decision was due")
        value: T = message.value
        return value

    def stopping(self) -> bool:
        """Whether the driver has sent Stop or has ended. Waits up to NOTICE_S seconds."""
        return self._stopping.wait(NOTICE_S)

    def _read(self) -> None:
        while True:
            try:
                message = receive(sys.stdin.buffer)
            except Exception:  # process edge: the pipe ended, perhaps within a message
                self._stopping.set()
                logger.warning("rank 0, the driver, has ended; this rank ends too")
                os._exit(1)  # another thread may hang in a collective
            self._messages.put(message)
            if isinstance(message, Stop):
                self._stopping.set()
                return


def run_worker(engine: Engine, next_message: Callable[[], Message]) -> None:
    """Repeat the driver's calls on `engine` until Stop. Raises the errors of a step."""
    assert isinstance(engine, RankEngine), "a worker runs a RankEngine"
    requests: dict[int, Request] = {}
    while not isinstance(message := next_message(), Stop):
        match message:
            case Add(arrival, prompt_ids, params, speculative, shape, states_seed):
                requests[arrival] = engine.add_request(prompt_ids, params, speculative=speculative, shape=shape)
                requests[arrival].states_seed = states_seed
                assert requests[arrival].arrival == arrival, "the ranks count requests differently"
            case Abort(arrival):
                engine.abort(requests.pop(arrival))
            case Step(by_driver):
                engine.check_written(by_driver)
                for request in engine.step():
                    if request.finished:
                        requests.pop(request.arrival, None)
            case Reshape(shape):
                engine.set_shape(shape)
            case _:
                raise AssertionError(f"{message} arrived between rounds")
    engine.close()
