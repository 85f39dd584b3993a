"""What a round is said to cost: measured where it ran, guessed elsewhere, and not thrown off by a busy moment."""

from __future__ import annotations

import pytest

from toolkit.infer.drafters.step_costs import LEVEL_GUESS, WINDOW, StepCosts
from toolkit.infer.request.draft_tree import DraftShape

CHAIN_2, CHAIN_4 = DraftShape.chain(2), DraftShape.chain(4)
SMALLER = [DraftShape.chain(depth) for depth in (1, 2, 3)]


def test_before_anything_was_drafted_the_most_that_it_can_cost_is_expected():
    """n nodes are verified in n plain rounds. Only the smallest shape is let run by such a guess."""
    costs = StepCosts()
    costs.add(1, None, 0.0, 10.0)
    found = costs.all(1, (None, *SMALLER, CHAIN_4))
    assert found == {None: 10.0, DraftShape.chain(1): pytest.approx(20.0 + 10.0 * LEVEL_GUESS)}


@pytest.mark.parametrize(("ran", "allowed"), [
    ([None], [2]), ([2], [2, 3]), ([2, 3], [2, 3, 5]), ([5], [2, 3, 5, 9]), ([9], [2, 3, 5, 9, 30]),
])  # fmt: skip
def test_larger_shapes_come_by_doublings(ran, allowed):
    """Of twice the nodes that ran at this size of batch, or else the next larger one; other sizes do not count."""
    arms = {
        2: DraftShape.chain(1),
        3: CHAIN_2,
        5: CHAIN_4,
        9: DraftShape(2, 4, 9),
        30: DraftShape(8, 4, 30),
        None: None,
    }
    costs = StepCosts()
    costs.add(8, arms[30], 1.0, 20.0)
    costs.add(8, None, 0.0, 10.0)
    for nodes in ran:
        costs.add(1, arms[nodes], 0.0, 10.0)
    assert list(costs.all(1, list(arms.values()))) == [*(arms[nodes] for nodes in allowed), None]


def test_one_round_that_was_held_up_does_not_end_drafting():
    """Two nodes take at most two plain rounds, and a level no longer than a plain round, whatever a clock said once."""
    costs = StepCosts()
    costs.add(1, None, 0.0, 10.0)
    costs.add(1, DraftShape.chain(1), 700.0, 900.0)
    assert costs.seconds(1, DraftShape.chain(1)) == 30.0


def test_a_busy_moment_does_not_count_and_a_lasting_change_does():
    """One round in ten that takes ten times as long must not make an arm look slow."""
    costs = StepCosts()
    for i in range(30):
        costs.add(1, None, 0.0, 100.0 if i % 10 == 5 else 10.0)
        assert costs.seconds(1, None) == 10.0
    for _ in range(WINDOW):
        costs.add(1, None, 0.0, 14.0)
    assert costs.seconds(1, None) == 14.0


def test_shapes_that_did_not_run_are_guessed_from_one_that_did():
    """Levels cost drafting, nodes beyond the root cost verifying; what is measured then replaces the guess."""
    costs = StepCosts()
    costs.add(1, None, 0.0, 10.0)
    costs.add(1, CHAIN_4, 4.0, 12.0)
    assert costs.seconds(1, CHAIN_2) == pytest.approx(2.0 + 11.0)
    assert costs.seconds(1, DraftShape(2, 4, 9)) == pytest.approx(2.0 + 14.0)
    costs.add(1, CHAIN_2, 5.0, 15.0)
    assert costs.seconds(1, CHAIN_2) == 20.0 and costs.seconds(1, CHAIN_4) == 16.0


def test_a_draft_never_looks_free():
    """Noise may make verifying five nodes look faster than one; a useless head would then be tried all the time."""
    costs = StepCosts()
    costs.add(1, CHAIN_4, 1.0, 8.0)
    assert costs.seconds(1, CHAIN_4) == 9.0
    costs.add(1, None, 0.0, 10.0)
    assert costs.seconds(1, CHAIN_4) == 11.0


def test_another_size_of_batch_is_scaled_by_what_both_have_run():
    """A new size must not be explored from nothing, and must not inherit the seconds of another size."""
    costs = StepCosts()
    costs.add(4, None, 0.0, 10.0)
    costs.add(4, CHAIN_4, 4.0, 12.0)
    assert costs.seconds(3, CHAIN_4) == 16.0  # sizes 3 and 4 are one
    assert costs.seconds(16, CHAIN_4) == 16.0
    costs.add(16, None, 0.0, 20.0)
    assert costs.seconds(16, CHAIN_4) == pytest.approx(32.0)
    assert costs.seconds(1, None) == 10.0, "the nearest size"


def test_a_draft_measured_in_a_busy_time_is_compared_with_the_plain_rounds_of_that_time():
    """All takes twice as long for a while, and a chain is tried just then: later it costs 1.5 plain rounds, not 3."""
    costs = StepCosts()
    for _ in range(WINDOW):
        costs.add(1, None, 0.0, 20.0)
    costs.add(1, CHAIN_2, 4.0, 26.0)
    assert costs.seconds(1, CHAIN_2) == 30.0
    for _ in range(WINDOW):
        costs.add(1, None, 0.0, 10.0)
    assert costs.seconds(1, CHAIN_2) == pytest.approx(15.0)


def test_plain_rounds_of_long_ago_say_nothing_of_a_draft():
    """The last plain round lies WINDOW drafts back: what the chain costs stands as measured, whatever they took."""
    costs = StepCosts()
    costs.add(1, None, 0.0, 10.0)
    for _ in range(3 * WINDOW):
        costs.add(1, CHAIN_2, 4.0, 26.0)
    for _ in range(WINDOW):
        costs.add(1, None, 0.0, 20.0)
    assert costs.seconds(1, CHAIN_2) == 30.0


def test_plain_rounds_measured_again_rescale_all_arms():
    """With half of the threads all rounds take longer. The times of before say how much a draft adds to a plain one."""
    costs = StepCosts()
    costs.add(1, CHAIN_4, 1.0, 12.0)  # before any plain round
    costs.add(1, None, 0.0, 10.0)
    costs.add(1, CHAIN_2, 1.0, 11.0)
    costs.add(4, None, 0.0, 15.0)  # nothing was drafted for so many
    costs.forget_plain()
    assert costs.needs_plain(1) and costs.needs_plain(4)
    costs.add(1, None, 0.0, 20.0)
    assert costs.all(1, (None, CHAIN_2, CHAIN_4)) == {None: 20.0, CHAIN_2: 24.0, CHAIN_4: 26.0}
    assert costs.all(4, (None,)) == {None: 20.0} and not costs.needs_plain(1) and costs.needs_plain(4)
