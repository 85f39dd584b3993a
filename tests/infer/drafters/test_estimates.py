"""What adaptive drafting knows: acceptance by level, width and request, with the present counting more than the past;
and seconds, measured where an arm ran, guessed elsewhere, and not thrown off by a busy moment."""

from __future__ import annotations

import pytest

from toolkit.infer.drafters.estimates import WINDOW, RunningAcceptance, StepCosts
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

CHAIN_2 = DraftShape.chain(2)
CHAIN_4, TREE = DraftShape.chain(4), DraftShape(4, 4, 16)
SHAPES = [DraftShape.chain(1), CHAIN_4, DraftShape(4, 2, 8), TREE]


def new_request(**settings) -> Request:
    return Request([1], SamplingParams(), **settings)


def expected(acceptance: RunningAcceptance, requests: list[Request], shapes: list[DraftShape]) -> list[float]:
    """The accept_length of each shape, mean over the requests."""
    return [sum(lengths) / len(requests) for lengths in acceptance.by_request(requests, shapes)]


def test_a_tree_tells_what_narrower_shapes_would_have_got():
    """Level 1 always by the best child, level 2 always by the third, never a level 3: 1 + 1 for chains, 1 + 2 for the
    tree of width 4, and for width 2 nothing more than a chain."""
    acceptance, request = RunningAcceptance([1, 2, 4], 4), new_request()
    for _ in range(600):
        acceptance.add(request, TREE, [0, 2])
    # The guesses that the rates lean on still weigh 2 of 128 tries.
    assert expected(acceptance, [request], SHAPES) == pytest.approx([2, 2, 2, 3], abs=0.15)


def test_requests_start_from_the_engines_rates_and_go_their_own_ways():
    """A new request of a well-drafted server is drafted for at once; a hard one does not spoil an easy one."""
    acceptance = RunningAcceptance([1], 4)
    easy, hard = new_request(), new_request()
    for _ in range(200):
        acceptance.add(easy, CHAIN_4, [0] * 4)
        acceptance.add(hard, CHAIN_4, [])
    of_easy, of_hard, of_new = (expected(acceptance, [one], [CHAIN_4])[0] for one in (easy, hard, new_request()))
    assert of_hard < 1.35 < 2 < of_new < 3.2 < 4 < of_easy
    assert expected(acceptance, [easy, hard], [CHAIN_4])[0] == pytest.approx((of_easy + of_hard) / 2)


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
