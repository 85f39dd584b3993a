"""The search: every shape is predicted from few measured rounds, and the best are run end to end. Times are made up or
not looked at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from toolkit.bench.forecast import NEVER, ForecastAnswer, Surface, forecast_surface, largest_shape
from toolkit.bench.prompts import Prompt
from toolkit.bench.search import (
    confirm,
    covering_shape,
    finalists,
    full_groups,
    is_significant,
    predict,
)
from toolkit.bench.side_by_side import LoggedAnswer, Question, Round, Sampling, Trial
from toolkit.bench.step_times import (
    Parts,
    StepTimes,
    measure_step_times,
)
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import VerifyEvent

PROMPTS = [
    Prompt("1", "writing", ("write short stories about rivers",)),
    Prompt("2", "math", ("count seven apples", "and numbers")),
    Prompt("3", "math", ("the weather in spring",)),
]
LARGEST = [largest_shape(1, 3, 8), largest_shape(2, 3, 8), largest_shape(4, 2, 8)]
CHAIN, TREE = DraftShape.chain(2), DraftShape(2, 2, 4)


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
    """tokens/s = batch * accept_length / round."""
    found = {one.name: one for one in predict(surface_of(), made_up())}
    assert set(found) == {"plain", "1,1,2", "2,1,3", "1,2,3", "2,2,4"}
    assert found["plain"].predicted == 2.0
    assert (found["2,1,3"].accept_length, found["2,2,4"].accept_length) == (2.0, 3.0)
    assert found["2,1,3"].predicted == pytest.approx(2 * 2 / 1.5)
    assert found["2,2,4"].parts == Parts(0.3, 0.95, 0.1)
    assert found["2,2,4"].predicted == pytest.approx(2 * 3 / 1.35)


def test_groups_are_full():
    """A batch of 4 that runs 3 rows would be measured as if it had 4; ids stay unique, turns of a kind together."""
    full = full_groups(PROMPTS, 4)
    assert [one.question_id for one in full] == ["1", "3", "2", "2 again 0"]
    assert len(full_groups(PROMPTS, 1)) == len(full_groups(PROMPTS, 3)) == 3
    assert len({one.question_id for one in full_groups(PROMPTS, 16)}) == 16


def rounds_of(seconds: dict[str, list[float]], prompts: int) -> list[Round]:
    """Two-turn answers of 10 tokens, each prompt alone; seconds: by mode, of the first turn in each pass and prompt."""
    found = []
    for place in range(len(seconds["plain"])):
        prompt = replace(PROMPTS[1], question_id=str(place % prompts))
        for turn, factor in ((0, 1.0), (1, 0.5)):
            for mode, of_mode in seconds.items():
                event = VerifyEvent(1, 1, 1, 2, False, 0.0, 0.0, 0.0, 2)
                answer = LoggedAnswer(Question(prompt, turn, (1,), SamplingParams()), (0,) * 11, (event,) * 5)
                found.append(Round(mode, (answer,), 0.1, factor * of_mode[place], 10))
    return found


def test_a_difference_is_significant_by_pairs():
    """The machine slows by 3x during the run, alike for both: unpaired, nothing would be known. With noise of a tenth
    in each pair nothing is known either; a difference far above CLOSE is."""
    slow = np.linspace(1, 3, 12)
    noise = 1 + 0.1 * np.resize([1, -1, 1, 1, -1, -1, 1], 12)

    def told(ours, theirs, prompts):
        rounds = rounds_of({"plain": list(ours), "a": list(theirs)}, prompts)
        return is_significant(*([one for one in rounds if one.mode == mode] for mode in ("plain", "a")))

    assert told(slow, 1.01 * slow, 6) and told(slow, 1.5 * slow * noise, 6)
    assert not told(slow, 1.01 * slow * noise, 6)
    assert not told([1.0] * 4, [1.0] * 4, 4), "four pairs are too few"
    assert told([1.0] * 5, [1.0] * 5, 5), "a prompt's turns are a unit"


@pytest.fixture(scope="module")
def surface(tiny_target, tiny_draft):
    config = EngineConfig(max_running_requests=2)
    return forecast_surface(Trial(tiny_target, tiny_draft, PROMPTS, Sampling(20, 0.0, 0), config), LARGEST)


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.0), pytest.param(4, 0.7, marks=pytest.mark.slow)])
def test_search_of_a_tiny_head(surface, tiny_target, tiny_draft, monkeypatch, batch, temperature):
    """Every shape of the surface gets its prediction from the rounds that were timed, and plain decoding, adaptive
    drafting and the finalists their measured figures; a batch may be larger than the number of prompts. All of them
    run at the temperature that is asked for."""
    add, temperatures = Engine.add_request, set()

    def noted(self, ids, params, **options):
        temperatures.add(params.temperature)
        return add(self, ids, params, **options)

    monkeypatch.setattr(Engine, "add_request", noted)
    config = EngineConfig(max_running_requests=batch)
    texts = [one.question.prompt_ids for one in surface.references]
    seen: list[tuple[int, int]] = []
    trial = Trial(tiny_target, tiny_draft, PROMPTS, Sampling(20, temperature, 0), config)
    mattered = []

    def matter(times):
        mattered[:] = [one.shape for one in finalists(predict(surface, times))]
        return mattered

    times = measure_step_times(trial, surface.shapes(), texts, matter, lambda *now: seen.append(now))
    assert len(mattered) == 3 and temperatures == {temperature}
    assert times.batch == batch and times.plain.draft_s == 0
    assert sorted(seen) == seen and seen[-1][0] == seen[-1][1]
    settings = predict(surface, times)
    assert [one.shape for one in settings] == [None, *surface.shapes()]
    assert all(one.predicted > 0 for one in settings)
    chosen = finalists(settings)
    trial = replace(trial, sampling=Sampling(8, temperature, 0))
    measured = confirm(trial, chosen, times)
    assert [one.name for one in measured] == ["plain", "adaptive", *(one.name for one in chosen)]
    assert all(one.measured > 0 for one in measured)
    assert temperatures == {temperature}
    assert measured[0].accept_length == 1.0 and measured[1].shape == covering_shape(chosen)
    if temperature == 0:  # float32 and the same prompts: what is counted is what was forecast of these answers
        shortened = forecast_surface(replace(trial, prompts=full_groups(PROMPTS, batch)), LARGEST)
        assert [one.accept_length for one in measured[2:]] == pytest.approx(
            [shortened.forecast(one.shape).accept_length for one in chosen]
        )
