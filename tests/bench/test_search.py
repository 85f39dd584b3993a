"""The search: every shape is predicted from few measured rounds, and the best are run end to end. Times are made up or
not looked at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from toolkit.bench.forecast import NEVER, ForecastAnswer, Surface, forecast_surface, largest_shape
from toolkit.bench.prompts import Prompt
from toolkit.bench.search import Setting, confirm, finalists, full_groups, predict, winner
from toolkit.bench.side_by_side import Sampling, Trial
from toolkit.bench.step_times import Parts, StepTimes, measure_step_times
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape

PROMPTS = [Prompt("1", "writing", ("write short stories",)), Prompt("2", "math", ("count seven apples", "and numbers"))]
LARGEST = [largest_shape(1, 2, 4), largest_shape(2, 2, 4)]


def made_up(batch: int = 2) -> StepTimes:
    """A plain round takes 1 s."""
    drafts = {(1, 1): 0.1, (2, 1): 0.2, (1, 2): 0.1, (2, 2): 0.3}
    verifies = {"chain,2 after one step": (1.1, 0.1), "chain,3": (1.2, 0.1), "tree,3 after one step": (1.4, 0.1)}
    verifies["tree,4"] = (0.95, 0.1)
    return StepTimes(batch, Parts(0.0, 0.95, 0.05), drafts, verifies)


def surface_of() -> Surface:
    """An answer whose steps accept one draft with 2 nodes; the second level is right in trees of 4 only."""
    largest = {1: DraftShape.chain(2), 2: DraftShape(2, 2, 4)}
    answer = {
        1: ForecastAnswer("1", tuple(range(9)), np.array([[[2, 2], [NEVER, NEVER]]] * 8)),
        2: ForecastAnswer("1", tuple(range(9)), np.array([[[2, 2], [NEVER, 4]]] * 8)),
    }
    return Surface(largest, {key: [one] for key, one in answer.items()}, [])


def test_a_prediction_is_accept_length_by_round():
    """Two requests; seconds and accept_lengths by hand."""
    settings = predict(surface_of(), made_up())
    found = {one.name: one for one in settings}
    assert set(found) == {"plain", "1,1,2", "2,1,3", "1,2,3", "2,2,4"}
    assert found["plain"].predicted == 2.0
    assert (found["2,1,3"].forecast, found["2,2,4"].forecast) == (2.0, 3.0)
    assert found["2,1,3"].predicted == pytest.approx(2 * 2 / 1.5)
    assert found["2,2,4"].parts == Parts(0.3, 0.95, 0.1)
    assert found["2,2,4"].predicted == pytest.approx(2 * 3 / 1.35)
    assert finalists(settings)[0] == DraftShape(2, 2, 4) and len(finalists(settings)) == 3


def test_the_better_prediction_wins_among_close_ones():
    """A short run is noise within 3 %, but a setting that is slower than plain decoding never wins by its prediction.
    Adaptive drafting has no prediction, and wins by its run alone."""
    chain = Setting("2,1,3", DraftShape.chain(2), 2.0, None, 9.0, 2.0, 100.0)
    tree, plain = replace(chain, name="2,2,4", predicted=10.0, measured=98.0), Setting("plain", None, measured=90.0)
    assert winner([plain, chain, tree]) is tree
    assert winner([plain, chain, replace(tree, measured=96.0)]) is chain
    assert winner([replace(plain, measured=99.0), chain, tree]) is chain
    adaptive = Setting("adaptive", tree.shape, measured=101.0)
    assert winner([plain, chain, tree, adaptive]) is adaptive
    perfect = replace(adaptive, name="perfect drafts", measured=500.0)
    assert winner([plain, chain, tree, perfect]) is tree, "it is no setting"


def test_groups_are_full():
    """A batch of 4 that runs 3 rows would be measured as if it had 4; ids stay unique, turns of a kind together."""
    prompts = [*PROMPTS, replace(PROMPTS[0], question_id="3")]
    assert [one.question_id for one in full_groups(prompts, 4)] == ["1", "3", "2", "2 again 0"]
    assert len(full_groups(prompts, 1)) == len(full_groups(prompts, 3)) == 3
    assert len({one.question_id for one in full_groups(prompts, 16)}) == 16


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.0), pytest.param(4, 0.7, marks=pytest.mark.slow)])
def test_search_of_a_tiny_head(tiny_target, tiny_draft, monkeypatch, batch, temperature):
    """Every shape of the surface gets its prediction from the rounds that were timed, and plain decoding, adaptive
    drafting and the finalists their measured figures; a batch may be larger than the number of prompts. All of them
    run at the temperature that is asked for."""
    config = EngineConfig(max_running_requests=batch)
    trial = Trial(tiny_target, tiny_draft, PROMPTS, Sampling(8, temperature, 0), config)
    surface = forecast_surface(replace(trial, prompts=full_groups(PROMPTS, batch)), LARGEST)
    add, temperatures, seen = Engine.add_request, set(), []

    def noted(self, ids, params, **options):
        temperatures.add(params.temperature)
        return add(self, ids, params, **options)

    monkeypatch.setattr(Engine, "add_request", noted)
    monkeypatch.setattr("toolkit.bench.step_times.AGAIN_TURNS", 1)
    texts = [one.question.prompt_ids for one in surface.references]
    times = measure_step_times(
        trial, surface.shapes(), texts, lambda now: finalists(predict(surface, now)), lambda *now: seen.append(now)
    )
    assert times.batch == batch and times.plain.draft_s == 0
    assert sorted(seen) == seen and seen[-1][0] == seen[-1][1]
    settings = predict(surface, times)
    assert [one.shape for one in settings] == [None, *surface.shapes()]
    assert all(one.predicted > 0 for one in settings)
    measured = {one.name: one for one in confirm(trial, settings, times) if one.measured is not None}
    chosen = {one.as_text(): one for one in finalists(settings)}
    assert set(measured) == {"plain", "adaptive", "perfect drafts", *chosen}
    assert all(one.measured > 0 for one in measured.values())
    assert temperatures == {temperature}
    assert measured["plain"].accept_length == 1.0
    assert measured["perfect drafts"].accept_length == 3.0, "each of the prompts that come twice has its answer"
    assert measured["adaptive"].shape == DraftShape.covering(chosen.values())
    if temperature == 0:  # float32 and the same prompts: what is counted is what was forecast of these answers
        for name, shape in chosen.items():
            assert measured[name].accept_length == pytest.approx(surface.forecast(shape).accept_length)
