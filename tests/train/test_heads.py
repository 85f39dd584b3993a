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
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.train.warm_start import initialise_random

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).resolve().parents[2]
HEADS = {
    "dspark": ("dspark", ("train.unroll.loss=dspark", "train.head.lm_head=frozen", "train.unroll.anchors=9")),
    "dfly": (
        "dspark",
        (
            "train.head.correction=dfly",
            "train.head.causal=true",
            "train.unroll.loss=lk_hybrid",
            "train.data.pack=true",
        ),
    ),
    "eagle2": ("eagle2", ("train.head.layers=2", "train.data.pack=true")),
    "mtp": ("mtp", ("train.head.layers=2", "train.unroll.checkpointing=true")),
    "eagle3-1": (
        "eagle3",
        (
            "train.head.fc_norm=true",
            "train.head.norm_output=true",
            "train.head.lm_head=frozen",
            "train.unroll.anchors=9",
            "train.unroll.curriculum=[0.2,0.6]",
            "train.head.layers=2",
        ),
    ),
}
# All trainings in one process: importing the trainer takes longer than each of them.
DRIVER = """
import json, sys
from accelerate.state import AcceleratorState
from toolkit.pipeline.train_entry import train_from_command_line
for head, arguments in json.loads(sys.argv[1]):
    status = train_from_command_line(head, arguments)
    assert status == 0, (head, status)
    AcceleratorState._reset_state(reset_partial_state=True)
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "TOOLKIT_LOG": "info"}


def _train(jobs: list[tuple[str, list[str]]]) -> str:
    line = [sys.executable, "-c", DRIVER, json.dumps(jobs)]
    done = subprocess.run(line, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def runs(tiny_run, tmp_path_factory) -> Path:
    """A folder with a run of 40 steps by head: whole, and again/ from the whole one's state of step 30."""
    folder = tmp_path_factory.mktemp("heads")
    jobs = []
    for again in (False, True):
        for name, (head, overrides) in HEADS.items():
            run = folder / f"{name}-again" if again else folder / name
            if not again:
                shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("train", "ckpt"))
            settings = [f"run_dir={run}", "train.max_steps=40", "train.evaluation.eval_every=40", *overrides]
            jobs.append((head, ["--recipe", str(tiny_run / "recipe.yaml"), *settings]))
    _train(jobs[: len(HEADS)])
    for name in HEADS:
        shutil.copytree(folder / name, folder / f"{name}-again", ignore=shutil.ignore_patterns("ckpt", "state-000040"))
    stderr = _train(jobs[len(HEADS) :])
    assert stderr.count("resumed from") == len(HEADS)
    return folder


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
def test_trained_resumed_and_served(runs, tiny_target, name):
    """40 steps, and the last 10 of them again from a state: the same losses and head to the last bit. In the engine it
    accepts several times what a random head does of what it was trained on, so every weight that serving reads was
    trained and written under its own name."""
    head, draft = HEADS[name][0], load_draft(runs / name / "ckpt")
    assert draft.kind == head and draft.meta["training"]["steps"] == 40
    assert len(_losses(runs / name)) == 40 and _losses(runs / f"{name}-again") == _losses(runs / name)
    again = load_draft(runs / f"{name}-again" / "ckpt").head.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in draft.head.state_dict().items())
    rows = [json.loads(line) for line in (runs / name / "rollouts" / "rollouts.jsonl").read_text().splitlines()]
    prompts = [row["input_ids"][: row["response_spans"][0][0]] for row in rows if row["split"] == "train"]
    trained = _accepted(tiny_target, draft, prompts)
    if head == "eagle3":
        rows_of_target = tiny_target.lm_head.weight[draft.token_map.ids]
        assert torch.equal(draft.head.lm_head.weight, rows_of_target), "frozen"
        depths = [len(losses) for losses in _losses(runs / name)]
        assert depths == [1] * 8 + [2] * 24 + [max(depths)] * 8 and max(depths) > 2, (
            "the curriculum, and a resume in it"
        )
    initialise_random(draft.head, seed=0)
    assert trained > 0.05 + 3 * _accepted(tiny_target, draft, prompts)
