"""Acceptance as it runs: by level, by width, by request, and with the present counting more than the past."""

from __future__ import annotations

import pytest

from toolkit.infer.drafters.running_acceptance import RunningAcceptance
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

CHAIN_4, TREE = DraftShape.chain(4), DraftShape(4, 4, 16)
SHAPES = [DraftShape.chain(1), CHAIN_4, DraftShape(4, 2, 8), TREE]


def new_request(**settings) -> Request:
    return Request([1], SamplingParams(), **settings)


def test_a_tree_tells_what_narrower_shapes_would_have_got():
    """Level 1 always by the best child, level 2 always by the third, never a level 3: 1 + 1 for chains, 1 + 2 for the
    tree of width 4, and for width 2 nothing more than a chain."""
    acceptance, request = RunningAcceptance([1, 2, 4], 4), new_request()
    for _ in range(600):
        acceptance.add(request, TREE, [0, 2])
    # The guesses that the rates lean on still weigh 2 of 128 tries.
    assert acceptance.expected([request], SHAPES) == pytest.approx([2, 2, 2, 3], abs=0.15)


def test_chains_keep_the_best_childs_rate_of_trees_up_to_date():
    """What chains say must move the estimate of trees, and leave alone what only trees can say."""
    acceptance, request = RunningAcceptance([1, 4], 4), new_request()
    for _ in range(300):
        acceptance.add(request, TREE, [1])
    assert acceptance.expected([request], [TREE])[0] == pytest.approx(2, abs=0.15)
    for _ in range(600):
        acceptance.add(request, CHAIN_4, [0] * 4)
    assert acceptance.expected([request], [TREE])[0] > 4.5
    for _ in range(600):
        acceptance.add(request, CHAIN_4, [])
    assert acceptance.expected([request], [CHAIN_4])[0] == pytest.approx(1, abs=0.1)
    assert acceptance.expected([request], [TREE])[0] > 1.8, "at level 1 the second child was always right"


def test_levels_that_were_never_reached_are_guessed_from_those_above():
    """Else a chain of 1 would never grow, or an unknown level would draw a useless head into deep drafts."""
    acceptance, request = RunningAcceptance([1], 4), new_request()
    for _ in range(300):
        acceptance.add(request, DraftShape.chain(1), [0])
    assert acceptance.expected([request], [CHAIN_4])[0] > 4.5
    for _ in range(600):
        acceptance.add(request, DraftShape.chain(1), [])
    assert acceptance.expected([request], [CHAIN_4])[0] < 1.1


def test_requests_start_from_the_engines_rates_and_go_their_own_ways():
    """A new request of a well-drafted server is drafted for at once; a hard one does not spoil an easy one."""
    acceptance = RunningAcceptance([1], 4)
    easy, hard = new_request(), new_request()
    for _ in range(200):
        acceptance.add(easy, CHAIN_4, [0] * 4)
        acceptance.add(hard, CHAIN_4, [])
    of_easy, of_hard, of_new = (acceptance.expected([one], [CHAIN_4])[0] for one in (easy, hard, new_request()))
    assert of_hard < 1.35 < 2 < of_new < 3.2 < 4 < of_easy
    assert acceptance.expected([easy, hard], [CHAIN_4])[0] == pytest.approx((of_easy + of_hard) / 2)


def test_rows_with_shapes_of_their_own():
    """A plain row commits one token whatever is drafted beside it; a row with a small shape no more than that holds."""
    acceptance, trained = RunningAcceptance([1, 4], 4), new_request()
    for _ in range(600):
        acceptance.add(trained, TREE, [0] * 4)
    plain, short = new_request(speculative=False), new_request(shape=DraftShape.chain(1))
    assert acceptance.expected([plain], SHAPES) == [1.0] * 4
    assert acceptance.expected([short], [TREE])[0] == pytest.approx(2, abs=0.1)


def test_probes_count_for_the_first_level_and_all_widths():
    """The right token was second of four in every probe: a chain gets nothing, a tree of width 2 its first level and,
    where nobody ever was, as much on the next."""
    acceptance, request = RunningAcceptance([1, 2, 4], 4), new_request()
    acceptance.expected([request], SHAPES)
    assert acceptance.known_share([request]) == 0
    for _ in range(40):
        acceptance.probe(request, [1] * 16)
    assert acceptance.known_share([request, new_request(), new_request(speculative=False), request]) == 0.75
    one, four, narrow, _ = acceptance.expected([request], SHAPES)
    assert (one, four) == (pytest.approx(1, abs=0.05), pytest.approx(1, abs=0.05)) and narrow > 4
    for _ in range(40):
        acceptance.probe(request, [4] * 16)  # not among the four
    assert acceptance.expected([request], SHAPES) == pytest.approx([1, 1, 1, 1], abs=0.15)
