"""A scripted engine and a synthetic run folder, so that measuring and reporting are tested without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from toolkit.bench.records import make_record
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, VerifyEvent

Script = Callable[[Sequence[int], "DraftShape | None"], list[list[int]]]


class ScriptedEngine:
    """Writes what `script(prompt_ids, shape)` says: one list of tokens per step, the first being prefill's token."""

    def __init__(self, script: Script, log: list[str] | None = None) -> None:
        self.script = script
        self.shape: DraftShape | None = None
        self.log = [] if log is None else log
        self.running: list[tuple[Request, list[list[int]]]] = []
        self.params: list[SamplingParams] = []

    def set_shape(self, shape: DraftShape) -> None:
        self.shape = shape

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams, *, speculative: bool = True) -> Request:
        shape = self.shape if speculative else None
        self.log.append("plain" if shape is None else shape.name)
        self.params.append(params)
        request = Request(list(prompt_ids), params, speculative, token_limit=params.max_tokens)
        self.running.append((request, [list(run) for run in self.script(prompt_ids, shape)]))
        return request

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Request]:
        touched = [request for request, _ in self.running]
        for request, runs in self.running:
            tokens, first = runs.pop(0), not request.output_ids
            request.append_run(tokens, len(tokens) - 1)
            if request.speculative and not first:
                depth = self.shape.num_steps if self.shape else 0
                request.events.append(
                    VerifyEvent(depth, depth, len(tokens) - 1, len(tokens), False, 0.1, 0.2, 0.3, len(self.running))
                )
        self.running = [(request, runs) for request, runs in self.running if runs and not request.finished]
        return touched


class WordTokenizer:
    """Ids are characters' code points; the template writes `role:content|` and then `a:`."""

    chat_template = "words"

    name_or_path = "words"

    def get_chat_template(self) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> str:
        begins = settings.pop("add_generation_prompt", False)
        assert settings == {"tokenize": False}
        text = "".join(f"{message['role'][0]}:{message['content']}|" for message in messages)
        return text + ("a:" if begins else "")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(i) for i in ids)


@pytest.fixture
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def words() -> WordTokenizer:
    return WordTokenizer()


def acceptance_row(task: str, num_steps: int, top_k: int, nodes: int, length: float, speed: float) -> dict[str, Any]:
    rate = [max(0.05, 0.62 - 0.06 * depth) for depth in range(num_steps)]
    return {
        "method": "eagle3",
        "shape": "chain" if top_k == 1 else "tree",
        "num_steps": num_steps,
        "top_k": top_k,
        "num_draft_tokens": nodes,
        "temperature": 0.0,
        "task": task,
        "prompts": 40 if task == "all" else 5,
        "answers": 44 if task == "all" else 6,
        "tokens": 3100,
        "verify_steps": 1623 if task == "all" else 203,
        "truncated_steps": 30,
        "drafted_share": 1.0,
        "accept_length": length,
        "interval": [length - 0.09, length + 0.1],
        "accept_rate": rate,
        "accept_rate_unconditional": [math.prod(rate[: depth + 1]) for depth in range(num_steps)],
        "tokens_per_s": speed,
        "plain_tokens_per_s": 27.31,
        "speedup": speed / 27.31,
        "tokens_equal": True,
        "near_ties": 17 if task == "all" else 2,
        "unequal": 0,
    }


def acceptance_record() -> dict[str, Any]:
    tasks = ("all", "writing", "roleplay", "reasoning", "math", "coding", "extraction", "knowledge", "rewriting")
    rows = [acceptance_row(task, 4, 1, 5, 1.93 + 0.04 * place, 39.4 + place) for place, task in enumerate(tasks)]
    rows += [acceptance_row(task, 4, 4, 16, 2.21 + 0.05 * place, 42.7 + place) for place, task in enumerate(tasks)]
    settings = {"prompts": "built-in", "max_tokens": 96, "temperature": 0.0, "batch": 1, "seed": 0}
    target = {"name": "smollm2-135m", "dtype": "bfloat16"}
    return make_record("acceptance", "toolkit bench acceptance", settings, rows, target=target)


@pytest.fixture
def record() -> dict[str, Any]:
    return acceptance_record()


def write_run(directory: Path) -> Path:
    """A complete run folder with made-up numbers."""
    for name in ("train", "bench", "token_map", "rollouts"):
        (directory / name).mkdir(parents=True)
    lines = []
    for step in range(1, 301):
        lines.append(
            {
                "step": step,
                "loss": 3 + 12 * math.exp(-step / 60) + 0.2 * math.sin(step),
                "tokens": 2000 * step,
                "loss_by_step": [1.0, 2.0],
                "accuracy_by_step": [0.5, 0.4],
                "seconds_per_step": 1.5,
            }
        )
        if step % 25 == 0:
            lines.append({"step": step, "forecast_accept_length": 2.0 - math.exp(-step / 80), "forecast_rate": [0.5]})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "train" / "metrics.jsonl").write_text(text)
    rows = [{"size": 2**bits, "coverage": 1 - 2.2 ** (5 - bits), "distinct": 2**bits} for bits in range(7, 17)]
    report = {
        "size": 8192,
        "coverage": 1 - 2.2**-8,
        "vocab_size": 49152,
        "tokens": 90_000,
        "distinct": 8000,
        "corpus": {"responses": 640},
        "rows": rows,
    }
    (directory / "token_map" / "coverage.json").write_text(json.dumps(report))
    (directory / "bench" / "acceptance.json").write_text(json.dumps(acceptance_record()))
    for stage, seconds in (("rollouts", 161.2), ("train", 480.0)):
        manifest = {"status": "done", "seconds": seconds, "sessions": 1, "headline": f"{stage} made"}
        (directory / stage / "manifest.json").write_text(json.dumps(manifest))
    return directory


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo-run")
