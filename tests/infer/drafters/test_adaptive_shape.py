"""Which shape is drafted: whatever writes most tokens a second in a world whose costs and acceptance a test scripts.

Seconds are scripted, never measured; one plain round takes about 1.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from toolkit.infer.drafters import adaptive
from toolkit.infer.drafters.adaptive import PROBE_GAP, AdaptiveShape, smaller_shapes
from toolkit.infer.drafters.estimates import Arm
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

TREE = DraftShape(5, 4, 16)
PROBE_COST, READ_COST = 0.1, 0.018  # a probe, and each position a row that it reads, measured in plain rounds


def usual_costs(arm: Arm, batch: int) -> tuple[float, float]:
    """A small CPU: a level costs 0.08, a node beyond the root 0.015."""
    return (0.0, 1.0) if arm is None else (0.02 + 0.08 * arm.num_steps, 1.0 + 0.015 * (arm.num_draft_tokens - 1))


@dataclass
class World:
    """best: chance that a level's best child is right. other: that else one of the next three is, each as likely.

    seconds, tokens: what the chosen arms take and write in the mean; the chooser sees single, noisy rounds.
    """

    best: float
    other: float = 0.0
    costs: Callable[[Arm, int], tuple[float, float]] = usual_costs
    noise: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    tokens: float = 0.0
    probing: float = 0.0  # of the seconds
    unread: int = 0

    def play(self, chooser: AdaptiveShape, rounds: int, requests: list[Request] | None = None) -> Counter[Arm]:
        """Let it choose; returns how often each arm ran."""
        requests = [new_request()] if requests is None else requests
        ran: Counter[Arm] = Counter()
        for _ in range(rounds):
            arm = chooser.choose(requests)
            self.unread += 1
            if chooser.probe_due:
                self.probe(chooser, requests)
            elif arm is not None:
                self.unread = 0
            ran[arm] += 1
            ranks = [self.ranks(arm) for _ in requests]
            draft, verify = (self.slowed(part) for part in self.costs(arm, len(requests)))
            chooser.record(requests, arm, ranks, draft, verify)
            self.seconds += sum(self.costs(arm, len(requests)))
            self.tokens += self.length(arm)
        return ran

    def probe(self, chooser: AdaptiveShape, requests: list[Request]) -> None:
        """The head reads what waits; a few positions of each row are compared with what followed."""
        seen = min(self.unread - 1, max(1, 32 // len(requests)))
        wide = DraftShape(1, chooser.widest, chooser.widest + 1)
        found = [[(self.ranks(wide) or [chooser.widest])[0] for _ in range(seen)] for _ in requests]
        chooser.probed(requests, found)
        cost = PROBE_COST + READ_COST * self.unread
        self.seconds, self.probing, self.unread = self.seconds + cost, self.probing + cost, 0

    def length(self, arm: Arm) -> float:
        """Tokens a row in the mean."""
        if arm is None:
            return 1.0
        passed = self.best + (1 - self.best) * self.other * (min(arm.top_k, 4) - 1) / 3
        return sum(passed**level for level in range(arm.num_steps + 1))

    def ranks(self, arm: Arm) -> list[int]:
        found: list[int] = []
        while arm is not None and len(found) < arm.num_steps:
            if self.random.random() < self.best:
                found.append(0)
            elif (rank := self.random.randrange(1, 4)) < arm.top_k and self.random.random() < self.other:
                found.append(rank)
            else:
                break
        return found

    def slowed(self, seconds: float) -> float:
        """A machine that others use too: some spread, and one round in twenty that takes much longer."""
        if self.noise == 0:
            return seconds
        busy = 4.0 if self.random.random() < 0.05 else 1.0
        return seconds * busy * (1 + self.noise * self.random.random())


def new_request(**settings) -> Request:
    return Request([1], SamplingParams(), **settings)


def dear_costs(arm: Arm, batch: int) -> tuple[float, float]:
    """Bound by arithmetic: every node costs what a plain round costs."""
    return (0.0, 1.0) if arm is None else (0.05 + 0.08 * arm.num_steps, float(arm.num_draft_tokens))


@pytest.mark.parametrize(
    ("most", "costs", "batch", "best"),
    [
        (DraftShape.chain(1), usual_costs, 1, 0.02),
        (DraftShape.chain(16), dear_costs, 16, 0.0),
        (TREE, usual_costs, 16, 0.0),
    ],
)
def test_a_useless_head_costs_less_than_three_percent_of_128_rounds(most, costs, batch, best):
    """The start of the engine included, and of the next 2872 too; yet the head goes on being looked at."""
    chooser, world, requests = AdaptiveShape(most), World(best, costs=costs), [new_request() for _ in range(batch)]
    world.play(chooser, 128, requests)
    assert world.seconds < 1.03 * world.tokens
    before = world.probing
    world.seconds = world.tokens = 0.0
    world.play(chooser, 2872, requests)
    assert world.seconds < 1.03 * world.tokens
    assert world.probing - before > 2872 / PROBE_GAP * PROBE_COST * 0.9


@pytest.mark.parametrize("batch", [1, 16])
def test_a_good_head_drafts_from_the_first_rounds_on(batch):
    """Small shapes first, in doublings: after 25 rounds it is at most 20 % behind the best shape."""
    chooser, world, requests = AdaptiveShape(TREE), World(0.8, other=0.5), [new_request() for _ in range(batch)]
    assert world.play(chooser, 25, requests)[None] <= (12 if batch == 1 else 3)  # alone, one bad probe may come first
    world.seconds = world.tokens = 0.0
    assert world.play(chooser, 40, requests)[None] <= 1
    assert world.seconds / world.tokens < 1.2 * sum(usual_costs(TREE, batch)) / world.length(TREE)


@pytest.mark.parametrize("best", [0.0, 0.8])
@pytest.mark.parametrize(("most", "noise"), [(DraftShape.chain(4), 0.3), (TREE, 0.0)])
def test_never_slower_and_close_to_the_best_shape(best, most, noise):
    """Whatever the head is worth, on a noisy machine too: at most 3 % slower than plain decoding, and at most 8 %
    (15 % on the noisy one) behind the best of its shapes, which it was not told."""
    chooser, world = AdaptiveShape(most), World(best, other=0.3, noise=noise)
    world.play(chooser, 3000)
    alone = [sum(usual_costs(arm, 1)) / world.length(arm) for arm in (None, *smaller_shapes(most))]
    assert world.seconds / world.tokens < 1.03 * alone[0]
    assert world.seconds / world.tokens < (1.08 if noise == 0 else 1.15) * min(alone)


def test_it_follows_a_text_that_changes():
    """Useless, then good, then useless again, inside one request: it starts within 150 rounds and stops within 100."""
    chooser, world, requests = AdaptiveShape(DraftShape.chain(4)), World(best=0.0), [new_request()]
    world.play(chooser, 400, requests)
    world.best = 0.8
    world.play(chooser, 150, requests)
    good = world.play(chooser, 100, requests)
    assert good[DraftShape.chain(4)] + good[DraftShape.chain(3)] > 75
    world.best = 0.0
    world.play(chooser, 100, requests)
    assert world.play(chooser, 100, requests)[None] > 80


@pytest.mark.parametrize("most", ["20,1,21", "5,4,3"])
def test_shapes_to_choose_from(most):
    """All fit in the largest, none comes twice, a chain of 1 is there, and they are few enough to keep measured."""
    limit = DraftShape.parse(most)
    shapes = smaller_shapes(limit)
    assert shapes[0] == limit and DraftShape.chain(1) in shapes
    assert all(shape.fits_in(limit) for shape in shapes)
    assert len(set(shapes)) == len(shapes) <= 12


def test_another_number_of_threads_neither_ends_nor_delays_drafting(monkeypatch):
    """Beside the plain rounds of before, each draft would look slow with fewer threads: all rounds take longer."""
    world, threads = World(0.45), [2]
    monkeypatch.setattr(adaptive, "get_num_threads", lambda: threads[0])
    chooser = AdaptiveShape(TREE)
    assert world.play(chooser, 400)[None] < 100
    world.costs = lambda arm, batch: tuple(1.7 * part for part in usual_costs(arm, batch))  # type: ignore[assignment]
    threads[0] = 1
    slower = world.play(chooser, 60)
    assert slower[None] < 6
    world.costs, threads[0] = usual_costs, 2
    assert world.play(chooser, 60)[None] < 6


def two_core_costs(arm: Arm, batch: int) -> tuple[float, float]:
    """16 rows on two cores: a node costs half a plain round, so a chain pays only if nearly all of it is accepted."""
    return (0.0, 1.0) if arm is None else (0.03 * arm.num_steps, 1.0 + 0.56 * (arm.num_draft_tokens - 1))


@pytest.mark.parametrize("best", [0.2, 0.45])
def test_new_rows_hasten_no_probe_of_a_head_that_is_far_from_paying(best):
    """Batches of 16 new rows and 31 rounds: a probe or two in each would cost more than all trials together."""
    chooser, world = AdaptiveShape(DraftShape.chain(3)), World(best, costs=two_core_costs, noise=0.1)
    for _ in range(40):
        world.unread = 0
        world.play(chooser, 31, [new_request() for _ in range(16)])
    assert 0 < world.probing < 0.008 * world.seconds
    assert world.seconds < 1.013 * world.tokens
    world.best = 0.97  # then it pays, and that is noticed
    world.play(chooser, 150, [new_request() for _ in range(16)])
    assert world.play(chooser, 62, [new_request() for _ in range(16)])[None] < 20
