"""What a round is said to cost: measured where it ran, guessed elsewhere, and not thrown off by a busy moment."""

from __future__ import annotations

import pytest

from toolkit.infer.draft_tree import DraftShape
from toolkit.infer.drafters.step_costs import WINDOW, StepCosts

CHAIN_2, CHAIN_4 = DraftShape.chain(2), DraftShape.chain(4)


def test_nothing_is_said_before_there_is_something_to_go_by():
    """A choice from thin air would stick: the arm that looks slow is not run, so never measured."""
    costs = StepCosts()
    assert costs.seconds(1, None) is None and costs.seconds(1, CHAIN_4) is None
    costs.add(1, None, 0.0, 10.0)
    assert costs.seconds(1, None) == 10.0 and costs.seconds(1, CHAIN_4) is None


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
