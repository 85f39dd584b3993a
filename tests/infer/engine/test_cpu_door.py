"""Which float an "auto" target gets on a CPU, by what it is for and what multiplies it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from toolkit.infer.engine import cpu_door
from toolkit.infer.engine.cpu_door import load_target
from toolkit.pipeline.run import Run
from toolkit.recipe import load_recipe
from toolkit.targets.load import DTYPES
from toolkit.targets.target import Target
from toolkit.train.accelerator import frozen_target


@pytest.fixture
def bf16_model(monkeypatch, tmp_path, tiny_target: Target):
    """A directory whose config says bfloat16, on a CPU where torch multiplies float32 faster."""
    monkeypatch.setattr(cpu_door, "fastest_cpu_dtype", lambda: torch.float32)
    tiny_target.model.save_pretrained(tmp_path / "model")
    tiny_target.tokenizer.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return tmp_path / "model"


def pretend_products(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """A machine with our own products, or without. Nothing is multiplied by them: a target is not packed."""
    monkeypatch.setattr(cpu_door.blocked_product, "available", lambda: ours)
    monkeypatch.setattr(cpu_door, "pack_linears", lambda _model, **_named: 0)


@pytest.mark.parametrize(
    "use, ours, quantization, expected",
    [
        ("rollouts", False, None, torch.float32),
        ("training", True, None, torch.float32),  # torch's products are its own
        ("rollouts", False, "int8", torch.bfloat16),
        ("serving", False, None, torch.bfloat16),
    ],
)
def test_an_auto_target_of_a_bf16_config(monkeypatch, bf16_model, use, ours, quantization, expected):
    """For batches the one that what multiplies them has faster; a request at a time reads weights, and int8 products
    pay for each bit of an input."""
    pretend_products(monkeypatch, ours)
    assert load_target(bf16_model, quantization=quantization, use=use).dtype == expected
    other = "float32" if expected == torch.bfloat16 and quantization is None else "bfloat16"
    assert load_target(bf16_model, dtype=other, use=use).dtype == DTYPES[other], "what is asked for is taken"


@pytest.mark.parametrize("ours, keeps, expected", [(True, False, torch.bfloat16), (True, True, torch.float32)])
def test_what_writes_a_runs_rollouts(monkeypatch, bf16_model, ours, keeps, expected):
    """In our products' dtype, unless it keeps features: training would throw away those of another than its target's.
    Training and measuring have theirs either way."""
    pretend_products(monkeypatch, ours)
    settings = {
        "name": "tiny",
        "target": {"model": str(bf16_model)},
        "run_dir": str(bf16_model.parent / "run"),
        "prompts": {"synthesize": 4},
        "rollouts": {"keep_features": keeps},
        "train": {"data": {"features": "offline"}, "unroll": {"ttt_steps": 2}},
    }
    path = bf16_model.parent / "recipe.yaml"
    path.write_text(json.dumps(settings))
    run = Run(load_recipe(path), path)
    monkeypatch.setattr("toolkit.pipeline.run.best_device", lambda: "cpu")
    assert run.target.dtype == expected
    alone = SimpleNamespace(num_processes=1)
    assert frozen_target(run.recipe, "cpu", alone).dtype == torch.float32
    assert run.load_target("serving").dtype == torch.bfloat16
