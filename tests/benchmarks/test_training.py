"""The training benchmarks on a tiny target: the published recipe is what it says, and the commands make their records.
One file: a process can found the group of its trainings only once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState

from toolkit.bench.records import read_record
from toolkit.tokenmap.files import save_token_map
from toolkit.tokenmap.token_map import TokenMap


@pytest.fixture(scope="module")
def run_folder(tiny_target, tiny_target_directory, tmp_path_factory) -> Path:
    """Rollouts of random ids, a token map, and the recipe of a run."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "rollouts").mkdir()
    generator = torch.Generator().manual_seed(0)
    with (folder / "rollouts" / "rollouts.jsonl").open("w") as handle:
        for index in range(12):
            ids = torch.randint(3, tiny_target.vocab_size, (12 + index,), generator=generator).tolist()
            split = "held_out" if index < 3 else "train"
            row = {"id": f"r{index:02}", "input_ids": ids, "response_spans": [[6, len(ids)]], "split": split}
            handle.write(json.dumps(row) + "\n")
    half = TokenMap.from_ids(range(0, tiny_target.vocab_size, 2), tiny_target.vocab_size)
    save_token_map(folder / "token_map" / "token_map.safetensors", half)
    data = {"global_batch": 2, "micro_batch": 2, "features": "offline"}
    unroll = {"ttt_steps": 3, "curriculum": [0.5]}
    recipe = {
        "name": "tiny",
        "target": {"model": str(tiny_target_directory), "dtype": "float32"},
        "run_dir": str(folder),
        "rollouts": {"keep_features": True},
        "train": {"precision": "fp32", "data": data, "unroll": unroll, "head": {"lm_head": "frozen"}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def alone():
    """The environment without the group of one that trainings in this process found. It ends behind the last of them:
    trainings that later tests start would take over its variables, and with them a port that is in use."""
    before = dict(os.environ)
    yield before
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


def test_training_steps(script, run_folder, monkeypatch, tmp_path, alone) -> None:
    """One process does it all here."""
    training, out = script("training"), tmp_path / "record.json"

    def here(_call, job):
        AcceleratorState._reset_state(reset_partial_state=True)
        return training.step_row(job)

    monkeypatch.setattr(training, "in_process_of_its_own", here)
    sizes = ["--recipe", str(run_folder / "recipe.yaml"), "--step-tokens", "40", "--steps", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["training.py", *sizes, "--out", str(out)])
    assert training.main() == 0
    rows = read_record(out, "training")["rows"]
    assert [row["variant"] for row in rows] == ["published", "ours", "ours, stored features", "published", "ours"]
    assert rows[2]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4), "the same step"


def test_few_tokens(script, run_folder, monkeypatch, tmp_path, alone) -> None:
    """The rate is chosen by the validation half; the test half sees the chosen head alone; nothing is done twice."""
    few, done = script("few_tokens"), []

    def here(wanted, at_once, ends):
        for cell in wanted:
            AcceleratorState._reset_state(reset_partial_state=True)
            done.append(cell.key)
            yield cell, few.trained(cell, ends)

    monkeypatch.setattr(few, "in_processes", here)
    monkeypatch.setattr(few, "in_process_of_its_own", lambda call, *arguments: call(*arguments))
    recipe = ["--recipe", str(run_folder / "recipe.yaml"), "train.optimizer.name=adamw", "--tokens", "60"]
    recipe += ["--only", "ours"]
    sizes = ["--seeds", "1", "--max-tokens", "8", "--rates", "1e-3", "1e-2"]
    out = tmp_path / "record.json"
    paths = ["--rows", str(tmp_path / "rows.jsonl"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["few_tokens.py", f"run:{run_folder}", *recipe, *sizes, *paths])
    assert few.main() == 0
    record = read_record(out, "training")
    over = [row for row in record["rows"] if row["seed"] is None]
    assert [(row["variant"], row["tries"]) for row in over] == [("ours", 2)]
    for row in over:
        tried = [one for one in record["rows"] if (one["variant"], one["split"]) == (row["variant"], "validation")]
        assert row["learning_rate"] == max(tried, key=lambda one: one["forecast"])["learning_rate"]
    assert len(done) == len(set(done)) == 3
    assert few.main() == 0 and len(done) == 3
