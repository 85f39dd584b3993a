"""What adaptive drafting knows: acceptance by level, width and request, with the present counting more than the past;
and seconds, measured where a part ran, guessed elsewhere, and not thrown off by a busy moment."""

from __future__ import annotations

import pytest

from toolkit.infer.drafters.estimates import WINDOW, RunningAcceptance, StepCosts
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

CHAIN_2, CHAIN_4, TREE = DraftShape.chain(2), DraftShape.chain(4), DraftShape(4, 4, 16)


def new_request(**settings) -> Request:
    return Request([1], SamplingParams(), **settings)


def lengths(acceptance: RunningAcceptance, requests: list[Request], shapes: list[DraftShape]) -> list[float]:
    """The accept_length of each whole shape, mean over the requests."""
    return [sum(steps[-1][1] for steps in rows) / len(requests) for rows in acceptance.steps(requests, shapes)]


def test_a_tree_tells_what_narrower_shapes_would_have_got():
    """Level 1 always by the best child, level 2 always by the third, never a level 3: 1 + 1 for chains, 1 + 2 for the
    tree of width 4, and for width 2 nothing more than a chain. A chain can be cut, a tree cannot."""
    acceptance, request = RunningAcceptance([1, 2, 4], 4), new_request()
    for _ in range(600):
        acceptance.add(request, [0, 2], 4, 4)
    # The guesses that the rates lean on still weigh 2 of 128 tries.
    shapes = [DraftShape.chain(1), CHAIN_4, DraftShape(4, 2, 8), TREE]
    assert lengths(acceptance, [request], shapes) == pytest.approx([2, 2, 2, 3], abs=0.15)
    own = new_request(shape=CHAIN_2)
    nodes = [[count for count, _ in rows[0]] for rows in acceptance.steps([own], shapes)]
    assert nodes == [[2], [2, 3], [2, 3], [2, 3]]
    assert acceptance.steps([new_request(speculative=False)], [TREE]) == [[[]]]


def test_trees_of_other_numbers_of_nodes_are_told_apart():
    """Two trees of the same levels and width: the rates, which they share, are those of neither."""
    acceptance, request, large = RunningAcceptance([1, 4], 4), new_request(), DraftShape(4, 4, 40)
    for _ in range(200):
        acceptance.add(request, [0], 4, 4, TREE)
        acceptance.add(request, [0, 1, 0], 4, 4, large)
    assert lengths(acceptance, [request], [TREE, large]) == pytest.approx([2, 4], abs=0.2)


def test_requests_start_from_the_engines_rates_and_go_their_own_ways():
    """A new request of a well-drafted server is drafted for at once; a hard one does not spoil an easy one."""
    acceptance = RunningAcceptance([1], 4)
    easy, hard = new_request(), new_request()
    for _ in range(200):
        acceptance.add(easy, [0] * 4, 4, 1)
        acceptance.add(hard, [], 4, 1)
    of_easy, of_hard, of_new = (lengths(acceptance, [one], [CHAIN_4])[0] for one in (easy, hard, new_request()))
    assert of_hard < 1.35 < 2 < of_new < 3.2 < 4 < of_easy


def test_a_draft_measured_in_a_busy_time_is_compared_with_the_plain_rounds_of_that_time():
    """All takes twice as long for a while, and a chain is tried just then: later it costs 1.5 plain rounds, not 3."""
    costs = StepCosts()
    for _ in range(WINDOW):
        costs.add(1, None, 1, 0.0, 20.0)
    costs.add(1, CHAIN_2, 3, 4.0, 26.0)
    assert costs.draft(1, [CHAIN_2]) == [4.0] and costs.verify(1, [])[3] == 26.0
    for _ in range(WINDOW):
        costs.add(1, None, 1, 0.0, 10.0)
    assert costs.draft(1, [CHAIN_2]) == [2.0] and costs.verify(1, [])[3] == 13.0


def test_times_that_were_not_measured():
    """Between two widths, beyond the last one, at another batch size; never below a plain round, never more than a
    plain round a node."""
    costs = StepCosts()
    costs.add(1, None, 1, 0.0, 10.0)
    assert costs.verify(1, []) == {1: 10, 1.25: 12.5, 1.5: 15, 2: 20} and costs.draft(1, [CHAIN_2]) == [2.0]
    assert max(costs.verify(1, [12])) == 12, "the next shape, however large"
    costs.add(1, CHAIN_2, 3, 2.0, 14.0)
    verify = costs.verify(1, [])
    assert (verify[2], verify[3], verify[6], max(verify)) == (12, 14, 20, 6) and costs.draft(1, [CHAIN_4]) == [4.0]
    costs.add(1, None, 6, 0.5, 5.0)
    costs.add(16, None, 1, 0.0, 20.0)
    assert costs.verify(1, [])[6] == 10 and costs.verify(16, [16])[3] == 28 and costs.draft(16, [CHAIN_2]) == [4.0]
