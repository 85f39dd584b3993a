"""The engine as the ranks run it: rank 0's tells the others what it does, theirs do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.adaptive_drafter import AdaptiveDrafter
from toolkit.infer.drafters.step_costs import Arm
from toolkit.infer.engine.engine import Engine
from toolkit.infer.parallel.driver import Driver
from toolkit.infer.parallel.messages import Abort, Add, Message, Reshape, Step, Stop, written
from toolkit.infer.parallel.ranks import RankLostError, Ranks
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


class RankEngine(Engine):
    """An engine whose forwards need all ranks, and whose choices that depend on the clock are rank 0's."""

    def __init__(self, ranks: Ranks, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.choose_by(lambda most: DriversShape(most, ranks))

    def check_written(self, by_driver: tuple[tuple[int, int, int], ...]) -> None:
        """Raises RankLostError when this rank has other tokens than rank 0: its forwards would be of another text."""
        own = written(self._running)
        if own != by_driver:
            raise RankLostError(
                f"this rank's requests (arrival, tokens, last token) are {own}, those of rank 0 {by_driver}: the ranks "
                "do not compute the same; they need devices of one kind"
            )


class DriversShape(AdaptiveShape):
    """Chooses on rank 0, and when the head is to look; the others do as it chose, whatever their own rounds took."""

    def __init__(self, most: DraftShape, ranks: Ranks) -> None:
        super().__init__(most)
        self._ranks = ranks

    def choose(self, requests: Sequence[Request]) -> Arm:
        def decide() -> tuple[Arm, bool]:
            arm = super(DriversShape, self).choose(requests)
            return arm, self.probe_due

        arm, self.probe_due = self._ranks.agree(decide)
        return arm

    def record(
        self, requests: Sequence[Request], arm: Arm, ranks: Sequence[Sequence[int]], draft_s: float, verify_s: float
    ) -> None:
        if self._ranks.rank == 0:
            super().record(requests, arm, ranks, draft_s, verify_s)


class DriverEngine(RankEngine):
    """Rank 0's. Every method may raise RankLostError; then the engine has ended for good."""

    def __init__(self, driver: Driver, *parts: Any, **options: Any) -> None:
        super().__init__(driver, *parts, **options)
        self.driver = driver

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculative: bool = True,
        shape: DraftShape | None = None,
        request_id: str | None = None,
    ) -> Request:
        request = super().add_request(
            prompt_ids, params, speculative=speculative, shape=shape, request_id=request_id
        )  # what is refused here is never told
        self.driver.tell(
            Add(request.arrival, request.prompt_ids, request.params, speculative, shape, request.states_seed)
        )
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
    """What makes this rank's engine, with the arguments of Engine."""
    return partial(DriverEngine, ranks) if isinstance(ranks, Driver) else partial(RankEngine, ranks)


def run_worker(engine: Engine, next_message: Callable[[], Message]) -> None:
    """Do what rank 0 does, until it stops. Raises whatever a step raises."""
    assert isinstance(engine, RankEngine), "a rank has a RankEngine"
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
                raise AssertionError(f"{message} came between rounds")
    engine.close()
