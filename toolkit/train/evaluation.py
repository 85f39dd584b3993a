"""The evaluations during training: the forecast and the engine's accept_length. They select the best head.

The criterion is the engine's accept_length if it is measured, else the forecast; never the loss.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from toolkit.heads.head_config import HeadConfig
from toolkit.log import get_logger
from toolkit.train.head_snapshot import Weights, as_draft, gathered_weights, in_dtype
from toolkit.train.metric_rows import forecast_row, real_row
from toolkit.train.metrics import Metrics
from toolkit.train.real_acceptance import Measurement, RealAcceptance, mean_accept_length
from toolkit.train.state import Position, best_path
from toolkit.train.step import TargetSide, forecast_accept_length
from toolkit.train.training_data import Data
from toolkit.train_settings import TrainSettings
from toolkit.weights import save_tensors

log = get_logger(__name__)


class Evaluation:
    """All processes must call it together. The main process alone measures with the engine; its values decide.

    measurement: the caller sets it on the main process if train.evaluation.real_every is set.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        side: TargetSide,
        data: Data,
        config: HeadConfig,
        settings: TrainSettings,
        directory: Path,
        metrics: Metrics,
    ) -> None:
        self.accelerator, self.side, self.held_out = accelerator, side, data.held_out
        self.config, self.settings = config, settings
        self.directory, self.metrics = directory, metrics
        self.measurement: Measurement | None = None

    def __call__(self, model: torch.nn.Module, position: Position, *, forecast: bool, real: bool) -> Position:
        """Compute the forecast, the engine's value, or both; save the head if it is the best so far.

        Returns `position` with the best values.
        """
        predicted, value, weights = None, None, None
        if forecast:
            model.eval()
            result = forecast_accept_length(model, self.side, self.held_out, self.settings.unroll.ttt_steps)
            model.train()
            predicted = result.accept_length
            self.metrics.write({"step": position.step, **forecast_row(result)})
        if real:
            weights = gathered_weights(self.accelerator, model)
            if self.accelerator.is_main_process:
                value = self._measure(position.step, weights)
        predicted, value = self._from_main(predicted, value)
        position = update_best(position, predicted, value, self.settings)
        if position.best_step == position.step:
            weights = gathered_weights(self.accelerator, model) if weights is None else weights
            if self.accelerator.is_main_process:
                state = in_dtype(weights, self.config, self.side.target.dtype)
                save_tensors(best_path(self.directory, position.step), state, {"step": str(position.step)})
        return position

    def before_training(self, model: torch.nn.Module, position: Position) -> Position:
        """Evaluate the head that training starts from. It counts as the best until another one is better."""
        real = self.settings.evaluation.real_every is not None
        position = self(model, position, forecast=True, real=real)
        if self.accelerator.is_main_process:
            log.info("before training: %s", describe_best(position, self.settings))
        return replace(position, initial_forecast=position.best_forecast, initial_real=position.best_real)

    def _from_main(self, *values: float | None) -> list[float | None]:
        """The main process's values on all processes, so that all take the same branches. A process that rounded
        differently could otherwise miss a collective."""
        sent = torch.tensor([value or 0.0 for value in values], dtype=torch.float64, device=self.side.target.device)
        return [value or None for value in broadcast(sent).tolist()]

    def _measure(self, step: int, weights: Weights) -> float | None:
        """Measure with the engine; returns the mean accept_length. Metrics and log get each shape and temperature."""
        assert self.measurement is not None, (
            "the main process needs a measurement if train.evaluation.real_every is set"
        )
        draft = as_draft(weights, self.config, self.side.token_map, self.side.target)
        measured = self.measurement.by_engine(draft)
        mean = mean_accept_length(measured)
        self.metrics.write({"step": step, **real_row(measured, mean, len(self.measurement.prompts))})
        log.info("step %d: %s", step, "; ".join(map(_describe, measured)))
        return mean


def _describe(measured: RealAcceptance) -> str:
    """One measurement for the log: shape, temperature, accept_length, interval, verify steps."""
    if measured.accept_length is None:
        return f"{measured.name}: no verify steps"
    interval = "" if measured.interval is None else " [{:.2f}, {:.2f}]".format(*measured.interval)
    return (
        f"{measured.name}: real accept_length {measured.accept_length:.2f}{interval}, {measured.stats.verify_steps} "
        "verify steps"
    )


def update_best(position: Position, forecast: float | None, real: float | None, settings: TrainSettings) -> Position:
    """`position` after an evaluation at its step. `best_step == step` means that this head is the best so far.

    forecast and real are accept_lengths, None if unknown. Of equal heads the later one is the best: it was trained
    longer. An unknown value is never better than a known one. After the first measurement by the engine, forecasts no
    longer count. `stale` counts evaluations without improvement, of the engine if real_every is set, else forecasts.
    """
    if real is None and position.best_real is not None:
        measured_nothing = settings.evaluation.real_every is not None and due(
            position.step, settings.evaluation.real_every
        )
        return replace(position, stale=position.stale + measured_nothing)
    if real is not None:
        as_good, better = _compare(real, position.best_real)
        decides = True
    else:
        as_good, better = _compare(forecast, position.best_forecast)
        decides = settings.evaluation.real_every is None
    stale = 0 if better else position.stale + decides
    if not as_good:
        return replace(position, stale=stale)
    return replace(position, best_step=position.step, best_forecast=forecast, best_real=real, stale=stale)


def _compare(value: float | None, best: float | None) -> tuple[bool, bool]:
    """(as good as the best so far, better than it)."""
    return (value or 0.0) >= (best or 0.0), (value or 0.0) > (best or 0.0)


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def has_stopped(position: Position, settings: TrainSettings) -> bool:
    """Early stop: `patience` evaluations in a row without improvement."""
    return settings.evaluation.patience is not None and position.stale >= settings.evaluation.patience


def describe_best(position: Position, settings: TrainSettings) -> str:
    """The accept_length of the best head, for the log; beside that of the head it started from, after training."""
    real = position.best_real is not None
    best, initial = (
        (position.best_real, position.initial_real) if real else (position.best_forecast, position.initial_forecast)
    )
    if best is None:
        return "accept_length unknown"
    before = "" if initial is None else f", {initial:.2f} before training"
    return f"{'real' if real else 'forecast'} accept_length {best:.2f}{before} ({_measured_by(real, settings)})"


def _measured_by(real: bool, settings: TrainSettings) -> str:
    if real:
        return "mean over train.evaluation.real_shapes and real_temperatures"
    return f"chain {settings.unroll.ttt_steps}, held-out rollouts"


def accept_lengths(position: Position, settings: TrainSettings) -> dict[str, Any]:
    """accept_length of the head of train.init and of the best head, for the draft directory: the engine's values, else
    forecasts; `by` says which."""
    real = position.best_real is not None and position.initial_real is not None
    return {
        "accept_length_before": position.initial_real if real else position.initial_forecast,
        "accept_length_after": position.best_real if real else position.best_forecast,
        "by": f"{'engine' if real else 'forecast'}: {_measured_by(real, settings)}",
    }
