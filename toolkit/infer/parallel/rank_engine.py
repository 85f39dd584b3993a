"""The engine of a rank: the driver's engine sends its calls to the workers, and the workers' engines repeat them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from toolkit.infer.drafters.adaptive import AdaptiveDrafter, AdaptiveShape
from toolkit.infer.drafters.step_costs import Arm
from toolkit.infer.engine.engine import Engine
from toolkit.infer.parallel.driver import Driver
from toolkit.infer.parallel.messages import Abort, Add, Reshape, Step, written
from toolkit.infer.parallel.ranks import RankLostError, Ranks
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request


class RankEngine(Engine):
    """An engine whose forwards need all ranks. The driver makes the choices that depend on the clock."""

    def __init__(self, ranks: Ranks, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
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


class DriversShape(AdaptiveShape):
    """Adaptive shapes chosen by the driver: the workers use its choice of the shape and of the probe steps."""

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
    """The driver's engine. Every method may raise RankLostError; the engine is unusable after that."""

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
        )  # a refused request is not sent
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
    """A constructor of this rank's engine. It takes the arguments of Engine."""
    return partial(DriverEngine, ranks) if isinstance(ranks, Driver) else partial(RankEngine, ranks)
