"""Answers of a rollouts file as the reference of a forecast: the target has written them, so nothing is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit.bench.answers import LoggedAnswer, Question
from toolkit.bench.prompts import Prompt
from toolkit.infer.request.params import SamplingParams
from toolkit.jsonl import DataError, read_rows
from toolkit.log import get_logger
from toolkit.targets.load import full_name
from toolkit.targets.target import Target

logger = get_logger(__name__)

FIELDS = ("id", "messages", "input_ids", "response_spans", "provenance")


def rollout_answers(path: str | Path, target: Target, limit: int | None = None) -> tuple[list[LoggedAnswer], float]:
    """Read the last answer of each row, at most `limit` rows from the first on. Returns them and their temperature.

    Earlier answers are left out: the template has rendered them again, so their ids may be others than the target
    wrote. Raises `DataError` for a row that is no rollout, for answers of another target or of several temperatures,
    for ids or lengths that the target cannot have, and for a file without rows.
    """
    found: list[LoggedAnswer] = []
    temperature: float | None = None
    trained = 0
    for number, row in islice(read_rows(path), limit):
        where = f"{path}:{number}"
        _check_row(row, where, target)
        own = float(row["provenance"].get("temperature", 0.0))
        temperature = own if temperature is None else temperature
        if own != temperature:
            raise DataError(
                f"{where}: the answer is of temperature {own:g}, those before it of {temperature:g}; give a file "
                "of one temperature"
            )
        trained += row.get("split") == "train"
        ids, (start, end) = row["input_ids"], row["response_spans"][-1]
        turns = tuple(message["content"] for message in row["messages"] if message["role"] == "user")
        prompt, params = Prompt(str(row["id"]), Path(path).stem, turns), SamplingParams(temperature=own)
        question = Question(prompt, len(row["response_spans"]) - 1, tuple(ids[:start]), params)
        found.append(LoggedAnswer(question, tuple(ids[start:end]), ()))
    if temperature is None:
        raise DataError(f"{path} has no rows; at least one rollout is required")
    if trained:
        logger.warning(
            "%s: %d of %d answers are of the split for training; a head that was trained on them accepts more there",
            path, trained, len(found),
        )  # fmt: skip
    return found, temperature


def _check_row(row: Mapping[str, Any], where: str, target: Target) -> None:
    absent = [name for name in FIELDS if not row.get(name)]
    if absent:
        raise DataError(
            f"{where}: {', '.join(absent)} missing or empty; a row of `toolkit rollouts` is needed (prompts without "
            "answers are given with --prompts)"
        )
    writer = row["provenance"].get("target")
    if writer is None or full_name(str(writer)) != full_name(target.name):
        raise DataError(
            f"{where}: the answer was written by {writer or 'an unnamed target'}, and the target is {target.name}; "
            "give rollouts of this target"
        )
    ids, (start, end) = row["input_ids"], row["response_spans"][-1]
    if not 0 < start < end <= len(ids) or not 0 <= min(ids) <= max(ids) < target.vocab_size or end > target.max_context:
        raise DataError(
            f"{where}: the last response span is [{start}, {end}) of {len(ids)} ids in {min(ids)}..{max(ids)}; the "
            f"target has a vocabulary of {target.vocab_size} and a context of {target.max_context}"
        )
