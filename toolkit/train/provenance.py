"""The record of target and training in the draft directory of a trained head."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from toolkit.targets.target import Target
from toolkit.train.state import Position
from toolkit.train_settings import TrainSettings


def training_record(
    settings: TrainSettings, seed: int, target: Target, position: Position, rollouts: int
) -> dict[str, Any]:
    """The draft directory's `toolkit` block for the head of `position.best_step`."""
    return {
        "target": describe_target(target),
        "training": {
            **asdict(settings),
            "seed": seed,
            "steps": position.step,
            "best_step": position.best_step,
            "supervised_tokens": position.supervised_tokens,
            "seconds": round(position.seconds, 1),
            "forecast_accept_length": position.best_forecast,
            "real_accept_length": position.best_real,
            "rollouts": rollouts,
        },
    }


def describe_target(target: Target) -> dict[str, Any]:
    """The record of the target; it is enough for `toolkit serve --draft DIR` to load the target."""
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint,
        "template_sha256": target.template_sha256,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.quantization,
    }
