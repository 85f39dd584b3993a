"""The evaluations during training: the forecast and the engine's accept_length. They select the best head.

The criterion is the engine's accept_length if it is measured, else the forecast; never the loss. For a measurement the
current head drafts for the loaded target. Its prompts are always the same. So are the answers, also at a temperature,
because the target's draws depend only on the seed and the position (up to near-ties in 16 bits). Only the accepted
drafts change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.bench.bootstrap import Forecast, ratio_interval
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.generation import derived_seed
from toolkit.heads.head_config import HeadConfig
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import AcceptanceStats, summarise
from toolkit.log import get_logger
from toolkit.targets.target import Target
from toolkit.train.agreement import from_main
from toolkit.train.engine_client import real_shapes, with_engine
from toolkit.train.metrics import Metrics
from toolkit.train.state import Position, Weights, as_draft, best_path, gathered_weights, in_dtype
from toolkit.train.step import forecast_accept_length
from toolkit.train.target_side import TargetSide
from toolkit.train.training_data import Data, HeldOutPrompt
from toolkit.train_settings import TrainSettings
from toolkit.weights import save_tensors

log = get_logger(__name__)


@dataclass(frozen=True)
class RealAcceptance:
    """The measurement of one draft shape at one temperature.

    accept_length: None without verify steps. interval: 95 %, bootstrap over prompts; None if fewer than two prompts
    have verify steps. tokens: written by all prompts. by_prompt: tokens committed by the counted verify steps of each
    prompt, and their number. tokens_per_s: output tokens a second, prefill included.
    """

    shape: DraftShape
    temperature: float
    stats: AcceptanceStats
    interval: tuple[float, float] | None
    tokens: int
    by_prompt: list[tuple[int, int]]
    seconds: float

    @property
    def accept_length(self) -> float | None:
        return self.stats.accept_length if self.stats.verify_steps else None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def name(self) -> str:
        return f"{self.shape.name} T={self.temperature:g}"


def mean_accept_length(measured: Sequence[RealAcceptance]) -> float | None:
    """The criterion for the best head: the mean over shapes and temperatures; None without verify steps."""
    lengths = [one.accept_length for one in measured if one.accept_length is not None]
    return sum(lengths) / len(lengths) if lengths else None


class Measurement:
    """The prompts, shapes and temperatures of a training's measurements; `by_engine` measures a head."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[HeldOutPrompt],
        settings: TrainSettings,
        seed: int,
        deterministic: bool = False,
    ) -> None:
        self.target, self.prompts, self.deterministic = target, prompts, deterministic
        self.shapes, self.temperatures = real_shapes(settings), settings.evaluation.real_temperatures
        self.max_tokens = settings.evaluation.real_max_tokens
        self.seeds = [derived_seed(seed, "measured in training", one.id) for one in prompts]

    def by_engine(self, draft: DraftCheckpoint) -> list[RealAcceptance]:
        """Measure every shape at every temperature, with all prompts in one batch and the loaded target."""
        prompts = [one.prompt for one in self.prompts]

        def measure(engine: Engine) -> list[RealAcceptance]:
            return [
                self._measure(engine, prompts, shape, temperature)
                for shape in self.shapes
                for temperature in self.temperatures
            ]

        config = EngineConfig(
            shape=DraftShape.covering(self.shapes).as_text(),
            verify="target",
            max_running_requests=len(prompts),
            context_length=max(map(len, prompts)) + self.max_tokens,
            deterministic=self.deterministic,
            prefix_cache=False,  # all shapes and temperatures have the same prompts
        )
        return with_engine(measure, config, self.target, draft)

    def _measure(
        self, engine: Engine, prompts: list[list[int]], shape: DraftShape, temperature: float
    ) -> RealAcceptance:
        engine.set_shape(shape)
        params = [SamplingParams(temperature, seed=seed, max_tokens=self.max_tokens) for seed in self.seeds]
        started = time.perf_counter()
        requests = engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        each = [summarise(request.events) for request in requests]
        by_prompt = [(stats.verify_steps + stats.accepted, stats.verify_steps) for stats in each]
        return RealAcceptance(
            shape=shape,
            temperature=temperature,
            stats=summarise(event for request in requests for event in request.events),
            interval=ratio_interval(*zip(*by_prompt, strict=True)),
            by_prompt=by_prompt,
            tokens=sum(len(request.output_ids) for request in requests),
            seconds=seconds,
        )


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
            gathered = weights = gathered_weights(self.accelerator, model)
            value = from_main(self.accelerator, lambda: self._measure(position.step, gathered))
        # A process that rounded differently could decide otherwise, and miss a collective.
        predicted = from_main(self.accelerator, lambda: predicted)
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
