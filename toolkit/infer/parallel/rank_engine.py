"""The engine as the ranks run it: rank 0's tells the others what it does, theirs do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.adaptive_drafter import AdaptiveDrafter
from toolkit.infer.drafters.step_costs import Arm
from toolkit.infer.engine.engine import Engine
from toolkit.infer.parallel.driver import Leader
from toolkit.infer.parallel.messages import Abort, Add, Order, Reshape, Step, Stop, written
from toolkit.infer.parallel.ranks import RankLostError, Ranks
from toolkit.infer.request.request import Request
from toolkit.infer.request.params import SamplingParams


class RankEngine(Engine):
    """An engine whose forwards need all ranks, and whose choices that depend on the clock are rank 0's."""

    def __init__(self, ranks: Ranks, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.choose_by(lambda most: LeadersShape(most, ranks))

    def check_written(self, by_leader: tuple[tuple[int, int, int], ...]) -> None:
        """Raises RankLostError when this rank has other tokens than rank 0: its forwards would be of another text."""
        own = written(self._running)
        if own != by_leader:
            raise RankLostError(
                f"this rank's requests (arrival, tokens, last token) are {own}, those of rank 0 {by_leader}: the ranks "
                "do not compute the same; they need devices of one kind"
            )


class LeadersShape(AdaptiveShape):
    """Chooses on rank 0, and when the head is to look; the others do as it chose, whatever their own rounds took."""

    def __init__(self, most: DraftShape, ranks: Ranks) -> None:
        super().__init__(most)
        self._ranks = ranks

    def choose(self, requests: Sequence[Request]) -> Arm:
        def decide() -> tuple[Arm, bool]:
            arm = super(LeadersShape, self).choose(requests)
            return arm, self.look_due

        arm, self.look_due = self._ranks.agree(decide)
        return arm

    def record(
        self, requests: Sequence[Request], arm: Arm, ranks: Sequence[Sequence[int]], draft_s: float, verify_s: float
    ) -> None:
        if self._ranks.rank == 0:
            super().record(requests, arm, ranks, draft_s, verify_s)


class LeadEngine(RankEngine):
    """Rank 0's. Every method may raise RankLostError; then the engine has ended for good."""

    def __init__(self, leader: Leader, *parts: Any, **options: Any) -> None:
        super().__init__(leader, *parts, **options)
        self.leader = leader

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
        self.leader.tell(
            Add(request.arrival, request.prompt_ids, request.params, speculative, shape, request.states_seed)
        )
        return request

    def abort(self, request: Request) -> None:
        if not request.finished and self.leader.lost is None:
            self.leader.tell(Abort(request.arrival))
        super().abort(request)

    def set_shape(self, shape: DraftShape) -> None:
        super().set_shape(shape)
        self.leader.tell(Reshape(shape))

    def step(self) -> list[Request]:
        self.leader.tell(Step(written(self._running)))
        with self.leader.working():
            return super().step()

    def close(self) -> None:
        super().close()
        self.leader.close()


def engine_of(ranks: Ranks) -> Callable[..., Engine]:
    """What makes this rank's engine, with the arguments of Engine."""
    return partial(LeadEngine, ranks) if isinstance(ranks, Leader) else partial(RankEngine, ranks)


def obey(engine: Engine, next_order: Callable[[], Order]) -> None:
    """Do what rank 0 does, until it stops. Raises whatever a step raises."""
    assert isinstance(engine, RankEngine), "a rank has a RankEngine"
    requests: dict[int, Request] = {}
    while not isinstance(order := next_order(), Stop):
        match order:
            case Add(arrival, prompt_ids, params, speculative, shape, states_seed):
                requests[arrival] = engine.add_request(prompt_ids, params, speculative=speculative, shape=shape)
                requests[arrival].states_seed = states_seed
                assert requests[arrival].arrival == arrival, "the ranks count requests differently"
            case Abort(arrival):
                engine.abort(requests.pop(arrival))
            case Step(by_leader):
                engine.check_written(by_leader)
                for request in engine.step():
                    if request.finished:
                        requests.pop(request.arrival, None)
            case Reshape(shape):
                engine.set_shape(shape)
            case _:
                raise AssertionError(f"{order} came between rounds")
    engine.close()
