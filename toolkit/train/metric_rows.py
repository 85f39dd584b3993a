"""The rows of metrics.jsonl, which the trackers show too.

every step                       `step_row`
train.evaluation.eval_every      `forecast_row`
train.evaluation.real_every      `real_row`
train.on_policy.every            `rollouts_row`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.bench.bootstrap import Forecast
from toolkit.train.real_acceptance import RealAcceptance
from toolkit.train.trained_head import step_weights
from toolkit.train_settings import TrainSettings

SHOWN_STEPS = 50
# Keys of `step_row` that depend on the machine: two runs of one recipe differ in them.
MACHINE_KEYS = (
    "seconds_per_step",
    "tokens_per_s",
    "seconds_target",
    "seconds_head",
    "seconds_optimizer",
    "peak_memory_bytes",
)


@dataclass(frozen=True)
class StepSums:
    """Sums over the global batch of one optimizer step, by step of the unroll [K].

    loss: the mean already. right: right predictions. supervised: supervised predictions. reached: supervised chains
    whose earlier predictions are all right. passed: those of them that are right at this step too.
    """

    loss: torch.Tensor
    right: torch.Tensor
    supervised: torch.Tensor
    reached: torch.Tensor
    passed: torch.Tensor


def step_row(
    sums: StepSums,
    settings: TrainSettings,
    rate_factor: float,
    grad_norm: float | None,
    coverage: float,
    seconds: dict[str, float],
    peak_memory_bytes: int,
) -> dict[str, Any]:
    """The row of one optimizer step.

    loss: sum of `step_weights`[k] * loss_by_step[k]. accuracy_by_step: share of right predictions at step k.
    conditional_accuracy_by_step: the same over chains whose earlier predictions are all right; null without any.
    coverage: share of the supervised tokens that are in the draft vocabulary. seconds: by part of the step. grad_norm:
    null under Muon, because DeepSpeed reports the norm of the orthogonalised updates there, not of the gradients.
    """
    tokens, step_seconds = int(sums.supervised[0]), seconds["step"]
    weights = step_weights(settings.head.kind, settings.unroll.step_decay, len(sums.loss))
    reached, passed = sums.reached.tolist(), sums.passed.tolist()
    muon = settings.optimizer.name == "muon"
    return {
        "seconds_per_step": step_seconds,
        "loss": float((weights * sums.loss).sum()),
        "loss_by_step": sums.loss.tolist(),
        "accuracy_by_step": (sums.right / sums.supervised.clamp(min=1)).tolist(),
        "conditional_accuracy_by_step": [
            right / count if count else None for right, count in zip(passed, reached, strict=True)
        ],
        "token_map_coverage": coverage,
        "learning_rate": rate_factor * settings.optimizer.learning_rate,
        "muon_learning_rate": rate_factor * settings.optimizer.muon_learning_rate if muon else None,
        "grad_norm": None if muon else grad_norm,
        "supervised_tokens": tokens,
        "tokens_per_s": tokens / step_seconds,
        **{f"seconds_{part}": seconds.get(part, 0.0) for part in ("target", "head", "optimizer")},
        "peak_memory_bytes": peak_memory_bytes,
    }


class RecentSteps:
    """What the progress bar says of the last SHOWN_STEPS steps: one step of few tokens is noise. The loss is a sum over
    the steps of the unroll, so means begin anew where the curriculum changes their number."""

    def __init__(self) -> None:
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=SHOWN_STEPS)

    def text(self, row: Mapping[str, Any]) -> str:
        """Takes the row of a step."""
        depth = len(row["loss_by_step"])
        if self._rows and len(self._rows[-1]["loss_by_step"]) != depth:
            self._rows.clear()
        self._rows.append(row)
        tokens = max(1, sum(one["supervised_tokens"] for one in self._rows))
        loss = sum(one["loss"] * one["supervised_tokens"] for one in self._rows) / tokens
        right = sum(one["accuracy_by_step"][0] * one["supervised_tokens"] for one in self._rows) / tokens
        return f"loss {loss:.2f} over {depth} draft{'s' if depth > 1 else ''} in a row, first right {right:.0%}"


def forecast_row(forecast: Forecast) -> dict[str, Any]:
    """Forecast accept_length of a chain as deep as the unroll, over the held-out rollouts."""
    return {
        "forecast_accept_length": forecast.accept_length,
        "forecast_interval": None if forecast.interval is None else list(forecast.interval),
        "forecast_rate": forecast.accept_rate,
        "forecast_verify_steps": forecast.verify_steps,
    }


def real_row(measured: Sequence[RealAcceptance], mean: float | None, prompts: int) -> dict[str, Any]:
    """The engine's values. real_accept_length: their mean, the criterion for the best head."""
    return {
        "real_accept_length": mean,
        "real_prompts": prompts,
        "real_seconds": sum(one.seconds for one in measured),
        "real": [_real_entry(one) for one in measured],
    }


def _real_entry(one: RealAcceptance) -> dict[str, Any]:
    return {
        "name": one.name,
        "num_steps": one.shape.num_steps,
        "top_k": one.shape.top_k,
        "num_draft_tokens": one.shape.num_draft_tokens,
        "temperature": one.temperature,
        "accept_length": one.accept_length,
        "interval": None if one.interval is None else list(one.interval),
        "verify_steps": one.stats.verify_steps,
        "accept_rate": list(one.stats.accept_rate),
        "accept_rate_unconditional": list(one.stats.accept_rate_unconditional),
        "tokens_per_s": one.tokens_per_s,
    }


def rollouts_row(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics of the fresh rollouts that the engine wrote with the head of this step as drafter."""
    names = {"rollouts": "rollouts", "skipped": "rollouts_skipped"}
    return {names.get(name, f"rollout_{name}"): value for name, value in stats.items()}


def flat_row(row: dict[str, Any]) -> dict[str, float]:
    """The row as scalars, for trackers. Each entry of a list becomes a series, named by its "name" or its index."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            inside: Any = value.items()
        elif isinstance(value, list):
            inside = ((one["name"] if isinstance(one, dict) else at, one) for at, one in enumerate(value))
        else:
            if isinstance(value, int | float) and not isinstance(value, bool):
                flat[name] = value
            continue
        for key, one in inside:
            flat.update(flat_row({f"{name}/{key}": one}))
    return flat
