"""Drafting by the number of running rows, as a search found; the tokens stay those of plain decoding."""

from __future__ import annotations

from functools import partial

import pytest

from toolkit.infer.drafters.adaptive import AdaptiveShape
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.search_file import GREEDY, SAMPLED, Winners
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

MOST = DraftShape(4, 3, 12)
TREE, CHAIN = DraftShape(2, 3, 6), DraftShape.chain(3)
BY_ROWS = {1: "2,3,6", 2: "plain", 4: "3,1,4", 5: "adaptive"}
WINNERS = {GREEDY: BY_ROWS, SAMPLED: BY_ROWS}
PROMPTS = [[5, 9, 1, 7], [3, 2], [17, 4, 4, 8, 1], [9, 9, 2], [6, 1, 3], [8, 2, 5, 5, 1, 1]]


@pytest.mark.parametrize(("name", "lookup"), [("eagle3", None), ("mtp", True)])
def test_each_round_drafts_the_winner_of_its_number_of_rows(small_target, build, name, lookup):
    """fp32, exact, rows that end while others run: five and six rows are chosen adaptively, then the winners follow.
    The row with a shape of its own drafts no more than that, and lookup replaces no winner."""
    params = [
        SamplingParams(max_tokens=8 + 5 * i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(6)
    ]
    plain = [one.output_ids for one in Engine(small_target).generate(PROMPTS, params)]
    engine = Engine(small_target, build(name), MOST, max_running_requests=6, adaptive=True, lookup=lookup)
    engine.drafter.choose_by(partial(AdaptiveShape, fixed=Winners(WINNERS, MOST)))
    chooser, seen = engine.drafter.chooser, []
    choose = chooser.choose
    chooser.choose = lambda requests, lookup=(): seen.append((len(requests), choose(requests, lookup))) or seen[-1][1]
    own = DraftShape.chain(1)
    requests = [
        engine.add_request(ids, one, shape=own if i == 5 else None)
        for i, (ids, one) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    assert [one.output_ids for one in requests] == plain
    found = {rows: {plan.shape for size, plan in seen if size == rows} for rows in (1, 2, 3, 4)}
    assert found == {1: {TREE}, 2: {None}, 3: {CHAIN}, 4: {CHAIN}} and {5, 6} <= {rows for rows, _ in seen}
    assert not any(any(plan.depths) for rows, plan in seen if rows < 5)
    alone = requests[5].events[-2:]
    assert 0 < max(event.offered for event in alone) <= 1, "its own shape is a chain of 1"
    assert max(event.offered for event in requests[4].events) > 1
