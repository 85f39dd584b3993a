"""Selects the best head of a training, and decides the early stop.

The criterion is the engine's accept_length if it is measured, else the forecast; never the loss.
"""

from __future__ import annotations

from dataclasses import replace

from toolkit.train.state import Position
from toolkit.train_settings import TrainSettings


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
        as_good = as_good or not position.best_step
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
    """The accept_length of the best head, for the log."""
    if position.best_real is not None:
        over = "train.evaluation.real_shapes and real_temperatures"
        return f"real accept_length {position.best_real:.2f} (mean over {over})"
    if position.best_forecast is not None:
        steps = settings.unroll.ttt_steps
        return f"forecast accept_length {position.best_forecast:.2f} (chain {steps}, held-out rollouts)"
    return "accept_length unknown"
