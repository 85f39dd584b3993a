"""Rollouts of the tiny target, a token map and a recipe: everything a training needs, made in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from toolkit.data.batches import Batch, Example, collate
from toolkit.data.conversations import Conversation
from toolkit.data.rollouts import write_rollouts
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.recipe import RolloutSettings
from toolkit.targets.target import Target
from toolkit.tokenmap.files import save_token_map
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.engine_client import engine_generate
from toolkit.train.step import TrainedHead, micro_step, supervised_counts
from toolkit.train.target_side import TargetSide


@torch.no_grad()
def greedy(target: Target, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids[len(prompt) :]


def answers_of(target: Target, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """What the engine writes without a head."""
    engine = Engine(target)
    requests = engine.generate(prompts, params)
    engine.close()
    return [one.output_ids for one in requests]


def answered(prompts: list[list[int]], answers: list[list[int]]) -> Batch:
    """Supervised are the answers."""
    texts = zip(prompts, answers, strict=True)
    return collate([Example("", p + a, [False] * len(p) + [True] * len(a)) for p, a in texts], pad_id=0)


def fit(model: TrainedHead, side: TargetSide, batch: Batch, steps: int, updates: int, rate: float = 3e-3) -> None:
    """Train a head on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    counts = supervised_counts(batch, steps)
    for _ in range(updates):
        optimizer.zero_grad()
        micro_step(model, side, batch, counts, steps).loss.backward()
        optimizer.step()


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
            "epochs": 99,
            "max_steps": 12,
            "precision": "fp32",
            "save_every": 10,
            "unroll": {"ttt_steps": 3},
            "optimizer": {"learning_rate": 1.0e-2, "muon_learning_rate": 0.1},
            "data": {"global_batch": 4, "micro_batch": 4},
            "evaluation": {"eval_every": 20, "real_every": None},
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="session")
def tiny_chat_run(tiny_run, tiny_target, tmp_path_factory) -> Path:
    """The same with rollouts that hold their messages, as `toolkit rollouts` writes them: the engine can be asked."""
    folder = tmp_path_factory.mktemp("tiny-chat-run")
    asked = [
        Conversation(f"c{index:02}", ({"role": "user", "content": f"write {index} short stories about apples"},))
        for index in range(20)
    ]
    settings = RolloutSettings(max_tokens=16, held_out=0.2)
    engine = Engine(tiny_target, max_running_requests=20)
    path = folder / "rollouts" / "rollouts.jsonl"
    write_rollouts(
        asked,
        engine_generate(engine),
        tiny_target.tokenizer,
        settings,
        path,
        target=tiny_target.name,
        seed=0,
        max_context=512,
    )
    engine.close()
    (folder / "token_map").symlink_to(tiny_run / "token_map")
    recipe = yaml.safe_load((tiny_run / "recipe.yaml").read_text())
    rollouts = {"max_tokens": 16, "max_running_requests": 8}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "run_dir": str(folder), "rollouts": rollouts}))
    return folder
