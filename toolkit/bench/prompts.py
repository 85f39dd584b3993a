"""Benchmark prompts: files in MT-bench's format, or the forty built-in prompts.

One JSON object per line: `{"question_id": 7, "category": "math", "turns": ["first user turn", "second user turn"]}`.
Other keys (`reference`, ...) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

BUILTIN = "built-in"
BUILTIN_FILE = "builtin_prompts.jsonl"


class PromptsError(ValueError):
    """A prompts file is missing or empty, or has a row that is no prompt."""


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer turn by turn. `task` is the row's `category`."""

    question_id: str
    task: str
    turns: tuple[str, ...]


def builtin_prompts() -> list[Prompt]:
    """Read the forty prompts of the package: five of each of eight kinds of task."""
    text = resources.files("toolkit.bench").joinpath(BUILTIN_FILE).read_text(encoding="utf-8")
    return _parse(text, BUILTIN_FILE, default_task="builtin")


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompts file. The task of a row without a category is the name of the file.

    Raises `PromptsError` with file:line for an invalid row, and for a file without rows.
    """
    path = Path(path)
    if not path.is_file():
        raise PromptsError(
            f"{path} is not a file; give a .jsonl file with question_id, category and turns on each line"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptsError(f"{path} is not UTF-8 text ({error}); expected a plain .jsonl file") from error
    return _parse(text, str(path), default_task=path.stem)


def read_prompt_files(paths: Sequence[str | Path]) -> list[Prompt]:
    """Read one file as `read_prompts` does; of several files, each is one task, and categories are ignored.

    The task has the name of its file, or of its folder when several files have that name. Raises `PromptsError`.
    """
    if len(paths) == 1:
        return read_prompts(paths[0])
    files = [Path(path) for path in paths]
    stems = [file.stem for file in files]
    names = [
        stem if stems.count(stem) == 1 else file.resolve().parent.name for file, stem in zip(files, stems, strict=True)
    ]
    if len(set(names)) < len(names):
        raise PromptsError(f"two of the files {', '.join(map(str, files))} would be one task; rename one of them")
    return [
        Prompt(f"{name}/{prompt.question_id}", name, prompt.turns)
        for name, file in zip(names, files, strict=True)
        for prompt in read_prompts(file)
    ]


def limited(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """Return at most `limit` prompts (None: all), taken evenly from the tasks, in the order of the file.

    Raises `PromptsError` when `limit` is below 1.
    """
    if limit is None or limit >= len(prompts):
        return list(prompts)
    if limit < 1:
        raise PromptsError(f"limit is {limit}; expected at least 1 prompt")
    rank: dict[str, int] = {}
    rounds = []
    for index, prompt in enumerate(prompts):
        rank[prompt.task] = rank.get(prompt.task, -1) + 1
        rounds.append((rank[prompt.task], index))
    chosen = sorted(index for _, index in sorted(rounds)[:limit])
    return [prompts[index] for index in chosen]


def _parse(text: str, where: str, default_task: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    # Only "\n" ends a row: JSON strings may contain U+2028 and the like, where str.splitlines would split.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _row(line, f"{where}:{number}", default_task)
        if prompt.question_id in seen:
            raise PromptsError(
                f"{where}:{number}: question_id {prompt.question_id} was already used in line "
                f"{seen[prompt.question_id]}; give each prompt its own id"
            )
        seen[prompt.question_id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptsError(f"{where} has no rows; at least one prompt is required")
    return prompts


def _row(line: str, where: str, default_task: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptsError(f"{where}: not valid JSON ({error}); expected one JSON object per line") from error
    if not isinstance(row, dict):
        raise PromptsError(
            f"{where}: is a JSON {type(row).__name__}; expected an object with question_id, category and turns"
        )
    if (
        "question_id" not in row
        or not isinstance(row["question_id"], int | str)
        or isinstance(row["question_id"], bool)
    ):
        raise PromptsError(f"{where}: question_id must be a number or a string, not {row.get('question_id')!r}")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise PromptsError(f'{where}: turns must be a list of user turns, not {turns!r}; write "turns": ["..."]')
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise PromptsError(f"{where}: turn {index} must be a non-empty string, not {turn!r}")
    category = row.get("category", "")
    if category is not None and not isinstance(category, str):
        raise PromptsError(f"{where}: category must be a string, not {category!r}")
    return Prompt(question_id=str(row["question_id"]), task=category or default_task, turns=tuple(turns))
