"""What two processes compute together equals what one computes: a target by tensor parallel, rows split in two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.errors import TargetError
from toolkit.infer.parallel.ranks import ParallelError
from toolkit.recipe import load_recipe
from toolkit.train import accelerator
from toolkit.train.row_split import _split_attention

REPOSITORY = Path(__file__).resolve().parents[2]


def of_both(case: str, folder: Path) -> list[dict[str, Any]]:
    """What each process of a case found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
    line = [sys.executable, "-m", "tests.train.two_processes", case, str(folder)]
    running = [
        subprocess.Popen([*line, str(rank)], env=environment, cwd=REPOSITORY, text=True, stdout=-1, stderr=-1)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors for _, errors in said)
    return [json.loads(output.splitlines()[-1]) for output, _ in said]


@pytest.fixture(scope="module")
def biased_run(tiny_run, tiny_target_directory, tmp_path_factory) -> Path:
    """A recipe for the tiny target with biases, of which a sum over processes may count some twice."""
    folder = tmp_path_factory.mktemp("biased")
    shutil.copytree(tiny_target_directory, folder / "target")
    torch.manual_seed(7)
    sizes = {"attention_bias": True, "mlp_bias": True, "initializer_range": 0.2}
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_target_directory, **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "target")
    recipe = yaml.safe_load((tiny_run / "recipe.yaml").read_text())
    recipe["target"]["model"] = str(folder / "target")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.mark.process
def test_features_by_tensor_parallel_are_those_of_the_whole_target(biased_run):
    """fp32; each process has the features of its own batch, and holds half of each layer. What training reads of the
    weights, a layer to copy and the checksum of a resumed run, is that of the whole target."""
    for found in of_both("tensor_parallel", biased_run):
        assert max(found["differences"]) < 1e-5
        assert 2 * found["rows"][0] == found["rows"][1] and found["same_layer"] and found["same_checksum"]


@pytest.mark.process
def test_rows_in_two_parts_train_as_whole_ones(tiny_run):
    """fp32: losses, counts of right predictions and gradients. A position, key, token, label or teacher's row that is
    not the one of the whole row moves them by far more; so does a gradient that does not come back."""
    for found in of_both("rows_in_two", tiny_run):
        assert len(found) == 6 and max(found.values()) < 1e-5, found


def test_heads_that_do_not_divide_are_refused_before_loading(tiny_run, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(accelerator, "_load", lambda *_: pytest.fail("the target was loaded"))
    recipe = load_recipe(tiny_run / "recipe.yaml", ["train.target=tensor"])
    with pytest.raises(ParallelError, match=r"4 attention heads and 2 key heads, which 3 .*set train.target=sharded"):
        accelerator.frozen_target(recipe, "cpu", SimpleNamespace(num_processes=3))


def test_the_attention_of_the_target_must_be_plain(tiny_target):
    """Half of the positions would see too far, or not far enough."""
    split = SimpleNamespace(longest=64)
    with pytest.raises(TargetError, match="has a sliding window.*train.data.split_rows=1"):
        _split_attention(tiny_target.layers[0], *[torch.zeros(1, 2, 4, 8)] * 3, None, row_split=split, sliding_window=8)
