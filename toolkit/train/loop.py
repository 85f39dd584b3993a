"""The training loop of a draft head: deterministic, resumable at any kill, equal on any number of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast

from toolkit.checkpoint.draft_dir import save_draft
from toolkit.data.batches import Batch, collate, process_share
from toolkit.log import get_logger, progress
from toolkit.recipe import Recipe, TrainSettings, result_settings
from toolkit.target.cpu_dtype import fastest_cpu_dtype
from toolkit.target.features import check_packing
from toolkit.target.load import Target, load_target
from toolkit.tokenmap.files import load_token_map
from toolkit.train.accelerator import build_accelerator
from toolkit.train.draft_head import anchors_of, plan_head, start_head, trained_head
from toolkit.train.forecast import Forecast
from toolkit.train.metrics import Metrics
from toolkit.train.offline_features import offline_features
from toolkit.train.optimizer import build_optimizer, gradient_clip, set_learning_rates
from toolkit.train.schedule import rate_factor, total_steps
from toolkit.train.split_data import read_data
from toolkit.train.state import Position, best_path, restore_state, save_state, sole_trainer, stored_states
from toolkit.train.step import TargetSide, forecast_accept_length, micro_step, supervised_counts
from toolkit.weights import load_tensors, save_tensors, sha256_file, sha256_json

log = get_logger(__name__)


class Trainer:
    """Owns the prepared model and optimiser; `run()` trains to the end and writes the draft directory."""

    def __init__(self, recipe: Recipe, rollouts: Path, token_map: Path, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        self.settings = replace(recipe.train, precision=training_precision(recipe.train.precision))
        # The target first: at ZeRO stage 3 a model loaded after the Accelerator would be sharded.
        self.target = load_target(
            recipe.target.model,
            dtype=recipe.target.dtype,
            revision=recipe.target.revision,
            device=_device(),
            quantization=recipe.target.quantization,
            batched=True,
        )
        self.plan = plan_head(self.settings, self.target, load_token_map(token_map))
        self.data = read_data(self.settings, rollouts, self.target, recipe.seed)
        self.fingerprint = sha256_json(
            [
                result_settings(self.settings),
                recipe.seed,
                self.target.fingerprint,
                str(self.target.dtype),
                *([] if self.target.quantization is None else [self.target.quantization]),
                self.plan.token_map.sha256,
                sha256_file(rollouts),
            ]
        )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        self.accumulation = accumulation_steps(self.settings, world)
        self.accelerator = build_accelerator(
            self.settings.precision,
            self.micro_batch(world),
            self.accumulation,
            gradient_clip(self.settings),
            whole_gradients=self.settings.optimizer == "muon",
        )
        if self.settings.pack:
            check_packing(self.target)
        ids, stored = self.plan.aux_layer_ids, None
        if self.settings.features == "offline":
            folder = directory.parent / "features"
            stored = offline_features(self.settings, self.target, ids, self.data, folder, self.accelerator)
        self.side = TargetSide(self.target, self.plan.token_map, ids, self.settings.precision, stored)
        self.steps = total_steps(self.settings, len(self.data.plan))
        self.model, self.optimizer = self._prepare()
        self.metrics = Metrics(
            directory / "metrics.jsonl",
            main=self.accelerator.is_main_process,
            project=self.settings.wandb_project if self.settings.wandb else None,
            run_name=recipe.name,
            settings={**asdict(self.settings), "fingerprint": self.fingerprint},
        )

    def micro_batch(self, world: int) -> int:
        return self.settings.global_batch // (world * self.accumulation)

    def _prepare(self) -> tuple[torch.nn.Module, Any]:
        settings = self.settings
        # A resumed run overwrites every weight: only a fresh one pays for the regression.
        fresh = settings.init == "target" and not stored_states(self.directory)
        batches = (self._collate(batch) for batch in self.data.plan.epoch(0))
        head = start_head(self.plan, settings, self.target, self.recipe.seed, batches if fresh else None)
        model = trained_head(self.plan, settings, head, self.side.teacher)
        return self.accelerator.prepare(model, build_optimizer(head, settings))

    def _collate(self, indices: list[int]) -> Batch:
        return collate([self.data.train[index] for index in indices], self.data.pad_id)

    def run(self) -> Path:
        """Train to the last step; returns the draft directory. Picks up the newest state of the same settings.

        Raises `TrainError` when another process trains in the same folder.
        """
        with sole_trainer(self.directory) if self.accelerator.is_main_process else nullcontext():
            return self._run()

    def _run(self) -> Path:
        position = restore_state(self.accelerator, self.directory, self.fingerprint)
        self.metrics.rewind(position.step)
        main = self.accelerator.is_main_process
        log.info(
            "%d rollouts, %d steps of %d sequences on %d process(es), %s, ZeRO-%s",
            len(self.data.train),
            self.steps,
            self.settings.global_batch,
            self.accelerator.num_processes,
            self.settings.precision,
            self.accelerator.state.deepspeed_plugin.zero_stage,
        )
        bar = progress(self.steps, "train", "step", initial=position.step) if main else None
        batches = self.data.plan.from_position(position.epoch, position.index)
        while position.step < self.steps:
            position = self._advance(position, *next(batches), bar)
        if bar is not None:
            bar.close()
        self.metrics.close()
        return self._finish(position)

    def _advance(self, position: Position, epoch: int, index: int, indices: list[int], bar: Any) -> Position:
        """One optimiser step with its row of metrics, and at their intervals the forecast and the state."""
        started = time.perf_counter()
        row = self._optimise(position.step, indices)
        done = position.step + 1
        seconds = time.perf_counter() - started
        position = replace(
            position,
            step=done,
            epoch=epoch,
            index=index + 1,
            seconds=position.seconds + seconds,
            supervised_tokens=position.supervised_tokens + row["supervised_tokens"],
        )
        self.metrics.write(
            {"step": done, "epoch": epoch, "tokens": position.supervised_tokens, "seconds_per_step": seconds, **row}
        )
        if bar is not None:
            bar.set_postfix_str(
                f"loss {row['loss']:.3f} accuracy {row['accuracy_by_step'][0]:.2f}"
                + (f" forecast {position.best_forecast:.2f}" if position.best_forecast else ""),
                refresh=False,
            )
            bar.update(1)
        if done % self.settings.eval_every == 0 or done == self.steps:
            position = self._evaluate(position)
        if done % self.settings.save_every == 0 or done == self.steps:
            save_state(self.accelerator, self.directory, position, self.settings.keep_states)
        return position

    def _optimise(self, step: int, indices: list[int]) -> dict[str, Any]:
        settings, accelerator = self.settings, self.accelerator
        k, shift = settings.ttt_steps, settings.mask_shift
        counts = supervised_counts(self._collate(indices), k, shift)
        factor = rate_factor(step, self.steps, settings)
        set_learning_rates(self.optimizer, factor, settings)
        # DeepSpeed averages gradients over processes and micro-batches; the loss is a sum over both.
        scale = accelerator.num_processes * self.accumulation
        mine = process_share(indices, accelerator.process_index, accelerator.num_processes)
        totals = torch.zeros(2 * k, device=self.target.device)
        size = self.micro_batch(accelerator.num_processes)
        for start in range(0, size * self.accumulation, size):
            with accelerator.accumulate(self.model):
                batch = self._micro_batch(mine[start : start + size], indices[0])
                drawn = anchors_of(settings, self.recipe.seed, step, start)
                loss, by_step, right = micro_step(self.model, self.side, batch, counts.clamp(min=1), k, shift, drawn)
                accelerator.backward(loss * scale)
                self.optimizer.step()
                self.optimizer.zero_grad()
                totals += torch.cat((by_step, right))
        totals = accelerator.reduce(totals, "sum").cpu()
        weights = settings.step_decay ** torch.arange(k)
        muon = settings.optimizer == "muon"
        read_norm: Callable[[], Any] | None = getattr(self.model, "get_global_grad_norm", None)
        norm = None if read_norm is None else read_norm()
        return {
            "loss": float((weights * totals[:k]).sum()),
            "loss_by_step": totals[:k].tolist(),
            "accuracy_by_step": (totals[k:] / counts.clamp(min=1)).tolist(),
            "learning_rate": factor * settings.learning_rate,
            "muon_learning_rate": factor * settings.muon_learning_rate if muon else None,
            # Under Muon DeepSpeed's norm is that of the orthogonalised updates, which says nothing of the gradients.
            "grad_norm": None if norm is None or muon else float(norm),
            "supervised_tokens": int(counts[0]),
        }

    def _micro_batch(self, indices: list[int], filler: int) -> Batch:
        """The examples of one forward; a process that has none runs one without a loss, so that all stay in step."""
        if indices:
            return collate([self.data.train[index] for index in indices], self.data.pad_id, pack=self.settings.pack)
        batch = self._collate([filler])
        return replace(batch, response=torch.zeros_like(batch.response))

    def _evaluate(self, position: Position) -> Position:
        """Forecast on held-out rollouts; the best head so far is kept beside the states.

        A forecast of no steps never beats one of some.
        """
        self.model.eval()
        forecast = forecast_accept_length(self.model, self.side, self.data.held_out, self.settings.ttt_steps)
        self.model.train()
        self.metrics.write({"step": position.step, **forecast_row(forecast)})
        length = self._as_on_main(forecast.accept_length)
        if position.best_step and (length or 0.0) < (position.best_forecast or 0.0):
            return position
        state = self._head_state()
        if self.accelerator.is_main_process:
            save_tensors(best_path(self.directory, position.step), state, {"step": str(position.step)})
        return replace(position, best_step=position.step, best_forecast=length)

    def _as_on_main(self, length: float | None) -> float | None:
        """The main process's forecast, on all: processes that round differently must not part ways at a gather."""
        sent = torch.tensor([length or 0.0], dtype=torch.float64, device=self.target.device)
        return float(broadcast(sent)) or None

    def _head_state(self) -> dict[str, torch.Tensor]:
        """The head's weights, gathered (all processes must call this), in the target's dtype."""
        state = self.accelerator.get_state_dict(self.model)
        dtype = self.target.dtype
        return {name.removeprefix("head."): value.to(dtype) for name, value in (state or {}).items()}

    def _finish(self, position: Position) -> Path:
        ckpt = self.directory.parent / "ckpt"
        token_map = self.plan.token_map if self.plan.own_vocabulary else None
        if self.accelerator.is_main_process:
            meta = {
                "target": describe_target(self.target),
                "training": {
                    **asdict(self.settings),
                    "seed": self.recipe.seed,
                    "steps": position.step,
                    "best_step": position.best_step,
                    "supervised_tokens": position.supervised_tokens,
                    "seconds": round(position.seconds, 1),
                    "forecast_accept_length": position.best_forecast,
                    "rollouts": len(self.data.train),
                },
                **({"token_map_sha256": self.plan.token_map.sha256} if token_map else {}),
            }
            best = load_tensors(best_path(self.directory, position.best_step))
            save_draft(ckpt, best, self.plan.config, token_map, meta)
            log.info(
                "draft head of step %d, forecast accept_length %s (chain of %d, held-out rollouts): %s",
                position.best_step,
                "unknown" if position.best_forecast is None else f"{position.best_forecast:.2f}",
                self.settings.ttt_steps,
                ckpt,
            )
        self.accelerator.wait_for_everyone()
        return ckpt


def accumulation_steps(settings: TrainSettings, processes: int) -> int:
    """Micro-batches a process runs per optimiser step. Raises `RecipeError` if the global batch cannot be shared."""
    settings.check_processes(processes)
    return max(1, settings.global_batch // processes // settings.micro_batch)


def training_precision(wanted: Literal["auto", "bf16", "fp32"]) -> Literal["bf16", "fp32"]:
    """The arithmetic of training: "auto" is bf16 on a GPU and on CPUs that multiply it no slower than fp32."""
    if wanted != "auto":
        return wanted
    return "fp32" if _device() == "cpu" and fastest_cpu_dtype() == torch.float32 else "bf16"


def forecast_row(forecast: Forecast) -> dict[str, Any]:
    return {
        "forecast_accept_length": forecast.accept_length,
        "forecast_interval": None if forecast.interval is None else list(forecast.interval),
        "forecast_rate": forecast.accept_rate,
        "forecast_verify_steps": forecast.verify_steps,
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


def _device() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
