"""The engine of a rank: the driver's engine sends its calls to the workers, and the workers' engines repeat them."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.infer.cache.cache_manager import CPU_SHARE
from toolkit.infer.drafters.adaptive import AdaptiveDrafter, AdaptiveShape, Lengths, Plan
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import DEFAULTS, Engine
from toolkit.infer.parallel.ranks import STOP, Driver, Message, Ranks
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import Request
from toolkit.targets.target import Target


class RankEngine(Engine):
    """An engine whose forwards need all ranks. The driver makes the choices that depend on the clock.

    A rank that runs out of memory ends the group: the others wait for it inside the forward."""

    _one_process = False

    def __init__(
        self,
        ranks: Ranks,
        target: Target,
        draft: Draft | None = None,
        shape: DraftShape | None = None,
        config: EngineConfig = DEFAULTS,
        **options: Any,
    ) -> None:
        self._ranks = ranks
        if target.device.type == "cpu" and config.max_total_tokens is None:  # its memory is shared by the ranks
            share = (config.mem_fraction_static or CPU_SHARE) / ranks.size
            config = replace(config, mem_fraction_static=share)
        super().__init__(target, draft, shape, config, **options)
        self._limited = nullcontext  # the ranks must compute the same bits
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.choose_by(lambda most: DriversShape(most, ranks))

    def _agreed(self, number: int) -> int:
        """The minimum over all ranks: admission and eviction must be the same."""
        return self._ranks.least(number)

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
        # Before `driver.close`: NCCL waits there for the end of all graphs. An engine that nobody holds has none.
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def add_request(self, *prompt: Any, **options: Any) -> Request:
        request = super().add_request(*prompt, **options)  # a refused request is not sent
        drafts = {name: getattr(request, name) for name in ("speculative", "shape", "verify", "priority")}
        # The parameters have a seed now, whoever set it.
        self.driver.tell("add", (request.prompt_ids, request.params, drafts, request.states_seed))
        return request

    def abort(self, request: Request) -> None:
        if not request.finished and self.driver.lost is None:
            self.driver.tell("abort", request.arrival)
        super().abort(request)

    def _shape_changed(self) -> None:
        self.driver.tell("set_shape", self.shape)  # a refused shape is not sent
        with self.driver.working():
            super()._shape_changed()

    def step(self) -> list[Request]:
        self.driver.tell("step")
        with self.driver.working():
            return super().step()

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        super().close()
        self.driver.close()


def _close(engine: weakref.ref[DriverEngine]) -> None:
    if (alive := engine()) is not None:
        alive.close()


def engine_of(ranks: Ranks) -> Callable[..., Engine]:
    """A constructor of this rank's engine. It takes the arguments of Engine."""
    return partial(DriverEngine, ranks) if isinstance(ranks, Driver) else partial(RankEngine, ranks)


def run_worker(engine: Engine, next_message: Callable[[], Message]) -> None:
    """Repeat the driver's calls on `engine` until STOP. Raises the errors of a step."""
    requests: dict[int, Request] = {}  # by their number of arrival, which is the same on all ranks
    while (message := next_message()) != STOP:
        match message:
            case "add", (prompt_ids, params, drafts, states_seed):
                request = engine.add_request(prompt_ids, params, **drafts)
                requests[request.arrival], request.states_seed = request, states_seed
            case "abort", arrival:
                engine.abort(requests.pop(arrival))
            case "set_shape", shape:
                engine.set_shape(shape)
            case "step", _:
                for request in engine.step():
                    if request.finished:
                        requests.pop(request.arrival, None)
            case name, _:
                raise AssertionError(f"the driver sent {name} between rounds")
    engine.close()
