"""Adaptive drafting of many rows on a small CPU, where no head pays: what looking for a gain may cost there.

Seconds are scripted, as in test_adaptive_shape.py.
"""

from __future__ import annotations

import pytest

from tests.infer.drafters.test_adaptive_shape import World, new_request, usual_costs
from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.drafters.step_costs import Arm
from toolkit.infer.request.draft_tree import DraftShape


def two_core_costs(arm: Arm, batch: int) -> tuple[float, float]:
    """16 rows on two cores: a node costs half a plain round, so a chain pays only if nearly all of it is accepted."""
    return (0.0, 1.0) if arm is None else (0.03 * arm.num_steps, 1.0 + 0.56 * (arm.num_draft_tokens - 1))


@pytest.mark.parametrize("best", [0.2, 0.35, 0.45])
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


def test_the_first_round_with_more_rows_is_plain():
    """A draft that costs one row little costs 16 rows much: without a plain round beside it, that would not be seen."""

    def costs(arm: Arm, batch: int) -> tuple[float, float]:
        return usual_costs(arm, 1) if batch == 1 else two_core_costs(arm, batch)

    chooser, world = AdaptiveShape(DraftShape.chain(3)), World(best=0.5, costs=costs)
    assert world.play(chooser, 60)[None] < 20
    many = [new_request() for _ in range(16)]
    assert world.play(chooser, 1, many)[None] == 1
    assert world.play(chooser, 30, many)[None] >= 28
