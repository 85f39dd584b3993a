"""Learning rate and unroll steps as pure functions of the optimizer step, so that any number of processes and a
resumed run compute the same."""

from __future__ import annotations

import math
from itertools import accumulate

from toolkit.errors import TrainError
from toolkit.train_settings import TrainSettings


def rate_factor(step: int, total_steps: int, settings: TrainSettings) -> float:
    """Share of the peak learning rate at the 0-based optimizer step: linear warm-up, then decay to 0.1, or constant."""
    warmup = max(1, round(settings.optimizer.warmup_ratio * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return {
        "constant": 1.0,
        "linear": 1.0 - 0.9 * done,
        "cosine": 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * done)),
    }[settings.optimizer.schedule]


def total_steps(settings: TrainSettings, batches_per_epoch: int) -> int:
    """Optimizer steps of a run: `epochs`, at most `max_steps`. Raises `TrainError` if it would end before the first
    fresh rollouts."""
    steps = max(1, math.ceil(settings.epochs * batches_per_epoch))
    steps = steps if settings.max_steps is None else min(steps, settings.max_steps)
    if settings.on_policy.every is not None and settings.on_policy.every >= steps:
        raise TrainError(
            f"train.on_policy.every = {settings.on_policy.every}, but the training has {steps} steps and would write "
            "no fresh rollouts; lower it, or set train.on_policy.every=null"
        )
    return steps


def unroll_steps(step: int, total_steps: int, settings: TrainSettings) -> int:
    """Unroll steps at the 0-based optimizer step: 1, 2, .. for the shares of the curriculum, then ttt_steps."""
    ends = accumulate(settings.unroll.curriculum)
    return next(
        (depth for depth, end in enumerate(ends, 1) if step < round(end * total_steps)), settings.unroll.ttt_steps
    )
