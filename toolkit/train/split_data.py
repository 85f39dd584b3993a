"""Rollouts, read once: the examples that train, and the held-out batches that a forecast looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.data.batches import Batch, BatchPlan, Example, collate, load_examples
from toolkit.recipe import TrainSettings
from toolkit.target.load import Target

# Held-out rollouts a forecast looks at, at most: its interval is narrow enough by then.
FORECAST_ROLLOUTS = 64


@dataclass(frozen=True)
class Data:
    """Training and held-out examples with the plan of their batches."""

    train: list[Example]
    held_out: list[Batch]
    plan: BatchPlan
    pad_id: int


def read_data(settings: TrainSettings, rollouts: Path, target: Target, seed: int) -> Data:
    """Both splits of a rollouts file. Raises `DataError` when either has nothing to train or forecast on."""
    train, _ = load_examples(rollouts, "train", settings.max_length)
    held_out, _ = load_examples(rollouts, "held_out", settings.max_length)
    pad_id = target.tokenizer.pad_token_id
    pad_id = next(iter(target.stop_ids), 0) if pad_id is None else pad_id
    held_out = sorted(held_out[:FORECAST_ROLLOUTS], key=lambda example: len(example.input_ids))
    size = settings.micro_batch
    batches = [collate(held_out[start : start + size], pad_id) for start in range(0, len(held_out), size)]
    plan = BatchPlan([len(example.input_ids) for example in train], settings.global_batch, seed)
    return Data(train=train, held_out=batches, plan=plan, pad_id=pad_id)
