"""Rollouts of the tiny target, a token map and a recipe: everything a training needs, made in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from toolkit.target.load import Target
from toolkit.tokenmap.files import save_token_map
from toolkit.tokenmap.token_map import TokenMap


@torch.no_grad()
def greedy(target: Target, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids[len(prompt) :]


def write_tiny_rollouts(target: Target, path: Path, count: int = 24, tokens: int = 24) -> None:
    generator = torch.Generator().manual_seed(3)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        for index in range(count):
            length = int(torch.randint(4, 12, (1,), generator=generator))
            prompt = torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()
            ids = prompt + greedy(target, prompt, tokens)
            row = {
                "id": f"r{index}",
                "messages": [],
                "input_ids": ids,
                "response_spans": [[length, len(ids)]],
                "finish_reason": "length",
                "split": "held_out" if index % 8 == 0 else "train",
                "provenance": {},
            }
            handle.write(json.dumps(row) + "\n")


@pytest.fixture(scope="session")
def tiny_run(tiny_target, tiny_target_directory, tmp_path_factory) -> Path:
    """A folder with rollouts/, token_map/ and recipe.yaml for a 12-step fp32 training of the tiny target."""
    folder = tmp_path_factory.mktemp("tiny-run")
    write_tiny_rollouts(tiny_target, folder / "rollouts" / "rollouts.jsonl")
    save_token_map(
        folder / "token_map" / "token_map.safetensors",
        TokenMap.from_ids(range(0, tiny_target.vocab_size, 2), tiny_target.vocab_size),
    )
    recipe = {
        "name": "tiny",
        "target": {"model": str(tiny_target_directory), "dtype": "float32"},
        "run_dir": str(folder),
        "train": {
            "ttt_steps": 3,
            "max_steps": 12,
            "global_batch": 4,
            "micro_batch": 4,
            "precision": "fp32",
            "learning_rate": 1.0e-2,
            "muon_learning_rate": 0.1,
            "save_every": 10,
            "eval_every": 20,
            "epochs": 99,
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder
