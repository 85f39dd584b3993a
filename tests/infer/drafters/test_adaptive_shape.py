"""Which round is chosen: whatever takes least time a token in a world whose costs and acceptance a test scripts.

Seconds are scripted, never measured; one plain round takes about 1.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from toolkit.infer.drafters import adaptive
from toolkit.infer.drafters.adaptive import LOOKUP, PLAIN, PROBE_GAP, AdaptiveShape, Kind, Plan, spend
from toolkit.infer.drafters.estimates import WIDTHS, StepCosts
from toolkit.infer.request.draft_tree import DraftShape, smaller_shapes
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

TREE, CHAIN = DraftShape(5, 4, 16), DraftShape.chain(4)
PROBE_COST, READ_COST = 0.1, 0.018  # a probe, and each position a row that it reads, measured in plain rounds
Costs = Callable[[Plan, int], tuple[float, float]]


def usual_costs(plan: Plan, batch: int) -> tuple[float, float]:
    """A small CPU: a level costs 0.08, a node beyond the root 0.015."""
    return 0.0 if plan.shape is None else 0.02 + 0.08 * plan.shape.num_steps, 1.0 + 0.015 * (plan.width - 1)


def dear_costs(plan: Plan, batch: int) -> tuple[float, float]:
    """Bound by arithmetic: every node costs what a plain round costs."""
    return 0.0 if plan.shape is None else 0.05 + 0.08 * plan.shape.num_steps, float(plan.width)


def two_core_costs(plan: Plan, batch: int) -> tuple[float, float]:
    """16 rows on two cores: a node costs half a plain round."""
    return 0.0 if plan.shape is None else 0.03 * plan.shape.num_steps, 1.0 + 0.56 * (plan.width - 1)


def whole(shape: DraftShape | None) -> Plan:
    return Plan() if shape is None else Plan(shape, shape.num_draft_tokens)


@dataclass
class World:
    """best: chance that a level's best child is right. other: that else one of the next three is, each as likely. hard:
    rows whose drafts are never right.

    seconds, tokens: what the chosen rounds take and write a row in the mean; the chooser sees single, noisy rounds.
    """

    best: float
    other: float = 0.0
    costs: Costs = usual_costs
    noise: float = 0.0
    hard: tuple[int, ...] = ()
    random: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    tokens: float = 0.0
    probing: float = 0.0  # of the seconds
    unread: int = 0

    def play(self, chooser: AdaptiveShape, rounds: int, requests: list[Request] | None = None) -> Counter[Kind]:
        """Let it choose; returns how often each kind ran."""
        requests = [new_request()] if requests is None else requests
        ran: Counter[Kind] = Counter()
        for _ in range(rounds):
            plan = chooser.choose(requests)
            self.unread += 1
            if chooser.probe_due:
                self.probe(chooser, requests)
            elif plan.shape is not None:
                self.unread = 0
            ran[plan.kind] += 1
            kept = plan.kept or [10**6] * len(requests)
            ranks = [self.ranks(plan.shape, nodes - 1, row) for row, nodes in enumerate(kept)]
            chooser.record(requests, plan, ranks, *map(self.slowed, self.costs(plan, len(requests))))
            self.seconds += sum(self.costs(plan, len(requests)))
            self.tokens += self.length(plan.shape) if not plan.kept else 1 + sum(map(len, ranks)) / len(ranks)
        return ran

    def probe(self, chooser: AdaptiveShape, requests: list[Request]) -> None:
        """The head reads what waits; a few positions of each row are compared with what followed."""
        seen = min(self.unread - 1, max(1, 32 // len(requests)))
        wide = DraftShape(1, chooser.widest, chooser.widest + 1)
        found = [
            [(self.ranks(wide, 1, row) or [chooser.widest])[0] for _ in range(seen)] for row in range(len(requests))
        ]
        chooser.probed(requests, found)
        cost = PROBE_COST + READ_COST * self.unread
        self.seconds, self.probing, self.unread = self.seconds + cost, self.probing + cost, 0

    def length(self, shape: DraftShape | None) -> float:
        """Tokens of a row that keeps all."""
        if shape is None:
            return 1.0
        passed = self.best + (1 - self.best) * self.other * (min(shape.top_k, 4) - 1) / 3
        return sum(passed**level for level in range(shape.num_steps + 1))

    def ranks(self, shape: DraftShape | None, levels: int, row: int) -> list[int]:
        found: list[int] = []
        while shape is not None and row not in self.hard and len(found) < min(shape.num_steps, levels):
            if self.random.random() < self.best:
                found.append(0)
            elif (rank := self.random.randrange(1, 4)) < shape.top_k and self.random.random() < self.other:
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


# -- the spending ------------------------------------------------------------------------------------------------------


def chain_steps(*chances: float) -> list[tuple[int, float]]:
    """The steps of a chain by the chance of each level."""
    reached = itertools.accumulate(itertools.accumulate(chances, lambda a, b: a * b), initial=1.0)
    return list(enumerate(reached, start=1))[1:]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_spending_is_faster(packed, seed):
    """Against all numbers of nodes that up to four rows can have, for costs that grow evenly, late, or in steps."""
    dice = random.Random(seed)
    rows = [chain_steps(*(dice.uniform(0.1, 1.0) for _ in range(dice.randrange(5)))) for _ in range(1 + seed % 4)]
    price = dice.uniform(0.02, 0.6)
    cost = {width: 1 + price * max(0, width - 1 - seed % 3) + 0.3 * (width > 2.4) for width in WIDTHS if width <= 8}
    if not packed:
        cost = {width: seconds for width, seconds in cost.items() if width == int(width)}

    def speed(counts: tuple[int, ...]) -> float:
        width = sum(counts) / len(counts) if packed else max(counts)
        lengths = [dict(steps).get(count, 1.0) for steps, count in zip(rows, counts, strict=True)]
        seconds = next(cost[one] for one in sorted(cost) if one >= width)
        return len(rows) / sum(1 / length for length in lengths) / seconds

    every = itertools.product(*(range(1, len(steps) + 2) for steps in rows))
    spent = zip(cost, spend(rows, cost, packed=packed), strict=False)
    best, counts = max((length / cost[width], counts) for width, (counts, length) in spent)
    assert best == pytest.approx(max(map(speed, every))) and speed(tuple(counts)) == pytest.approx(best)


@pytest.mark.parametrize(("packed", "kept"), [(True, {0: 5, 1: 1, 2: 1, 3: 1}), (False, {0: 5, 1: 5, 2: 5, 3: 5})])
def test_nodes_go_to_the_rows_that_gain_by_them(packed, kept):
    """One easy row of four. Without padding it alone drafts, at the cost of its nodes; with padding all rows do, for
    the others' nodes cost nothing more."""
    chooser = AdaptiveShape(CHAIN)
    chooser.packed = packed
    world, requests = World(1.0, hard=(1, 2, 3)), [new_request() for _ in range(4)]
    for shape in (CHAIN, DraftShape.chain(1)):
        for _ in range(40):
            ranks = [world.ranks(shape, 4, row) for row in range(4)]
            chooser.record(requests, whole(shape), ranks, 0.34, 1.0 + 0.08 * shape.num_steps)
            chooser.record(requests, Plan(), [[]] * 4, 0.0, 1.0)
    plan = chooser._plans(requests, ())[CHAIN]
    assert {row: (plan.kept or [CHAIN.num_draft_tokens] * 4)[row] for row in range(4)} == kept
    assert plan.width == (2 if packed else 5)


