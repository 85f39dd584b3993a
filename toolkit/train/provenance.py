"""What a trained head's directory says of where it came from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from toolkit.targets.load import Target
from toolkit.train.state import Position
from toolkit.train_settings import TrainSettings


def training_record(
    settings: TrainSettings, seed: int, target: Target, position: Position, rollouts: int
) -> dict[str, Any]:
    """Target and training of the head of `position.best_step`, for the draft directory's `toolkit` block."""
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
    """What a draft directory says of its target: enough for `toolkit serve --draft DIR` to load it again."""
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint,
        "template_sha256": target.template_sha256,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.quantization,
    }
