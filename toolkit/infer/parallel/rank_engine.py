"""The engine of a rank: the driver's engine sends its calls to the workers, and the workers' engines repeat them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from toolkit.infer.drafters.adaptive import AdaptiveDrafter, AdaptiveShape, Lengths, Plan
from toolkit.infer.engine.engine import Engine
from toolkit.infer.parallel.ranks import (
    Abort,
    Add,
    Driver,
    Ranks,
    Reshape,
    Step,
    Stop,
    WorkerMessage,
)
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import Request


class RankEngine(Engine):
    """An engine whose forwards need all ranks. The driver makes the choices that depend on the clock.

    A rank that runs out of memory ends the group: the others wait for it inside the forward."""

    _one_process = False

    def __init__(self, ranks: Ranks, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._limited = nullcontext  # the ranks must compute the same bits
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.choose_by(lambda most: DriversShape(most, ranks))

    def keep_pace(self, gap_s: float) -> None:
        """Change nothing: the ranks must read the same chunks, whatever their clocks say."""


class DriversShape(AdaptiveShape):
    """Plans chosen by the driver: the workers use them and its choice of the probe steps."""

    def __init__(self, most: DraftShape, ranks: Ranks) -> None:
        super().__init__(most)
        self._ranks = ranks

    def choose(self, requests: Sequence[Request], lookup: Lengths = ()) -> Plan:
        def decide() -> tuple[Plan, bool]:
            return super(DriversShape, self).choose(requests, lookup), self.probe_due

        plan, self.probe_due = self._ranks.agree(decide)
        return plan

    def record(self, *result: Any, **more: Any) -> None:
        if self._ranks.rank == 0:
            super().record(*result, **more)


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
        self.driver.tell(Step())
        with self.driver.working():
            return super().step()

    def close(self) -> None:
        super().close()
        self.driver.close()


def engine_of(ranks: Ranks) -> Callable[..., Engine]:
    """A constructor of this rank's engine. It takes the arguments of Engine."""
    return partial(DriverEngine, ranks) if isinstance(ranks, Driver) else partial(RankEngine, ranks)


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
            case Step():
                for request in engine.step():
                    if request.finished:
                        requests.pop(request.arrival, None)
            case Reshape(shape):
                engine.set_shape(shape)
            case _:
                raise AssertionError(f"{message} arrived between rounds")
    engine.close()
