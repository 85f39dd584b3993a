"""Reads the rollouts of a training: the examples of the train split, and the held-out batches for forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from toolkit.data.batches import Batch, BatchPlan, Example, collate
from toolkit.data.examples import Examples, load_examples
from toolkit.jsonl import DataError
from toolkit.targets.target import Target
from toolkit.train_settings import TrainSettings

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
    train = _examples(settings, rollouts, "train", target)
    pad_id = _pad_id(target)
    held_out.sort(key=lambda example: len(example.input_ids))
    size = settings.data.micro_batch
    batches = [collate(held_out[start : start + size], pad_id) for start in range(0, len(held_out), size)]
    return Data(train=train, held_out=batches, plan=_plan(settings, train, seed), pad_id=pad_id)


def with_fresh(data: Data, settings: TrainSettings, rollouts: Path, target: Target, seed: int) -> Data:
    """The same held-out batches with the train split of another rollouts file."""
    train = _examples(settings, rollouts, "train", target)
    return replace(data, train=train, plan=_plan(settings, train, seed))


def _plan(settings: TrainSettings, train: Examples, seed: int) -> BatchPlan:
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
