"""Reads the rollouts of a training: training examples, held-out batches for forecasts and prompts for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.data.batches import Batch, BatchPlan, Example, collate
from toolkit.data.examples import Examples, load_examples
from toolkit.errors import TrainError
from toolkit.jsonl import DataError, read_rows
from toolkit.log import get_logger
from toolkit.targets.target import Target
from toolkit.train_settings import TrainSettings

log = get_logger(__name__)

# The most held-out rollouts of a forecast; with so many its interval is narrow enough.
FORECAST_ROLLOUTS = 64


@dataclass(frozen=True)
class Data:
    """train: examples, which may be read from the file only when a batch needs them. plan: the batches of an epoch."""

    train: Sequence[Example]
    held_out: list[Batch]
    plan: BatchPlan
    pad_id: int


def read_data(settings: TrainSettings, rollouts: Path, target: Target, seed: int) -> Data:
    """Both splits of a rollouts file. Raises `DataError` when a split has no usable rollout."""
    held_out = list(islice(_examples(settings, rollouts, "held_out", target), FORECAST_ROLLOUTS))
    train = _train_examples(settings, rollouts, target)
    pad_id = _pad_id(target)
    held_out.sort(key=lambda example: len(example.input_ids))
    size = settings.data.micro_batch
    batches = [collate(held_out[start : start + size], pad_id) for start in range(0, len(held_out), size)]
    return Data(train=train, held_out=batches, plan=_plan(settings, train, seed), pad_id=pad_id)


def with_fresh(data: Data, settings: TrainSettings, rollouts: Path, target: Target, seed: int) -> Data:
    """The same held-out batches with the train split of another rollouts file."""
    train = _train_examples(settings, rollouts, target)
    return replace(data, train=train, plan=_plan(settings, train, seed))


class WholeTexts(Sequence[Example]):
    """Examples all of whose ids are supervised. No id counts as greedy: those of prompts are not the target's."""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.lengths = examples, examples.lengths

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        example = self.examples[index]
        return replace(example, response=[True] * len(example.input_ids), greedy=False)


def _train_examples(settings: TrainSettings, rollouts: Path, target: Target) -> Examples | WholeTexts:
    examples = _examples(settings, rollouts, "train", target)
    return WholeTexts(examples) if settings.data.supervise == "all" else examples


def _plan(settings: TrainSettings, train: Examples | WholeTexts, seed: int) -> BatchPlan:
    return BatchPlan(train.lengths, settings.data.global_batch, seed)


def _examples(settings: TrainSettings, rollouts: Path, split: str, target: Target) -> Examples:
    """One split; examples are cut to train.data.max_length and to the target's context."""
    limit = min(settings.data.max_length, target.max_context)
    # Rollouts do not record the quantization of their target.
    known = target.name if target.quantization is None else None

    def check(example: Example) -> None:
        if not 0 <= min(example.input_ids) <= max(example.input_ids) < target.vocab_size:
            raise DataError(
                f"{rollouts}: rollout {example.id} has ids from {min(example.input_ids)} to {max(example.input_ids)}, "
                f"but the target {target.name} has ids 0 to {target.vocab_size - 1}: it was written with another "
                "tokenizer; write the rollouts again with this target"
            )

    return load_examples(rollouts, split, limit, known, check)[0]


def _pad_id(target: Target) -> int:
    """The id of padding. It must have an embedding row, and some tokenizers pad with an id that has none."""
    given = target.tokenizer.pad_token_id
    if given is not None and given < target.vocab_size:
        return given
    return next(iter(sorted(target.stop_ids)), 0)


class HeldOutPrompt(NamedTuple):
    """The ids before the last answer of a held-out rollout."""

    id: str
    prompt: list[int]


def read_held_out(rollouts: Path, count: int, longest: int) -> list[HeldOutPrompt]:
    """The first `count` held-out rollouts in the order of their ids, without prompts of more than `longest` ids.

    Memory: these rollouts only. Raises `TrainError` when no prompt is left.
    """
    rows = unusable = 0

    def usable() -> Iterator[dict[str, Any]]:
        nonlocal rows, unusable
        for _, row in read_rows(rollouts):
            if row.get("split") != "held_out":
                continue
            rows += 1
            if row["response_spans"] and 0 < row["response_spans"][-1][0] <= longest:
                yield row
            else:
                unusable += 1

    first = nsmallest(count, usable(), key=lambda row: str(row["id"]))
    if unusable:
        log.warning(
            "%d of %d held-out rollouts are not used in measurements: they have no prompt, or one of more than %d ids",
            unusable,
            rows,
            longest,
        )
    if not first:
        raise TrainError(
            f"{rollouts} has no usable held-out prompt ({rows} held-out rows; a prompt needs 1 to {longest} ids); "
            "raise rollouts.held_out, or switch the engine's measurements off with train.evaluation.real_every=null"
        )
    return [HeldOutPrompt(str(row["id"]), row["input_ids"][: row["response_spans"][-1][0]]) for row in first]
