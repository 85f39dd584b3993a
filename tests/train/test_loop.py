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
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from toolkit.checkpoint.draft_dir import load_draft
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.train.metric_rows import MACHINE_KEYS
from toolkit.train.warm_start import initialise_random
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


def test_training_lowers_the_loss_and_leaves_a_head(uninterrupted):
    """Launched by path from another folder, without an accelerate configuration: as the README types it."""
    rows = _losses(uninterrupted)
    assert len(rows) == 40
    by_epoch = [[row["loss"] for row in rows if row["epoch"] == epoch] for epoch in range(rows[-1]["epoch"])]
    assert len(by_epoch[0]) == len(by_epoch[-1])
    # Whole epochs hold the same rollouts, so nothing but the head differs.
    assert sum(by_epoch[-1]) < 0.93 * sum(by_epoch[0])
    draft = load_draft(uninterrupted / "ckpt")
    assert all(torch.isfinite(parameter).all() for parameter in draft.head.parameters())
    assert draft.meta["target"]["name"] and draft.meta["training"]["steps"] == 40


def test_killed_and_resumed_is_the_same_curve(tiny_run, uninterrupted, tmp_path):
    """SIGKILL in mid-run; the second start goes on from the newest state: same losses to the last bit, same head.

    Data position, optimiser moments, learning rate or random state lost would each show in the losses.
    """
    run = _copy_run(tiny_run, tmp_path / "run")
    _train_until_killed(run, "train.max_steps=40")
    _assert_same_run(run, _train(run, "train.max_steps=40"), uninterrupted)


def test_killed_and_resumed_on_two_processes(tiny_run, zero2_on_two, tmp_path):
    """A ZeRO state is in pieces by process: each must find its own again, and the processes the same place."""
    run, settings = _copy_run(tiny_run, tmp_path / "run"), ("train.max_steps=40", "train.evaluation.eval_every=4")
    _train_until_killed(run, *settings, options=_processes(2, "zero2"))
    _assert_same_run(run, _train(run, *settings, options=_processes(2, "zero2")), zero2_on_two)


def _train_until_killed(
    run: Path, *overrides: str, options: tuple[str, ...] = (), file: str = "metrics.jsonl", until: str = '"step": 14'
) -> None:
    """SIGKILL to launcher and workers between the first state and the second, when that stands in a file of train/."""
    child = psutil.Popen(_line(run, *overrides, options=options), env=_environment(), stderr=subprocess.DEVNULL)
    watched = run / "train" / file
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (watched.is_file() and until in watched.read_text()):
        time.sleep(0.005)
    family = [child, *child.children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=30)
    assert not (run / "ckpt" / "config.json").exists(), "the run ended before it could be killed"
    assert list((run / "train").glob("state-0*"))


