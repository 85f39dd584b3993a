"""What is looked at every so many steps: the forecast, the engine's own accept_length, and which head is the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from toolkit.data.batches import Example, collate
from toolkit.heads.head_config import HeadConfig
from toolkit.log import get_logger
from toolkit.train.best_head import judged
from toolkit.train.forecast import summarise_replays
from toolkit.train.forecast_check import Comparison, compare, explain_gap
from toolkit.train.head_snapshot import Weights, as_draft, gathered_weights, head_of, in_dtype
from toolkit.train.metric_rows import forecast_row, real_row
from toolkit.train.metrics import Metrics
from toolkit.train.real_acceptance import Measurement, RealAcceptance, mean_accept_length
from toolkit.train.split_data import Data
from toolkit.train.state import Position, best_path
from toolkit.train.step import TargetSide, forecast_accept_length, replayed_steps
from toolkit.train_settings import TrainSettings
from toolkit.weights import save_tensors

log = get_logger(__name__)


class Evaluation:
    """Runs on all processes in step; the main one measures with the engine while the others wait, and decides.

    trained: a head -> the module that training unrolls it in. measurement: to be set on the main process, where the
    recipe asks for one.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        side: TargetSide,
        data: Data,
        config: HeadConfig,
        trained: Callable[[Any], torch.nn.Module],
        settings: TrainSettings,
        directory: Path,
        metrics: Metrics,
    ) -> None:
        self.accelerator, self.side, self.held_out, self.pad_id = accelerator, side, data.held_out, data.pad_id
        self.config, self.trained, self.settings = config, trained, settings
        self.directory, self.metrics = directory, metrics
        self.measurement: Measurement | None = None

    def __call__(self, model: torch.nn.Module, position: Position, *, forecast: bool, real: bool) -> Position:
        """The forecast, the engine's value, or both, at this step; the best head so far is kept beside the states."""
        guess, value, weights = None, None, None
        if forecast:
            model.eval()
            found = forecast_accept_length(model, self.side, self.held_out, self.settings.unroll.ttt_steps)
            model.train()
            guess = found.accept_length
            self.metrics.write({"step": position.step, **forecast_row(found)})
        if real:
            weights = gathered_weights(self.accelerator, model)
            if self.accelerator.is_main_process:
                value = self._measure(position.step, weights)
        guess, value = self._as_on_main(guess, value)
        position = judged(position, guess, value, self.settings)
        if position.best_step == position.step:
            weights = gathered_weights(self.accelerator, model) if weights is None else weights
            if self.accelerator.is_main_process:
                assert self.side.target.dtype is not None, "a target has a dtype"
                state = in_dtype(weights, self.side.target.dtype)
                save_tensors(best_path(self.directory, position.step), state, {"step": str(position.step)})
        return position

    def _as_on_main(self, *values: float | None) -> list[float | None]:
        """The main process's values, on all: processes that round differently must not part ways at a gather."""
        sent = torch.tensor([value or 0.0 for value in values], dtype=torch.float64, device=self.side.target.device)
        return [value or None for value in broadcast(sent).tolist()]

    def _measure(self, step: int, weights: Weights) -> float | None:
        """The mean real accept_length; rows and log hold every shape and temperature beside its forecasts."""
        assert self.measurement is not None, "a measurement that was asked for needs its prompts"
        target, token_map = self.side.target, self.side.token_map
        measured = self.measurement.by_engine(as_draft(weights, self.config, token_map, target))
        head = head_of(weights, self.config, target.device, self.side.head_dtype)
        model = self.trained(head).eval()
        compared = [self._compare(one, model) for one in measured]
        mean = mean_accept_length(measured)
        self.metrics.write({"step": step, **real_row(measured, compared, mean, len(self.measurement.prompts.prompts))})
        log.info("step %d: %s", step, "; ".join(_said(*pair) for pair in zip(measured, compared, strict=True)))
        for one, found in zip(measured, compared, strict=True):
            said = explain_gap(
                one,
                found,
                self.measurement.prompts,
                target,
                token_map,
                self.settings.precision,
                self.measurement.max_tokens,
            )
            if said is not None:
                log.warning("step %d: %s", step, said)
                break  # the others would say the same
        return mean

    def _compare(self, measured: RealAcceptance, model: torch.nn.Module) -> Comparison:
        assert self.measurement is not None, "see _measure"
        asked = self.measurement.prompts.prompts

        def replay(answers: Sequence[list[int]], levels: int) -> float | None:
            texts = [
                Example(one.id, one.prompt + answer, [False] * len(one.prompt) + [True] * len(answer))
                for one, answer in zip(asked, answers, strict=True)
            ]
            size = self.settings.data.micro_batch
            batches = [collate(texts[start : start + size], self.pad_id) for start in range(0, len(texts), size)]
            steps = replayed_steps(model, self.side.online(), batches, self.settings.unroll.ttt_steps, levels)
            return summarise_replays(steps, levels).accept_length

        deepest = self.settings.unroll.ttt_steps
        return compare(measured, self.measurement.prompts, replay, deepest, self.measurement.max_tokens)


def _said(measured: RealAcceptance, found: Comparison) -> str:
    """One measurement in words, with all that an accept_length must be printed with."""
    if measured.accept_length is None:
        return f"{measured.name}: no verify steps"
    interval = "" if measured.interval is None else " [{:.2f}, {:.2f}]".format(*measured.interval)
    forecast = found.on_answers if found.on_rollouts is None else found.on_rollouts
    return (
        f"{measured.name}: real accept_length {measured.accept_length:.2f}{interval}, {measured.stats.verify_steps} "
        f"verify steps{'' if forecast is None else f', forecast {forecast:.2f}'}"
    )