@pytest.mark.parametrize("packed", [True, False])
def test_lookup_and_the_head_share_the_budget(packed):
    """Rows with a sure match have lookup's draft, the others the head's; if no row is left to the head, it rests."""
    known = StepCosts()
    known.add(4, None, 1, 0.0, 1.0)
    known.add(4, CHAIN, 5, 0.1, 1.2)
    requests, found = [new_request() for _ in range(4)], [1.0, 1.9, 2.8, 3.7, 4.6]
    chooser = AdaptiveShape(CHAIN, known)
    chooser.packed, chooser._credit = packed, -10.0  # no trials
    for _ in range(50):
        chooser.record(requests, whole(CHAIN), [[0, 0]] * 4, 0.1, 1.2)
    plan = chooser.choose(requests, [found, found, [1.0], [1.0, 1.1]])
    assert isinstance(plan.shape, DraftShape) and plan.depths[0] == plan.depths[1] >= 3 and plan.depths[2:] == (0, 0)
    assert plan.kept == () or (plan.kept[:2] == (1, 1) and min(plan.kept[2:]) >= 3)
    plan = chooser.choose(requests, [found] * 4)
    assert plan.kind == LOOKUP and min(plan.depths) >= 3 and plan.kept == ()


def test_shapes_to_choose_from():
    """All fit in the largest, none comes twice, a chain of 1 is there, and they are few enough to keep measured."""
    for limit in map(DraftShape.parse, ("20,1,21", "5,4,3")):
        shapes = smaller_shapes(limit)
        assert shapes[0] == limit and DraftShape.chain(1) in shapes
        assert all(shape.fits_in(limit) for shape in shapes)
        assert len(set(shapes)) == len(shapes) <= 12