def _assert_same_run(run: Path, resumed: list[dict], whole: Path) -> None:
    assert [row["step"] for row in resumed] == [row["step"] for row in _losses(whole)]
    for ours, theirs in zip(resumed, _losses(whole), strict=True):
        timeless = {key: value for key, value in ours.items() if key not in MACHINE_KEYS}
        assert timeless == {key: theirs[key] for key in timeless}
    first, second = (load_tensors(folder / "ckpt" / "model.safetensors") for folder in (run, whole))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_resumed_with_another_micro_batch(uninterrupted, tmp_path):
    """The state of step 30 was written without accumulation. 30 is no multiple of 4: counted on from there, the
    optimiser would step in the middle of a global batch."""
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run, ignore=shutil.ignore_patterns("ckpt", "state-000040"))
    resumed = _train(run, "train.max_steps=40", "train.data.micro_batch=1")
    for ours, theirs in zip(resumed, _losses(uninterrupted), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.fixture(scope="module")
def zero2_on_two(tiny_run, tmp_path_factory) -> Path:
    run = _copy_run(tiny_run, tmp_path_factory.mktemp("two") / "run")
    _train(run, "train.max_steps=40", "train.evaluation.eval_every=4", options=_processes(2, "zero2"))
    return run


@pytest.fixture(scope="module")
def zero3_on_two(tiny_run, tmp_path_factory) -> Path:
    run = _copy_run(tiny_run, tmp_path_factory.mktemp("two-zero3") / "run")
    _train(run, "train.max_steps=40", "train.evaluation.eval_every=4", options=_processes(2, "zero3"))
    return run


@pytest.mark.parametrize("zero", [2, 3])
def test_a_training_of_two_processes_goes_on_and_ends_with_one(request, tmp_path, zero):
    """Moments of another parameter, or a part in another place, would show in the ten losses after the conversion."""
    run, settings = tmp_path / "run", ("train.max_steps=40", "train.evaluation.eval_every=4")
    on_two = request.getfixturevalue(f"zero{zero}_on_two")
    shutil.copytree(on_two, run, ignore=shutil.ignore_patterns("ckpt", "state-000040", "manifest.json"))
    for ours, theirs in zip(_train(run, *settings), _losses(on_two), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert not list((run / "train").glob("*.converted"))
    (newest,) = (run / "train").glob("state-000040/position.json")
    assert json.loads(newest.read_text())["processes"] == 1, "two would take this state for one of their own"
    before = _losses(run)
    shutil.rmtree(run / "ckpt")
    assert _train(run, *settings, options=_processes(2, "zero3")) == before, "finished: no state is loaded"
    assert (run / "ckpt" / "model.safetensors").is_file()


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_two_processes_give_the_curve_of_one(request, uninterrupted, zero):
    """fp32, same global batch: sums run in another order, so 1e-4 relative over 12 steps; a wrong denominator, share or
    learning rate is off by far more. Forecasts fall inside these steps: what they leave behind would show too."""
    run = request.getfixturevalue(f"{zero}_on_two")
    for ours, theirs in zip(_losses(run)[:12], _losses(uninterrupted)[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["supervised_tokens"] == theirs["supervised_tokens"]
        assert ours["learning_rate"] == theirs["learning_rate"]
    draft = load_draft(run / "ckpt")
    assert all(torch.isfinite(parameter).all() for parameter in draft.head.parameters())


@pytest.mark.parametrize(("zero", "features"), [("zero2", "online"), ("zero3", "offline")])
def test_a_sharded_target_gives_the_same_curve(tiny_run, tmp_path, request, zero, features):
    """Every process holds half of each layer and runs all layers on its own texts. The products have the same operands,
    so the curve equals that of replicated targets bit by bit. Features stored with other batches differ by at most
    1e-4."""
    run = _copy_run(tiny_run, tmp_path / "run")
    settings = ("train.max_steps=40", "train.evaluation.eval_every=4", f"train.data.features={features}")
    said = _launch(run, *settings, "train.target=sharded", options=_processes(2, zero))
    local, total = re.search(r"over 2 processes: this process holds (\d+) of (\d+) bytes", said).groups()
    assert 2 * int(local) == int(total) > 0
    if features == "online":
        _assert_same_run(run, _losses(run), request.getfixturevalue("zero2_on_two"))
        return
    for ours, theirs in zip(_losses(run)[:12], _losses(request.getfixturevalue("uninterrupted"))[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_zero3_follows_a_curriculum(tiny_run, tmp_path):
    """DeepSpeed records the order in which a step uses the modules, and fetches weights ahead by it: an unroll that
    grows, and forecasts deeper than it, must neither end the training nor read weights that are not there yet: a step's
    losses would be off by what an update changes, hundredths; roundings make 2e-4 of it."""
    settings = (
        "train.max_steps=9",
        "train.unroll.curriculum=[0.34,0.33]",
        "train.evaluation.eval_every=2",
        "train.head.layers=2",
    )
    one, two = (
        _train(_copy_run(tiny_run, tmp_path / str(len(options))), *settings, options=options)
        for options in ((), _processes(2, "zero3"))
    )
    assert [len(row["loss_by_step"]) for row in one] == [1] * 3 + [2] * 3 + [3] * 3
    for ours, theirs in zip(one, two, strict=True):
        assert ours["loss_by_step"] == pytest.approx(theirs["loss_by_step"], rel=5e-3)


def test_accumulation_gives_the_same_curve(tiny_run, uninterrupted, tmp_path):
    """Micro-batches of 1 must add up to the mean over the global batch, not to a mean of means."""
    run = _copy_run(tiny_run, tmp_path / "run")
    accumulated = _train(run, "train.max_steps=40", "train.data.micro_batch=1", "train.evaluation.eval_every=40")
    for ours, theirs in zip(accumulated[:12], _losses(uninterrupted)[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_the_gradient_has_the_same_scale(tiny_run, tmp_path):
    """Two processes that accumulate gradients, under ZeRO-2 and ZeRO-3, against one process with the full batch. Adam
    and Muon hide a wrong scale of the gradient, but clipping shows it: every norm is over the recipe's clip. A warning
    says that the clip in the launcher's file is not used."""
    settings = (
        "train.max_steps=6",
        "train.evaluation.eval_every=6",
        "train.optimizer.name=adamw",
        "train.optimizer.max_grad_norm=0.01",
    )
    whole = _train(_copy_run(tiny_run, tmp_path / "one"), *settings)
    for zero in ("zero2", "zero3"):
        run = _copy_run(tiny_run, tmp_path / zero)
        shipped = (REPOSITORY / "recipes" / "accelerate" / f"{zero}.yaml").read_text()
        asked = tmp_path / f"{zero}.yaml"
        asked.write_text(shipped.replace("  zero_stage", "  gradient_clipping: 7\n  zero_stage"))
        options = ("--config_file", str(asked), *_processes(2, zero)[2:])
        said = _launch(run, *settings, "train.data.micro_batch=1", options=options)
        assert said.count("sets gradient_clipping 7.0, but the recipe's value is 0.01") == 1, said
        for ours, theirs in zip(_losses(run), whole, strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3) and theirs["grad_norm"] > 0.01
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.parametrize("processes", [1, 2])
def test_offline_features_give_the_same_curve(tiny_run, uninterrupted, tmp_path, processes):
    """fp32, 1e-4 relative over 12 steps: the features come from other batches, so only roundings differ. Two processes
    write a share each and read both."""
    run = _copy_run(tiny_run, tmp_path / "run")
    rows = _train(run, "train.max_steps=40", "train.data.features=offline", options=_processes(processes, "zero2"))
    for ours, theirs in zip(rows[:12], _losses(uninterrupted)[:12], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert len(list((run / "features").glob("shard-*"))) == processes


def test_bf16_keeps_what_bf16_cannot_show(tiny_run, tmp_path):
    """Updates of 1e-5 are below half a unit in the last place of every bf16 weight above 2^-8: without fp32 master
    weights each would be rounded away, and 40 of them leave such weights where they were."""
    run = _copy_run(tiny_run, tmp_path / "run")
    settings = (
        "train.optimizer.learning_rate=1e-5",
        "train.optimizer.schedule=constant",
        "train.optimizer.warmup_ratio=0",
        "train.head.init=random",
    )
    _train(run, "train.max_steps=40", "train.evaluation.eval_every=40", "train.precision=bf16", *settings)
    draft = load_draft(run / "ckpt")
    start = Eagle3Head(draft.head.config)
    initialise_random(start, seed=0)
    before, after = start.lm_head.weight.detach().bfloat16(), draft.head.lm_head.weight.bfloat16()
    large = before.abs() > 2**-8
    moved = (before != after)[large]
    assert large.float().mean() > 0.5 and moved.float().mean() > 0.5
    assert (after - before).float().abs().max() < 1e-3


def test_wandb_offline(tiny_run, tmp_path):
    """Asked for without an account; a run folder of the id that train/ keeps, so that only a resume goes on in it."""
    pytest.importorskip("wandb")
    run = _copy_run(tiny_run, tmp_path / "run")
    assert len(_train(run, "train.max_steps=3", "train.tracking.wandb=true", WANDB_MODE="offline")) == 3
    name = (run / "train" / "wandb_id").read_text()
    (folder,) = (run / "train" / "wandb").glob("offline-run-*")
    assert folder.name.endswith(name) and (folder / f"run-{name}.wandb").stat().st_size > 0


def test_the_loss_of_the_recipe(tiny_run, tmp_path):
    """Total variation is at most 1; the default's cross-entropy is larger, so the test detects an ignored setting."""
    rows = _train(_copy_run(tiny_run, tmp_path / "run"), "train.max_steps=3", "train.unroll.loss=total_variation")
    assert all(0 < value < 1 for row in rows for value in row["loss_by_step"])


def test_states_of_other_settings_are_refused(tiny_run, tmp_path):
    run = _copy_run(tiny_run, tmp_path / "run")
    _train(run)
    refused = subprocess.run(
        _line(run, "train.optimizer.learning_rate=0.5"), env=_environment(), capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "other settings or data" in refused.stderr and "delete" not in refused.stderr


def test_misspelt_key(tiny_run):
    refused = subprocess.run(
        _line(tiny_run, "train.learning_rat=0.5"), env=_environment(), capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "learning_rate" in refused.stderr and "Traceback" not in refused.stderr.split("toolkit: error")[0]


ON_POLICY = (
    *("train.max_steps=16", "train.on_policy.every=6", "train.save_every=100", "train.evaluation.eval_every=4"),
    *("train.evaluation.real_every=8", "train.evaluation.real_prompts=2", "train.evaluation.real_max_tokens=12"),
)


@pytest.fixture(scope="module")
def on_policy(tiny_chat_run, tmp_path_factory) -> Path:
    run = _copy_run(tiny_chat_run, tmp_path_factory.mktemp("on-policy") / "run")
    _train(run, *ON_POLICY)
    return run


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fresh_rollouts_are_trained_on_and_measured(on_policy):
    """Six steps of four rollouts each go on what the step before them wrote; the engine's values decide the best."""
    rows = _rows(on_policy / "train" / "metrics.jsonl")
    assert [row["rollouts_of_step"] for row in rows if "loss" in row] == [0] * 6 + [6] * 6 + [12] * 4
    written = [row for row in rows if "rollouts" in row]
    assert [row["step"] for row in written] == [6, 12]
    for row in written:
        assert row["rollouts"] + row["rollouts_skipped"] == 24 and row["rollout_tokens_per_s"] > 0
    measured = [row for row in rows if "real" in row]
    assert [row["step"] for row in measured] == [8, 16]
    names = ["chain 3 T=0", "chain 3 T=1", "tree 3x4/12 T=0", "tree 3x4/12 T=1"]
    assert all([one["name"] for one in row["real"]] == names for row in measured)
    training = load_draft(on_policy / "ckpt").meta["training"]
    best = max(measured, key=lambda row: (row["real_accept_length"], row["step"]))
    assert (training["best_step"], training["real_accept_length"]) == (best["step"], best["real_accept_length"])


def test_killed_while_it_writes_fresh_rollouts(tiny_chat_run, on_policy, tmp_path):
    """No state but the one before the rollouts; what was written stays, and the curve is that of a run never killed."""
    run = _copy_run(tiny_chat_run, tmp_path / "run")
    _train_until_killed(run, *ON_POLICY, file="fresh/000012.0.jsonl", until="\n")
    before = (run / "train" / "fresh" / "000012.0.jsonl").read_text().rpartition("\n")[0].splitlines()
    _assert_same_run(run, _train(run, *ON_POLICY), on_policy)
    after = (run / "train" / "fresh" / "000012.jsonl").read_text().splitlines()
    assert before and set(before) <= set(after) and len(after) == len(set(after))
    whole = _rows(on_policy / "train" / "fresh" / "000012.jsonl")
    assert [json.loads(line)["input_ids"] for line in after] == [row["input_ids"] for row in whole]
    written = [row["step"] for row in _rows(run / "train" / "metrics.jsonl") if "rollouts" in row]
    assert written == [6, 12]


def test_fresh_rollouts_on_two_processes(tiny_chat_run, on_policy, tmp_path):
    """ZeRO-3, where no process has the head: each writes a share with the gathered one, and all train on all of it."""
    run = _copy_run(tiny_chat_run, tmp_path / "run")
    for ours, theirs in zip(_train(run, *ON_POLICY, options=_processes(2, "zero3")), _losses(on_policy), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    one, other = (_rows(folder / "train" / "fresh" / "000012.jsonl") for folder in (run, on_policy))
    assert [row["input_ids"] for row in one] == [row["input_ids"] for row in other]


@pytest.mark.parametrize(
    ("rate", "states", "expected"),
    [
        ("1e30", ["state-000001"], ("step 2 is", "the newest state is")),
        ("1e39", [], ("the weights after step 1 are not finite", "no state was stored yet")),
    ],
)
def test_a_diverged_training_ends(tiny_run, tmp_path, rate, states, expected):
    """After a step of 1e30 the loss is not finite, after one of 1e39 no weight is. Neither state is saved."""
    run = _copy_run(tiny_run, tmp_path / "run")
    settings = (
        "train.optimizer.name=adamw",
        f"train.optimizer.learning_rate={rate}",
        "train.save_every=1",
        "train.evaluation.eval_every=99",
    )
    ended = subprocess.run(_line(run, *settings), env=_environment(), capture_output=True, text=True)
    assert ended.returncode != 0
    message = ended.stderr.partition("toolkit: error: ")[2].splitlines()[0]
    assert all(words in message for words in expected) and "lower train.optimizer.learning_rate" in message
    assert [path.name for path in (run / "train").glob("state-*")] == states


def test_a_process_of_the_group_dies(tiny_run, tmp_path):
    """The other process ends too, with a message; else the remaining GPUs would wait without doing any work."""
    run = _copy_run(tiny_run, tmp_path / "run")
    line = _line(run, "train.max_steps=100000", options=_processes(2, "zero2"))
    with (tmp_path / "stderr").open("w") as stderr:
        child = psutil.Popen(line, env=_environment(), stderr=stderr)
        try:
            _wait_for(lambda: (run / "train" / "state-000010").is_dir())
            (victim,) = (one for one in child.children(recursive=True) if one.environ().get("RANK") == "1")
            victim.kill()
            assert child.wait(timeout=120) != 0
        finally:
            for process in [*child.children(recursive=True), child] if child.is_running() else []:
                process.kill()
    said = (tmp_path / "stderr").read_text()
    assert "another training process ended or cannot be reached" in said and "run the same command again" in said


def _wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to this in time"
        time.sleep(0.01)
