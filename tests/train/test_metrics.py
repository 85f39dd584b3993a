"""What the rows hold, what reaches the trackers, and how a forecast counts verify steps."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from toolkit.data.batches import Example, collate
from toolkit.errors import MissingPackageError
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.metrics import MACHINE_KEYS, Metrics, StepClock, StepSums, step_row
from toolkit.train.step import chain_depths, replay
from toolkit.train.target_side import covered_share
from toolkit.train_settings import OptimizerSettings, TrackingSettings, TrainSettings, UnrollSettings


def test_coverage_counts_each_supervised_token_once():
    """Of p A0 A1 A2 E the target predicts A1, A2, E; the map has A1 and E. Tokens of the prompt, A0 and padding are
    not drafted, so they do not count."""
    batch = collate(
        [Example("a", [1, 2, 3, 4, 5], [False, True, True, True, True]), Example("b", [1, 1], [False] * 2)], 3
    )
    assert covered_share(batch, TokenMap.from_ids([3, 5], 9)) == pytest.approx(2 / 3)


def test_a_step_s_row():
    sums = StepSums(
        *(torch.tensor(values) for values in ([2.0, 4.0], [6.0, 2.0], [10.0, 8.0], [10.0, 5.0], [6.0, 0.0]))
    )
    seconds = {"step": 2.0, "target": 0.5, "head": 1.0, "optimizer": 0.25}
    row = step_row(
        sums,
        TrainSettings(optimizer=OptimizerSettings(name="adamw"), unroll=UnrollSettings(step_decay=0.5)),
        0.5,
        1.5,
        0.9,
        seconds,
        77,
    )
    assert row["loss"] == 4.0 and row["accuracy_by_step"] == pytest.approx([0.6, 0.25])
    assert row["conditional_accuracy_by_step"] == [0.6, 0.0]
    assert (row["learning_rate"], row["grad_norm"], row["muon_learning_rate"]) == (0.5 * 1.5e-3, 1.5, None)
    assert (row["supervised_tokens"], row["tokens_per_s"], row["token_map_coverage"]) == (10, 5.0, 0.9)
    assert [row[key] for key in MACHINE_KEYS] == [2.0, 5.0, 0.5, 1.0, 0.25, 77]


def test_inner_parts_are_taken_off(monkeypatch):
    """DeepSpeed steps inside of backward: counted twice, the parts would add up to more than the step."""
    ticks = iter([0.0, 1.0, 2.0, 5.0, 7.0, 8.0, 10.0, 11.0])
    monkeypatch.setattr("toolkit.train.metrics.time.perf_counter", lambda: next(ticks))
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    with clock.part("head"):
        clock.part("optimizer")(lambda: None)()
    assert clock.read() == {"step": 9.0, "optimizer": 2.0, "head": 4.0}


def test_a_fresh_rollouts_row_is_dropped_unless_training_went_over(tmp_path):
    """The row has the step of its state: if `rewind` kept it, a run that was killed after it would write it twice."""
    metrics = Metrics(tmp_path / "metrics.jsonl", main=True, settings=TrainSettings(), run_name="t", config={})
    for row in ({"step": 4, "loss": 1.0}, {"step": 4, "rollouts": 7}, {"step": 8, "rollouts": 7}):
        metrics.write(row)
    metrics.rewind(8, 4)
    assert len(metrics.path.read_text().splitlines()) == 2
    metrics.rewind(4, 0)
    assert [json.loads(line) for line in metrics.path.read_text().splitlines()] == [{"step": 4, "loss": 1.0}]


def test_wandb_asked_for_and_absent(tmp_path, monkeypatch):
    """Who does not track installs no tracker; who does is told which."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    rows = {"main": True, "run_name": "t", "config": {}}
    Metrics(tmp_path / "metrics.jsonl", settings=TrainSettings(), **rows)
    asked = TrainSettings(tracking=TrackingSettings(wandb=True))
    with pytest.raises(MissingPackageError, match="tracking.wandb: true needs .* wandb.*: pip install wandb"):
        Metrics(tmp_path / "metrics.jsonl", settings=asked, **rows)


def test_tensorboard(tmp_path):
    """What a resumed run writes anew replaces what the killed one wrote after its newest state."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for values in ((1.0, 2.0, 3.0), (9.0,)):
        metrics = Metrics(
            tmp_path / "metrics.jsonl",
            main=True,
            settings=TrainSettings(tracking=TrackingSettings(tensorboard=True)),
            run_name="t",
            config={},
        )
        start = 0 if len(values) == 3 else 2
        metrics.rewind(start)
        for step, value in enumerate(values, start=start + 1):
            metrics.write({"step": step, "loss": value, "accuracy_by_step": [value, value / 2]})
        metrics.close()
    events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert [one.value for one in events.Scalars("accuracy_by_step/1")] == [0.5, 1.0, 4.5]


def test_replay_by_hand():
    """root 2 reads A0 (position 3): accepts 2 (A1, A2), bonus A3; root 5 reads A3: accepts 0, bonus A4; root 6
    reads A4: one token (E) is left, accepted 0, bonus E at position 8: a whole step. Three steps, 3 + 1 + 1 tokens."""
    #          p  p  p  A0 A1 A2 A3 A4 E
    response = [False] * 3 + [True] * 6
    depth = [0, 0, 2, 9, 9, 0, 0, 0, 0]
    assert replay(depth, response) == [2, 0, 0]


def test_a_step_cut_by_the_end_is_left_out():
    """The draft of E is right, so the bonus token lies past the end: the engine cuts that step, and so do we."""
    response = [False] * 3 + [True] * 4
    assert replay([0, 0, 0, 2, 0, 0, 0], response) == [0]


def test_turns_are_replayed_apart():
    response = [False, False, True, True, True, False, False, True, True, True]
    assert replay([0] * 10, response) == [0, 0, 0, 0]


def test_chain_depths_stop_at_the_first_miss():
    """A hit after a miss is unreachable for a chain."""
    roots = [torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]), torch.tensor([0, 1])]
    hits = [torch.tensor([True, False, True]), torch.tensor([True, True, True]), torch.tensor([True, True])]
    # root 0 has no supervised step 0; root 1 hits all three; root 2 misses first; root 3 has only step 0.
    assert chain_depths(hits, roots, 5).tolist() == [-1, 3, 0, 1, -1]
