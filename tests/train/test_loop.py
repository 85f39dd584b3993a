"""Training as users launch it: accelerate, DeepSpeed, kills, several processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from toolkit.checkpoint.draft_dir import load_draft
from toolkit.weights import load_tensors

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "toolkit" / "train" / "eagle3.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}


def _copy_run(tiny_run: Path, folder: Path) -> Path:
    """A run folder of its own with the same inputs."""
    shutil.copytree(tiny_run, folder, ignore=shutil.ignore_patterns("train", "ckpt"))
    return folder


def _line(run: Path, *overrides: str, options: tuple[str, ...] = ()) -> list[str]:
    line = [*LAUNCH, *options, str(SCRIPT), "--recipe", str(run / "recipe.yaml")]
    return [*line, f"run_dir={run}", *overrides]


def _train(run: Path, *overrides: str, options: tuple[str, ...] = (), cwd: Path = REPOSITORY) -> list[dict]:
    done = subprocess.run(
        _line(run, *overrides, options=options),
        cwd=cwd,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return _losses(run)


def _losses(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def uninterrupted(tiny_run, tmp_path_factory) -> Path:
    run = _copy_run(tiny_run, tmp_path_factory.mktemp("whole") / "run")
    _train(run, "train.max_steps=40", cwd=tmp_path_factory.mktemp("elsewhere"))
    return run


def test_training_lowers_the_loss_and_leaves_a_head(uninterrupted):
    """Launched by path from another folder, without an accelerate configuration: as the README types it."""
    losses = [row["loss"] for row in _losses(uninterrupted)]
    assert len(losses) == 40
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    draft = load_draft(uninterrupted / "ckpt")
    assert all(torch.isfinite(parameter).all() for parameter in draft.head.parameters())
    assert draft.meta["target"]["name"] and draft.meta["training"]["steps"] == 40


def test_killed_and_resumed_is_the_same_curve(tiny_run, uninterrupted, tmp_path):
    """SIGKILL in mid-run; the second start goes on from the newest state: same losses to the last bit, same head.

    Data position, optimiser moments, learning rate or random state lost would each show in the losses.
    """
    run = _copy_run(tiny_run, tmp_path / "run")
    child = subprocess.Popen(
        _line(run, "train.max_steps=40"), env=_environment(), stderr=subprocess.DEVNULL, start_new_session=True
    )
    metrics = run / "train" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text().count("\n") >= 14):
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert not (run / "ckpt" / "config.json").exists(), "the run ended before it could be killed"
    assert list((run / "train").glob("state-0*"))
    resumed = _train(run, "train.max_steps=40")
    whole = _losses(uninterrupted)
    assert [row["step"] for row in resumed] == list(range(1, 41))
    for ours, theirs in zip(resumed, whole, strict=True):
        timeless = {key: value for key, value in ours.items() if key != "seconds_per_step"}
        assert timeless == {key: theirs[key] for key in timeless}
    first, second = (load_tensors(folder / "ckpt" / "model.safetensors") for folder in (run, uninterrupted))
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_two_processes_give_the_curve_of_one(tiny_run, uninterrupted, tmp_path, zero):
    """fp32, same global batch: sums run in another order, so 1e-4 relative over 12 steps; a wrong denominator, share or
    learning rate is off by far more."""
    run = _copy_run(tiny_run, tmp_path / "run")
    config = REPOSITORY / "recipes" / "accelerate" / f"{zero}.yaml"
    options = ("--config_file", str(config), "--num_processes", "2", "--main_process_port", "0")
    two = _train(run, "train.max_steps=40", options=options)
    one = _losses(uninterrupted)
    for ours, theirs in zip(two[:12], one[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["supervised_tokens"] == theirs["supervised_tokens"]
        assert ours["learning_rate"] == theirs["learning_rate"]
    draft = load_draft(run / "ckpt")
    assert all(torch.isfinite(parameter).all() for parameter in draft.head.parameters())


def test_accumulation_gives_the_same_curve(tiny_run, uninterrupted, tmp_path):
    """Micro-batches of 1 must add up to the mean over the global batch, not to a mean of means."""
    run = _copy_run(tiny_run, tmp_path / "run")
    accumulated = _train(run, "train.max_steps=40", "train.micro_batch=1", "train.eval_every=40")
    for ours, theirs in zip(accumulated[:12], _losses(uninterrupted)[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_states_of_other_settings_are_refused(tiny_run, tmp_path):
    run = _copy_run(tiny_run, tmp_path / "run")
    _train(run)
    refused = subprocess.run(_line(run, "train.learning_rate=0.5"), env=_environment(), capture_output=True, text=True)
    assert refused.returncode != 0
    assert "other settings or data" in refused.stderr and "delete" in refused.stderr


def test_misspelt_key(tiny_run):
    refused = subprocess.run(
        _line(tiny_run, "train.learning_rat=0.5"), env=_environment(), capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "learning_rate" in refused.stderr and "Traceback" not in refused.stderr.split("toolkit: error")[0]
