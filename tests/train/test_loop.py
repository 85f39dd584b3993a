"""Training as users launch it: accelerate, DeepSpeed, kills, several processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from toolkit.checkpoint.draft_dir import load_draft
from toolkit.train.metrics import MACHINE_KEYS
from toolkit.weights import load_tensors

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "toolkit" / "train" / "eagle3.py"
pytestmark = pytest.mark.process
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **more}


def _processes(count: int, zero: str) -> tuple[str, ...]:
    config = REPOSITORY / "recipes" / "accelerate" / f"{zero}.yaml"
    return ("--config_file", str(config), "--num_processes", str(count), "--main_process_port", "0")


def _copy_run(tiny_run: Path, folder: Path) -> Path:
    """A run folder of its own with the same inputs."""
    shutil.copytree(tiny_run, folder, ignore=shutil.ignore_patterns("train", "ckpt"))
    return folder


def _line(run: Path, *overrides: str, options: tuple[str, ...] = ()) -> list[str]:
    line = [*LAUNCH, *options, str(SCRIPT), "--recipe", str(run / "recipe.yaml")]
    return [*line, f"run_dir={run}", *overrides]


def _train(run: Path, *overrides: str, **how: Any) -> list[dict]:
    _launch(run, *overrides, **how)
    return _losses(run)


def _launch(
    run: Path, *overrides: str, options: tuple[str, ...] = (), cwd: Path = REPOSITORY, **environment: str
) -> str:
    """Train to the end; returns stderr."""
    done = subprocess.run(
        _line(run, *overrides, options=options),
        cwd=cwd,
        env=_environment(**environment),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def _losses(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def uninterrupted(tiny_run, tmp_path_factory) -> Path:
    run = _copy_run(tiny_run, tmp_path_factory.mktemp("whole") / "run")
    _train(run, "train.max_steps=40", cwd=tmp_path_factory.mktemp("elsewhere"))
    return run


OFTEN = ("train.max_steps=40", "train.evaluation.eval_every=4")  # forecasts fall inside the steps that are compared


@pytest.fixture(scope="module")
def shared(tiny_run, tmp_path_factory) -> Callable[[int], Path]:
    """The run of so many processes, each trained once."""

    @cache
    def train(processes: int) -> Path:
        run = _copy_run(tiny_run, tmp_path_factory.mktemp("shared") / "run")
        _train(run, *OFTEN, options=_processes(processes, "zero2"))
        return run

    return train


def test_killed_and_resumed_is_the_same_curve(tiny_run, uninterrupted, tmp_path):
    """Launched by path from another folder, without an accelerate configuration. SIGKILL in mid-run; the second start
    goes on from the newest state: same losses to the last bit, same head.

    Data position, optimiser moments, learning rate or random state lost would each show in the losses.
    """
    rows = _losses(uninterrupted)
    assert len(rows) == 40
    by_epoch = [[row["loss"] for row in rows if row["epoch"] == epoch] for epoch in range(rows[-1]["epoch"])]
    # Whole epochs hold the same rollouts, so nothing but the head differs.
    assert len(by_epoch[0]) == len(by_epoch[-1]) and sum(by_epoch[-1]) < 0.93 * sum(by_epoch[0])
    draft = load_draft(uninterrupted / "ckpt")
    assert draft.meta["target"]["name"] and draft.meta["training"]["steps"] == 40
    run = _copy_run(tiny_run, tmp_path / "run")
    _train_until_killed(run, "train.max_steps=40")
    _assert_same_run(run, _train(run, "train.max_steps=40"), uninterrupted)


def _train_until_killed(
    run: Path,
    *overrides: str,
    options: tuple[str, ...] = (),
    file: str = "metrics.jsonl",
    until: str = '"step": 14',
    rank: int | None = None,
) -> str:
    """SIGKILL to launcher and workers, or to one worker, between the first state and the second, when that stands in a
    file of train/. Returns stderr."""
    with (run / "stderr").open("w") as stderr:
        child = psutil.Popen(_line(run, *overrides, options=options), env=_environment(), stderr=stderr)
    watched = run / "train" / file
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (watched.is_file() and until in watched.read_text()):
        time.sleep(0.005)
    family = [child, *child.children(recursive=True)]
    for process in family:
        if rank is None or process.environ().get("RANK") == str(rank):
            process.kill()
    _, left = psutil.wait_procs(family, timeout=120)
    for process in left:
        process.kill()
    assert not left, "they wait for the one that was killed"
    assert child.wait() != 0 and not (run / "ckpt" / "config.json").exists(), "the run ended before it could be killed"
    assert list((run / "train").glob("state-0*"))
    return (run / "stderr").read_text()


def _assert_same_run(run: Path, resumed: list[dict], whole: Path) -> None:
    assert [row["step"] for row in resumed] == [row["step"] for row in _losses(whole)]
    for ours, theirs in zip(resumed, _losses(whole), strict=True):
        timeless = {key: value for key, value in ours.items() if key not in MACHINE_KEYS}
        assert timeless == {key: theirs[key] for key in timeless}
    first, second = (load_tensors(folder / "ckpt" / "model.safetensors") for folder in (run, whole))
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_give_the_curve_of_one_which_goes_on_alone(processes, shared, uninterrupted, tmp_path):
    """fp32, same global batch: sums run in another order, so 1e-4 relative over 12 steps; a wrong denominator, share or
    learning rate is off by far more. Forecasts fall inside these steps: what they leave behind would show too. Moments
    of another parameter, or a part in another place, would show in the ten losses after the conversion to one; four
    processes cut through matrices."""
    one, rows = tmp_path / "one", _losses(shared(processes))
    for ours, theirs in zip(rows[:12], _losses(uninterrupted)[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert all(ours[key] == theirs[key] for key in ("supervised_tokens", "learning_rate"))
    ignored = shutil.ignore_patterns("ckpt", "state-000040", "manifest.json")
    shutil.copytree(shared(processes), one, ignore=ignored)
    for ours, theirs in zip(_train(one, *OFTEN), rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert not list((one / "train").glob("*.converted"))
    (newest,) = (one / "train").glob("state-000040/position.json")
    assert json.loads(newest.read_text())["processes"] == 1, "two would take this state for one of their own"


def test_a_sharded_target_with_stored_features_gives_the_same_curve(tiny_run, uninterrupted, tmp_path):
    """ZeRO-3: every process holds half of each layer and of the head, writes its share of the features, and reads all.
    Features stored with other batches differ by at most 1e-4."""
    run = _copy_run(tiny_run, tmp_path / "run")
    settings = ("train.max_steps=40", "train.evaluation.eval_every=4", "train.data.features=offline")
    said = _launch(run, *settings, "train.target=sharded", options=_processes(2, "zero3"))
    local, total = re.search(r"over 2 processes: this process holds (\d+) of (\d+) bytes", said).groups()
    assert 2 * int(local) == int(total) > 0 and len(list((run / "features").glob("shard-*"))) == 2
    for ours, theirs in zip(_losses(run)[:12], _losses(uninterrupted)[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.parametrize("setting", ["train.target=tensor", "train.data.split_rows=2"])
def test_two_processes_that_compute_together_give_the_same_curve(setting, tiny_run, uninterrupted, tmp_path):
    """A target by tensor parallel; every row split in two, where a wrong share or scale would double the losses."""
    run = _copy_run(tiny_run, tmp_path / "run")
    settings = ("train.max_steps=40", "train.evaluation.eval_every=4", setting)
    rows = _train(run, *settings, options=_processes(2, "zero2"))
    for ours, theirs in zip(rows[:12], _losses(uninterrupted)[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        # Two of some ninety argmaxes may be near-ties: the sums are in another order.
        assert ours["accuracy_by_step"] == pytest.approx(theirs["accuracy_by_step"], abs=0.025)


def test_the_gradient_has_the_same_scale(tiny_run, tmp_path):
    """Two processes that accumulate gradients, in as many packed micro-batches as their texts take (one or two),
    against one process with the full batch. Adam and Muon hide a wrong scale of the gradient, but clipping shows it:
    every norm is over the recipe's clip. A warning says that the clip in the launcher's file is not used."""
    settings = ("train.max_steps=6", "train.evaluation.eval_every=6", "train.optimizer.name=adamw")
    settings += ("train.optimizer.max_grad_norm=0.01",)
    whole = _train(_copy_run(tiny_run, tmp_path / "one"), *settings)
    run, asked = _copy_run(tiny_run, tmp_path / "two"), tmp_path / "zero2.yaml"
    shipped = (REPOSITORY / "recipes" / "accelerate" / "zero2.yaml").read_text()
    asked.write_text(shipped.replace("  zero_stage", "  gradient_clipping: 7\n  zero_stage"))
    options = ("--config_file", str(asked), *_processes(2, "zero2")[2:])
    packed = ("train.data.micro_batch=1", "train.data.pack=true", "train.data.max_length=64")
    said = _launch(run, *settings, *packed, options=options)
    assert said.count("sets gradient_clipping 7.0, but the recipe's value is 0.01") == 1, said
    for ours, theirs in zip(_losses(run), whole, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3) and theirs["grad_norm"] > 0.01
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


ON_POLICY = (
    *("train.max_steps=16", "train.on_policy.every=6", "train.save_every=100", "train.evaluation.eval_every=4"),
    *("train.evaluation.real_every=8", "train.evaluation.real_prompts=2", "train.evaluation.real_max_tokens=12"),
    "target.quantization=int8",
)


def test_killed_while_it_writes_fresh_rollouts(tiny_chat_run, tmp_path):
    """Six steps of four rollouts each go on what the step before them wrote; the engine's values decide the best. After
    a kill there is no state but the one before the rollouts; what was written stays, and the curve is the same."""
    whole, run = (_copy_run(tiny_chat_run, tmp_path / name) for name in ("whole", "run"))
    _train(whole, *ON_POLICY)
    rows = _rows(whole / "train" / "metrics.jsonl")
    assert [row["rollouts_of_step"] for row in rows if "loss" in row] == [0] * 6 + [6] * 6 + [12] * 4
    measured = [row for row in rows if "real" in row]
    names = ["chain 3 T=0", "chain 3 T=1", "tree 3x4/12 T=0", "tree 3x4/12 T=1"]
    assert [[one["name"] for one in row["real"]] for row in measured] == [names] * 2
    training = load_draft(whole / "ckpt").meta["training"]
    best = max(measured, key=lambda row: (row["real_accept_length"], row["step"]))
    assert (training["best_step"], training["real_accept_length"]) == (best["step"], best["real_accept_length"])
    _train_until_killed(run, *ON_POLICY, file="fresh/000012.0-of-1.jsonl", until="\n")
    before = (run / "train" / "fresh" / "000012.0-of-1.jsonl").read_text().rpartition("\n")[0].splitlines()
    _assert_same_run(run, _train(run, *ON_POLICY), whole)
    after = (run / "train" / "fresh" / "000012.jsonl").read_text().splitlines()
    assert before and set(before) <= set(after) and len(after) == len(set(after))
    fresh = _rows(whole / "train" / "fresh" / "000012.jsonl")
    assert [json.loads(line)["input_ids"] for line in after] == [row["input_ids"] for row in fresh]
    written = [row for row in _rows(run / "train" / "metrics.jsonl") if "rollouts" in row]
    assert [row["step"] for row in written] == [6, 12]
    assert all(row["rollouts"] + row["rollouts_skipped"] == 24 for row in written)


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_the_group_dies(rank, tiny_run, shared, tmp_path):
    """The other process ends too, with a message; else the remaining GPUs would wait without doing any work. Resumed,
    the curve and the head are those of an uninterrupted run of two processes, to the bit."""
    run, options = _copy_run(tiny_run, tmp_path / "run"), _processes(2, "zero2")
    said = _train_until_killed(run, *OFTEN, options=options, rank=rank)
    assert "another training process ended or cannot be reached" in said and "run the same command again" in said
    _assert_same_run(run, _train(run, *OFTEN, options=options), shared(2))
