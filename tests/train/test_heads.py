"""Every kind of head is trained by its own entry, resumed, and drafts in the engine from what was written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.checkpoint.draft_dir import load_draft
from toolkit.infer.draft_tree import DraftShape
from toolkit.infer.engine import Engine
from toolkit.infer.sampling.sampling_params import SamplingParams
from toolkit.train.initialise import initialise_random

REPOSITORY = Path(__file__).resolve().parents[2]
HEADS = {
    "eagle2": ("eagle2", ("train.layers=2",)),
    "mtp": ("mtp", ("train.layers=2",)),
    "eagle3-1": ("eagle3", ("train.fc_norm=true", "train.norm_output=true", "train.lm_head=frozen")),
}


def _train(head: str, run: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    script = REPOSITORY / "toolkit" / "train" / f"{head}.py"
    line = [sys.executable, str(script), "--recipe", str(run / "recipe.yaml"), f"run_dir={run}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)


def _losses(run: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    return [row["loss_by_step"] for row in rows if "loss" in row]


def _accepted(target, draft, prompts: list[list[int]]) -> float:
    """Drafts accepted a verify step, in chains of 3."""
    engine = Engine(target, draft, DraftShape.chain(3))
    requests = engine.generate(prompts, SamplingParams(max_tokens=24))
    engine.close()
    accepted = [event.accepted for request in requests for event in request.events]
    return sum(accepted) / len(accepted)


@pytest.mark.parametrize("name", HEADS)
def test_trained_resumed_and_served(tiny_run, tiny_target, tmp_path, name):
    """40 steps, then the last 10 again from the state of step 30: the same losses and head to the last bit. In the
    engine it accepts several times what a random head does of what it was trained on, so every weight that serving
    reads was trained and written under its own name."""
    head, overrides = HEADS[name]
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("train", "ckpt"))
    overrides = ("train.max_steps=40", "train.eval_every=40", *overrides)
    done = _train(head, run, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, draft = _losses(run), load_draft(run / "ckpt")
    assert draft.kind == head and draft.meta["training"]["steps"] == 40
    shutil.rmtree(run / "train" / "state-000040")
    done = _train(head, run, *overrides)
    assert done.returncode == 0 and "resumed from" in done.stderr, done.stderr[-3000:]
    assert _losses(run) == losses
    again = load_draft(run / "ckpt").head.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in draft.head.state_dict().items())

    rows = [json.loads(line) for line in (run / "rollouts" / "rollouts.jsonl").read_text().splitlines()]
    prompts = [row["input_ids"][: row["response_spans"][0][0]] for row in rows if row["split"] == "train"]
    trained = _accepted(tiny_target, draft, prompts)
    if head == "eagle3":
        rows_of_target = tiny_target.lm_head.weight[draft.token_map.ids]
        assert torch.equal(draft.head.lm_head.weight, rows_of_target), "frozen"
    initialise_random(draft.head, seed=0)
    assert trained > 0.05 + 3 * _accepted(tiny_target, draft, prompts)


def test_a_script_trains_its_own_kind(tiny_run):
    """A recipe that says mtp, launched as eagle2, must not become either in silence."""
    refused = _train("eagle2", tiny_run, "train.head=mtp")
    assert refused.returncode == 2 and "launch toolkit/train/mtp.py" in refused.stderr
