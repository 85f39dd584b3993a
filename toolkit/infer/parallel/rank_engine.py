"""The engine of a rank: the driver's engine sends its calls to the workers, and the workers' engines repeat them."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.adaptive_drafter import AdaptiveDrafter
from toolkit.infer.drafters.lookup import Lengths
from toolkit.infer.drafters.step_costs import Arm
from toolkit.infer.engine.engine import Engine
from toolkit.infer.parallel.driver import Driver
from toolkit.infer.parallel.ranks import (
    Abort,
    Add,
    Decided,
    Load,
    RankLostError,
    Ranks,
    Reshape,
    Step,
    Stop,
    WorkerMessage,
    receive,
    written,
)
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import Request
from toolkit.log import get_logger


class RankEngine(Engine):
    """An engine whose forwards need all ranks. The driver makes the choices that depend on the clock.

    A rank that runs out of memory ends the group: the others wait for it inside the forward."""

    _one_process = False

    def __init__(self, ranks: Ranks, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._limited = nullcontext  # the ranks must compute the same bits
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.choose_by(lambda most: DriversShape(most, ranks))

    def check_written(self, by_driver: tuple[tuple[int, int, int], ...]) -> None:
        """Raise RankLostError if this rank's tokens differ from the driver's: their forwards would not match."""
        own = written(self._running)
        if own != by_driver:
            raise RankLostError(
                f"this rank's requests (arrival, tokens, last token) are {own}, the driver's {by_driver}: the ranks "
                "do not compute the same; they need devices of one kind"
            )

    def keep_pace(self, gap_s: float) -> None:
        """Change nothing: the ranks must read the same chunks, whatever their clocks say."""


class DriversShape(AdaptiveShape):
    """Adaptive shapes chosen by the driver: the workers use its choice of the shape and of the probe steps."""

    def __init__(self, most: DraftShape, ranks: Ranks) -> None:
        super().__init__(most)
        self._ranks = ranks

    def choose(self, requests: Sequence[Request], lookup: Lengths = ()) -> Arm:
        def decide() -> tuple[Arm, bool, list[int]]:
            arm = super(DriversShape, self).choose(requests, lookup)
            return arm, self.probe_due, self.depths

        arm, self.probe_due, self.depths = self._ranks.agree(decide)
        return arm

    def record(
        self,
        requests: Sequence[Request],
        arm: Arm,
        ranks: Sequence[Sequence[int]],
        draft_s: float,
        verify_s: float,
        timed: bool = True,
    ) -> None:
        if self._ranks.rank == 0:
            super().record(requests, arm, ranks, draft_s, verify_s, timed)


class DriverEngine(RankEngine):
    """The driver's engine. Every method may raise RankLostError; the engine is unusable after that."""

    def __init__(self, driver: Driver, *parts: Any, **options: Any) -> None:
        super().__init__(driver, *parts, **options)
        self.driver = driver

    def add_request(self, *prompt: Any, **options: Any) -> Request:
        request = super().add_request(*prompt, **options)  # a refused request is not sent
        drafts = (request.speculative, request.shape, request.verify)
        prompt = (request.arrival, request.prompt_ids, request.params)
        self.driver.tell(Add(*prompt, *drafts, request.priority, request.states_seed))
        return request

    def abort(self, request: Request) -> None:
        if not request.finished and self.driver.lost is None:
            self.driver.tell(Abort(request.arrival))
        super().abort(request)

    def set_shape(self, shape: DraftShape) -> None:
        super().set_shape(shape)
        self.driver.tell(Reshape(shape))

    def step(self) -> list[Request]:
        self.driver.tell(Step(written(self._running)))
        with self.driver.working():
            return super().step()

    def close(self) -> None:
        super().close()
        self.driver.close()


def engine_of(ranks: Ranks) -> Callable[..., Engine]:
    """A constructor of this rank's engine. It takes the arguments of Engine."""
    return partial(DriverEngine, ranks) if isinstance(ranks, Driver) else partial(RankEngine, ranks)


logger = get_logger(__name__)

T = TypeVar("T")
NOTICE_S = 2.0  # time to detect the driver's end after a collective failed because of it


class Worker(Ranks):
    """The ranks, seen from one worker. A thread reads the messages and detects the driver's end."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
        self._stopping = threading.Event()
        threading.Thread(target=self._read, name="toolkit-messages", daemon=True).start()
        first = self.next_message()
        assert isinstance(first, Load), f"the first message is {first}"
        self.rank, self.size, self._port = first.rank, first.size, first.port
        self.config = first.config

    def next_message(self) -> WorkerMessage:
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


def run_worker(engine: Engine, next_message: Callable[[], WorkerMessage]) -> None:
    """Repeat the driver's calls on `engine` until Stop. Raises the errors of a step."""
    assert isinstance(engine, RankEngine), "a worker runs a RankEngine"
    requests: dict[int, Request] = {}
    while not isinstance(message := next_message(), Stop):
        match message:
            case Add(arrival, prompt_ids, params, speculative, shape, verify, priority, states_seed):
                requests[arrival] = engine.add_request(
                    prompt_ids, params, speculative=speculative, shape=shape, verify=verify, priority=priority
                )
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
