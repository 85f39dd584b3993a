"""The engine's accept_length in the middle of a training, which head is handed on, and when training stops."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.train.conftest import answered, answers_of, fit
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.errors import TrainError
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import summarise
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.engine_client import check_engine_runs
from toolkit.train.evaluation import Evaluation, Measurement, has_stopped, update_best
from toolkit.train.state import Position, best_path
from toolkit.train.step import TrainedHead, forecast_accept_length, micro_step, supervised_counts
from toolkit.train.target_side import TargetSide
from toolkit.train.training_data import HeldOutPrompt, read_held_out
from toolkit.train.warm_start import initialise_from_target
from toolkit.train_settings import DataSettings, EvaluationSettings, TrainSettings, UnrollSettings
from toolkit.weights import load_tensors

FORECASTS_ALONE = TrainSettings(evaluation=EvaluationSettings(real_every=None, patience=2))
MEASURED = TrainSettings(evaluation=EvaluationSettings(real_every=2, patience=2))


def _after(evaluations: list[tuple[float | None, float | None]], settings: TrainSettings) -> list[Position]:
    """Positions after (forecast, real) of steps 1, 2, ..."""
    positions = [Position()]
    for step, (forecast, real) in enumerate(evaluations, start=1):
        positions.append(update_best(replace(positions[-1], step=step), forecast, real, settings))
    return positions[1:]


@pytest.mark.parametrize(
    ("forecasts", "best"),
    [
        ([1.2, None, 1.1], 1),  # no steps are no reason to forget a head that was measured
        ([None, None], 2),  # nothing is known: the longest trained
    ],
)
def test_the_best_forecast_wins(forecasts, best):
    """NaN compares false with everything: as a number it would win once and then never be beaten, or never win."""
    last = _after([(forecast, None) for forecast in forecasts], FORECASTS_ALONE)[-1]
    assert (last.best_step, last.best_forecast) == (best, forecasts[best - 1])


def test_what_the_engine_measured_beats_every_forecast():
    """Step 1 has only a forecast, and it is the highest; step 3's forecast is higher than step 2's. Neither counts."""
    last = _after([(9.0, None), (1.5, 1.4), (2.5, None), (1.2, 1.6), (3.0, 1.5)], MEASURED)[-1]
    assert (last.best_step, last.best_real, last.best_forecast) == (4, 1.6, 1.2)


def test_patience_counts_only_what_decides():
    """Forecasts between two measurements would stop a training that the engine finds better each time."""
    measured = _after([(2.0, None), (2.0, 1.4), (1.9, None), (1.8, 1.5), (1.7, None), (1.6, 1.5)], MEASURED)
    assert [one.stale for one in measured] == [0, 0, 0, 0, 0, 1] and not has_stopped(measured[-1], MEASURED)
    stopped = _after([(1.5, None), (1.4, None), (1.5, None)], FORECASTS_ALONE)
    assert [has_stopped(one, FORECASTS_ALONE) for one in stopped] == [False, False, True]
    assert stopped[-1].best_step == 3, "of equals the later one is handed on, but it is no gain"
    assert not has_stopped(stopped[-1], replace(FORECASTS_ALONE, evaluation=EvaluationSettings(real_every=None)))


STEPS, TOKENS = 3, 32
SETTINGS = TrainSettings(
    precision="fp32",
    unroll=UnrollSettings(ttt_steps=STEPS),
    data=DataSettings(micro_batch=3),
    evaluation=EvaluationSettings(
        real_max_tokens=TOKENS, real_shapes=("3,1,4", "2,1,3", "3,4,12"), real_temperatures=(0.0, 0.2)
    ),
)


@pytest.fixture(scope="module")
def training(tiny_target, tiny_draft):
    """A head in training that knows its answers by heart, the prompts, and the batch it learned."""
    generator = torch.Generator().manual_seed(11)
    asked = [torch.randint(3, tiny_target.vocab_size, (4 + at,), generator=generator).tolist() for at in range(8)]
    prompts = [HeldOutPrompt(str(at), ids) for at, ids in enumerate(asked)]
    batch = answered(asked, answers_of(tiny_target, asked, SamplingParams(max_tokens=TOKENS)))
    token_map = TokenMap.from_ids(range(tiny_target.vocab_size - 60), tiny_target.vocab_size)
    config = Eagle3Config.from_dict({**tiny_draft.head.config.to_dict(), "draft_vocab_size": token_map.size})
    model = TrainedHead(Eagle3Head(config), 0.8)
    initialise_from_target(model.head, tiny_target, token_map, [batch], seed=0)
    side = TargetSide(tiny_target, token_map, config.aux_layer_ids, "fp32")
    fit(model, side, batch, STEPS, updates=50)
    yield model, side, prompts, batch
    side.capture.remove()


def _evaluation(training, directory, rows: list) -> Evaluation:
    model, side, prompts, batch = training
    accelerator = SimpleNamespace(
        is_main_process=True, num_processes=1, get_state_dict=lambda module: module.state_dict()
    )
    data, metrics = SimpleNamespace(held_out=[batch]), SimpleNamespace(write=rows.append)
    one = Evaluation(accelerator, side, data, model.head.config, SETTINGS, directory, metrics)
    one.measurement = Measurement(side.target, prompts, SETTINGS, seed=0)
    return one


def test_the_engine_measures_the_head_in_training(training, tmp_path):
    """Each shape and temperature has the values of a separate engine, and in fp32 the forecast over the same answers is
    the engine's value. The measurement leaves no hook or inference tensor."""
    model, side, prompts, batch = training
    rows: list = []
    hooks = [len(layer._forward_pre_hooks) for layer in side.target.layers]
    position = _evaluation(training, tmp_path, rows)(model, Position(step=7), forecast=False, real=True)
    assert hooks == [len(layer._forward_pre_hooks) for layer in side.target.layers]
    (row,) = rows
    lengths = {one["name"]: one["accept_length"] for one in row["real"]}
    assert 1.2 < lengths["chain 2 T=0"] < lengths["chain 3 T=0"] <= lengths["tree 3x4/12 T=0"]
    engine = Engine(side.target, DraftCheckpoint(model.head, side.token_map), DraftShape.chain(3))
    alone = engine.generate([one.prompt for one in prompts], SamplingParams(max_tokens=TOKENS))
    engine.close()
    assert lengths["chain 3 T=0"] == forecast_accept_length(model, side, [batch], STEPS).accept_length
    assert lengths["chain 3 T=0"] == summarise(event for one in alone for event in one.events).accept_length
    assert position.best_real == row["real_accept_length"] == pytest.approx(sum(lengths.values()) / 6)
    best = load_tensors(best_path(tmp_path, 7))
    assert all(torch.equal(best[name], value) for name, value in model.head.state_dict().items())
    micro_step(model, side, batch, supervised_counts(batch, STEPS), STEPS).loss.backward()


def test_the_first_held_out_prompts(tmp_path):
    """The order of the ids decides, not that of the file, so that two runs measure the same prompts."""
    path = tmp_path / "rollouts.jsonl"

    def write(*rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def row(name, split="held_out", spans=((2, 4),)):
        return {"id": name, "split": split, "input_ids": [1, 2, 3, 4], "response_spans": spans, "provenance": {}}

    write(row("c"), row("a", "train"), row("d"), row("b"), row("0", spans=[]), row("1", spans=[[0, 4]]))
    found = read_held_out(path, 2, longest=8)
    assert found == [("b", [1, 2]), ("c", [1, 2])]
    with pytest.raises(TrainError, match="no usable held-out prompt.*real_every=null"):
        read_held_out(path, 2, longest=1)


def test_an_unusable_draft_shape_raises_before_training(tiny_target):
    with pytest.raises(TrainError, match="more branches than the draft vocabulary.*real_shapes"):
        check_engine_runs(tiny_target, 3, [DraftShape.parse("2,4,8")])
