"""Which head of a training is handed on, and when to stop: by the engine's accept_length where it is measured, else by
the forecast; never by the loss."""

from __future__ import annotations

from dataclasses import replace

from toolkit.train.state import Position
from toolkit.train_settings import TrainSettings


def judged(position: Position, forecast: float | None, real: float | None, settings: TrainSettings) -> Position:
    """`position` after an evaluation at its step; `best_step == step` says that this head is the best so far.

    forecast and real are accept_lengths, None where nothing is known. Of equals the later one, which was trained
    longer. An unknown value never beats a known one. Once something was measured for real, forecasts decide nothing.
    Evaluations without improvement are counted only where they decide: forecasts do not, where the engine measures.
    """
    if real is None and position.best_real is not None:
        measured_in_vain = settings.evaluation.real_every is not None and due(
            position.step, settings.evaluation.real_every
        )
        return replace(position, stale=position.stale + measured_in_vain)
    if real is not None:
        better, more = _compare(real, position.best_real)
        decides = True
    else:
        better, more = _compare(forecast, position.best_forecast)
        better = better or not position.best_step
        decides = settings.evaluation.real_every is None
    stale = 0 if more else position.stale + decides
    if not better:
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


def best_in_words(position: Position, settings: TrainSettings) -> str:
    """The accept_length that made it the best head, for the log."""
    if position.best_real is not None:
        over = "train.evaluation.real_shapes and real_temperatures"
        return f"real accept_length {position.best_real:.2f} (mean over {over})"
    if position.best_forecast is not None:
        steps = settings.unroll.ttt_steps
        return f"forecast accept_length {position.best_forecast:.2f} (chain {steps}, held-out rollouts)"
    return "accept_length unknown"
