"""Benchmark prompts: files in MT-bench's format, files of conversations, BENCHMARKS by name, or the built-in prompts.

One JSON object per line: `{"question_id": 7, "category": "math", "turns": ["first user turn", "second user turn"]}`,
or a conversation (`messages`, or ShareGPT's `conversations`), whose system message and user turns are taken.
Other keys (`reference`, ...) are ignored. BENCHMARKS are read from Hugging Face's hub through `datasets`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.data.conversations import conversation_from_row
from toolkit.data.dataset_rows import load_rows
from toolkit.jsonl import DataError, read_rows
from toolkit.log import get_logger

logger = get_logger(__name__)

BUILTIN = "built-in"
# By name: the dataset, and the column of its user turns: one text, or a list of them.
BENCHMARKS = {
    "mt-bench": ("hub:HuggingFaceH4/mt_bench_prompts:train", "prompt"),
    "humaneval": ("hub:openai/openai_humaneval:test", "prompt"),
    "gsm8k": ("hub:openai/gsm8k/main:test", "question"),
    "speed-bench": ("hub:nvidia/SPEED-Bench/qualitative:test", "turns"),
}
# SPEED-Bench has this in place of turns whose licence forbids a copy; NVIDIA's prepare_data.py fetches them.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer turn by turn. `task` is the row's `category`. system: the system message, if any."""

    question_id: str
    task: str
    turns: tuple[str, ...]
    system: str | None = None


def builtin_prompts() -> list[Prompt]:
    """Read the forty prompts of the package: five of each of eight kinds of task."""
    return read_prompts(Path(__file__).with_name("builtin_prompts.jsonl"))


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompts file, or one of BENCHMARKS by its name, which is the task of a row without a category.

    Raises `DataError` with file:line for an invalid row, for a file without rows and an unreadable dataset.
    """
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in _benchmark_rows(str(path)) if str(path) in BENCHMARKS else read_rows(path):
        where, stem = f"{path}:{number}", Path(path).stem
        prompt = _prompt(row, where, stem, number)
        if prompt.question_id in seen:
            raise DataError(
                f"{path}:{number}: question_id {prompt.question_id} was already used in line "
                f"{seen[prompt.question_id]}; give each prompt its own id"
            )
        seen[prompt.question_id] = number
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path} has no rows; at least one prompt is required")
    return prompts


def _benchmark_rows(name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of one of BENCHMARKS as those of a file; rows whose turns are not in the dataset are left out."""
    source, column = BENCHMARKS[name]
    rows, absent = load_rows(source, streamed=False, seed=None), 0
    for number, row in enumerate(rows, 1):
        turns = [row[column]] if isinstance(row[column], str) else list(row[column])
        if any(PLACEHOLDER in turn for turn in turns):
            absent += 1
            continue
        kept = {key: row[key] for key in ("question_id", "category") if row.get(key) is not None}
        yield number, {**kept, "turns": turns}
    if absent:
        logger.warning("%d of the %d rows of %s are placeholders and are left out", absent, len(rows), name)


def _prompt(row: Mapping[str, Any], where: str, default_task: str, number: int) -> Prompt:
    conversation = conversation_from_row(row, where, f"{default_task}-{number}")
    task = row.get("category") or default_task
    if not isinstance(task, str):
        raise DataError(f"{where}: category is {task!r}; expected a string")
    first = conversation.messages[0]
    system = first["content"] if first["role"] == "system" else None
    turns = tuple(one["content"] for one in conversation.messages if one["role"] == "user")
    identity = row.get("question_id")
    return Prompt(conversation.id if identity is None else str(identity), task, turns, system)


def read_prompt_files(paths: Sequence[str | Path]) -> list[Prompt]:
    """Read one file or name as `read_prompts` does; of several, each is one task, and categories are ignored.

    The task has the name of its file, or of its folder when several files have that name. Raises `DataError`.
    """
    if len(paths) == 1:
        return read_prompts(paths[0])
    files = [Path(path) for path in paths]
    stems = [file.stem for file in files]
    names = [
        stem if stems.count(stem) == 1 else file.resolve().parent.name for file, stem in zip(files, stems, strict=True)
    ]
    if len(set(names)) < len(names):
        raise DataError(f"two of the files {', '.join(map(str, files))} would be one task; rename one of them")
    return [
        replace(prompt, question_id=f"{name}/{prompt.question_id}", task=name)
        for name, file in zip(names, files, strict=True)
        for prompt in read_prompts(file)
    ]


def limited(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """Return at most `limit` prompts (None: all), taken evenly from the tasks, in the order of the file."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    rank: dict[str, int] = {}
    rounds = []
    for index, prompt in enumerate(prompts):
        rank[prompt.task] = rank.get(prompt.task, -1) + 1
        rounds.append((rank[prompt.task], index))
    chosen = sorted(index for _, index in sorted(rounds)[:limit])
    return [prompts[index] for index in chosen]
