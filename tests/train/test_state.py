"""States on disk: which is the newest, which heads are still needed, and who may write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.errors import ResumeError, TrainError
from toolkit.train.metrics import Metrics
from toolkit.train.state import Position, best_path, check_layout, drop_unneeded_bests, sole_trainer, stored_states
from toolkit.train_settings import TrainSettings
from toolkit.weights import write_json


def _state(directory: Path, step: int, best: int) -> Path:
    state = directory / f"state-{step:06d}"
    state.mkdir(parents=True)
    write_json(state / "position.json", {"step": step, "best_step": best})
    return state


def test_states_are_in_the_order_of_their_steps(tmp_path):
    """As text, step 1000000 stands before 999999: the newest state would be thrown away."""
    late, early = _state(tmp_path, 1_000_000, 0), _state(tmp_path, 999_999, 0)
    (tmp_path / "state-000001.part").mkdir()
    assert stored_states(tmp_path) == [early, late]


def test_heads_of_kept_states_stay(tmp_path):
    """A run resumed from the older state needs that one's best head at its end."""
    _state(tmp_path, 20, best=10)
    _state(tmp_path, 30, best=30)
    for step in (5, 10, 30):
        best_path(tmp_path, step).touch()
    drop_unneeded_bests(tmp_path)
    assert sorted(tmp_path.glob("best-*")) == [best_path(tmp_path, 10), best_path(tmp_path, 30)]


def test_two_trainings_in_one_folder(tmp_path):
    """They would delete each other's states."""
    with sole_trainer(tmp_path), pytest.raises(TrainError, match="another training uses"), sole_trainer(tmp_path):
        pass
    with sole_trainer(tmp_path):
        pass


def test_a_state_of_zero_3_needs_its_own_processes(tmp_path):
    """Its parts have another layout: read as those of ZeRO-2 they would give other weights."""
    of_two = Position(processes=2, zero_stage=3)
    check_layout(tmp_path, of_two, 2, 3)
    check_layout(tmp_path, replace(of_two, zero_stage=2), 1, 1)
    for processes, stage in ((1, 3), (2, 2)):
        with pytest.raises(ResumeError, match="--num-processes 2 --config-file .*zero3.yaml"):
            check_layout(tmp_path, of_two, processes, stage)


def test_metrics_hold_no_nan_and_rewind(tmp_path):
    """NaN is no JSON: every other reader of the file would fail at that line."""
    metrics = Metrics(tmp_path / "metrics.jsonl", main=True, settings=TrainSettings(), run_name="t", config={})
    metrics.write({"step": 1, "loss": float("nan"), "rates": [0.5, float("inf")]})
    metrics.write({"step": 2, "loss": 1.0})
    with metrics.path.open("a") as handle:
        handle.write('{"step": 3, "lo')
    metrics.rewind(1)
    assert metrics.path.read_text() == '{"step": 1, "loss": null, "rates": [0.5, null]}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