# -- rounds ------------------------------------------------------------------------------------------------------------


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
    """Few nodes first, in doublings: after 25 rounds it is at most 20 % behind the best shape."""
    chooser, world, requests = AdaptiveShape(TREE), World(0.8, other=0.5), [new_request() for _ in range(batch)]
    assert world.play(chooser, 25, requests)[PLAIN] <= (12 if batch == 1 else 3)  # alone, one bad probe may come first
    world.seconds = world.tokens = 0.0
    assert world.play(chooser, 40, requests)[PLAIN] <= 1
    assert world.seconds / world.tokens < 1.2 * sum(usual_costs(whole(TREE), batch)) / world.length(TREE)


@pytest.mark.parametrize("best", [0.0, 0.8])
@pytest.mark.parametrize(("most", "noise"), [(CHAIN, 0.3), (TREE, 0.0)])
def test_never_slower_and_close_to_the_best_shape(best, most, noise):
    """Whatever the head is worth, on a noisy machine too: at most 3 % slower than plain decoding, and at most 8 %
    (15 % on the noisy one) behind the best of its shapes, which it was not told."""
    chooser, world = AdaptiveShape(most), World(best, other=0.3, noise=noise)
    world.play(chooser, 3000)
    alone = [sum(usual_costs(whole(shape), 1)) / world.length(shape) for shape in (None, *smaller_shapes(most))]
    assert world.seconds / world.tokens < 1.03 * alone[0]
    assert world.seconds / world.tokens < (1.08 if noise == 0 else 1.15) * min(alone)


def test_it_follows_a_text_that_changes():
    """Useless, then good, then useless again, inside one request: it starts within 150 rounds and stops within 100."""
    chooser, world, requests = AdaptiveShape(CHAIN), World(best=0.0), [new_request()]
    world.play(chooser, 400, requests)
    world.best = 0.8
    world.play(chooser, 150, requests)
    good = world.play(chooser, 100, requests)
    assert good[CHAIN] + good[DraftShape.chain(3)] > 75
    world.best = 0.0
    world.play(chooser, 100, requests)
    assert world.play(chooser, 100, requests)[PLAIN] > 80


def test_where_lookup_ends_the_head_drafts_at_once():
    """The text repeats itself for a hundred rounds, in which shapes are compared ever more rarely; then it is new."""
    chooser, world, requests = AdaptiveShape(TREE), World(best=0.8), [new_request()]
    world.play(chooser, 120, requests)
    for _ in range(100):
        plan = chooser.choose(requests, [[1.0 + depth for depth in range(12)]])
        if chooser.probe_due:
            chooser.probed(requests, [[0] * 4])
        chooser.record(requests, plan, [[0] * 4], *usual_costs(plan, 1))
    assert plan.kind == LOOKUP
    assert world.play(chooser, 5, requests)[PLAIN] <= 1  # a probe, as the head has rested


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_of_new_rows_that_drafts_do_not_pay_for(packed):
    """Batches of 16 new rows and 31 rounds, where a node costs half a plain round: at most 1.5 % is lost. Where nearly
    all drafts are right they pay, and that is noticed; without padding half of the rows with easy texts suffice."""
    chooser, world = AdaptiveShape(DraftShape.chain(3)), World(0.45, costs=two_core_costs, noise=0.1)
    chooser.packed = packed
    for _ in range(40):
        world.unread = 0
        world.play(chooser, 31, [new_request() for _ in range(16)])
    assert world.seconds < 1.015 * world.tokens
    world.best, requests = 0.97, [new_request() for _ in range(16)]
    world.play(chooser, 300, requests)
    assert world.play(chooser, 62, requests)[PLAIN] < 20


def test_another_number_of_threads_neither_ends_nor_delays_drafting(monkeypatch):
    """Beside the plain rounds of before, each draft would look slow with fewer threads: all rounds take longer."""
    world, threads = World(0.6), [2]
    monkeypatch.setattr(adaptive, "get_num_threads", lambda: threads[0])
    chooser = AdaptiveShape(TREE)
    assert world.play(chooser, 400)[PLAIN] < 100
    world.costs = lambda plan, batch: tuple(1.7 * part for part in usual_costs(plan, batch))  # type: ignore[assignment]
    threads[0] = 1
    assert world.play(chooser, 60)[PLAIN] < 6
    world.costs, threads[0] = usual_costs, 2
    assert world.play(chooser, 60)[PLAIN] < 6
