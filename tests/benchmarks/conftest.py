"""The scripts of benchmarks/ as modules, and tiny directories for them."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState

from toolkit.checkpoint.draft_dir import save_draft
from toolkit.tokenmap.files import save_token_map
from toolkit.tokenmap.token_map import TokenMap

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Imports a script by its name, the way Python does when it is run by path: from its own folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def draft_directory(tiny_target_directory, tiny_draft, tmp_path_factory) -> Path:
    """The tiny head, which names the tiny target."""
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    directory = tmp_path_factory.mktemp("draft")
    return save_draft(directory, tiny_draft.head.state_dict(), tiny_draft.head.config, tiny_draft.token_map, meta)


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
    train = {"ttt_steps": 3, "global_batch": 2, "micro_batch": 2, "precision": "fp32", "features": "offline"}
    recipe = {
        "name": "tiny",
        "target": {"model": str(tiny_target_directory), "dtype": "float32"},
        "run_dir": str(folder),
        "rollouts": {"keep_features": True},
        "train": {**train, "ttt_curriculum": [0.5], "lm_head": "frozen"},  # as the demo recipe has them
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def alone():
    """Ends the group of one that trainings in this process found: trainings that later tests start would take over
    its variables, and with them a port that is in use."""
    before = dict(os.environ)
    yield
    torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)
