"""The training loop of a draft head: deterministic, resumable after a kill, equal on any number of processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import new_subgroups

from toolkit.checkpoint.draft_dir import save_draft
from toolkit.data.batches import Batch, collate, process_share
from toolkit.data.generation import derived_seed
from toolkit.log import Progress, get_logger
from toolkit.recipe import Recipe, result_settings
from toolkit.thread_limit import thread_limit
from toolkit.tokenmap.files import load_token_map
from toolkit.train.accelerator import (
    COLLECTIVE_TIMEOUT,
    build_accelerator,
    check_finite,
    check_weights,
    frozen_target,
    prepared,
    training_device,
    training_precision,
    weights_checksum,
)
from toolkit.train.agreement import from_main, wait_for_files
from toolkit.train.draft_head import anchors_of, native_head, plan_head, start_head, trained_head
from toolkit.train.engine_client import FreshRollouts, check_engine_runs, real_shapes
from toolkit.train.evaluation import Evaluation, Measurement, accept_lengths, describe_best, due, has_stopped
from toolkit.train.metrics import Metrics, StepClock, StepSums, peak_memory_bytes, rollouts_row, step_row
from toolkit.train.optimizer import (
    build_optimizer,
    gradient_clip,
    rate_factor,
    set_learning_rates,
    total_steps,
    unroll_steps,
    without_compiling,
)
from toolkit.train.row_split import RowSplit, split_rows
from toolkit.train.state import (
    Position,
    best_path,
    restore_state,
    save_state,
    sole_trainer,
    stored_states,
    training_record,
)
from toolkit.train.step import micro_step
from toolkit.train.target_side import TargetSide
from toolkit.train.training_data import (
    Data,
    StepBatches,
    offline_features,
    read_data,
    read_held_out,
    read_step,
    with_fresh,
    with_packing,
)
from toolkit.train.warm_start import continued_head, with_head_settings
from toolkit.train_settings import TrainSettings
from toolkit.weights import load_tensors, sha256_file, sha256_json

log = get_logger(__name__)


class Trainer:
    """Holds the prepared model and optimizer. `run()` trains to the end and writes the draft directory."""

    def __init__(self, recipe: Recipe, rollouts: Path, token_map: Path, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        self.settings = replace(recipe.train, precision=training_precision(recipe.train.precision))
        world = int(os.environ.get("WORLD_SIZE", "1"))
        # Processes that hold parts of the same rows read the same sequences.
        self.readers = max(1, world // self.settings.data.split_rows)
        self.accumulation = accumulation_steps(self.settings, world)
        self.accelerator = build_accelerator(
            self.settings.precision,
            self.micro_batch(),
            self.accumulation,
            gradient_clip(self.settings),
            whole_gradients=self.settings.optimizer.name == "muon",
        )
        if not self.accelerator.is_main_process:
            wait_for_files(rollouts, token_map)  # the main process may have written them just now
        self.target = frozen_target(recipe, training_device(), self.accelerator)
        self.plan = plan_head(self.settings, self.target, load_token_map(token_map))
        if self.plan.init is not None:
            self.settings = with_head_settings(self.settings, self.plan.config)
        self.data = read_data(self.settings, rollouts, self.target, recipe.seed)
        self.steps = total_steps(self.settings, len(self.data.plan))
        same_bits = recipe.rollouts.deterministic
        if self.settings.evaluation.real_every or self.settings.on_policy.every:
            check_engine_runs(self.target, self.plan.token_map.size, real_shapes(self.settings), same_bits)
        # The fingerprint of draws is that of the batches, so the default comes first.
        self.settings = replace(self.settings, data=with_packing(self.settings, self.target))
        self.fingerprint = self._fingerprint(rollouts, world)
        processes, changing = self.accelerator.num_processes, self.settings.fewer_threads and not same_bits
        self._limited = thread_limit(self.target.device, processes, changing=changing)
        ids, self.stored = self.plan.aux_layer_ids, None
        if self.settings.data.features == "offline":
            folder = directory.parent / "features"
            with sole_trainer(directory) if self.accelerator.is_main_process else nullcontext():
                self.stored = offline_features(
                    self.settings, self.target, ids, self.data, folder, self.accelerator, self._limited
                )
        self.side = TargetSide(
            self.target, self.plan.token_map, ids, self.settings.precision, self.stored, self._split_rows()
        )
        self.model, self.optimizer = self._prepare()
        self.metrics = Metrics(
            directory / "metrics.jsonl",
            main=self.accelerator.is_main_process,
            settings=self.settings,
            run_name=recipe.name,
            config={**asdict(self.settings), "fingerprint": self.fingerprint},
        )
        self.clock = StepClock(self.target.device)
        # DeepSpeed runs the optimizer step inside backward().
        self.model.step = self.clock.part("optimizer")(self.model.step)  # type: ignore[type-var]
        accelerator, settings = self.accelerator, self.settings
        self.evaluation = Evaluation(
            accelerator, self.side, self.data, self.plan.config, settings, directory, self.metrics
        )
        if settings.evaluation.real_every and accelerator.is_main_process:
            longest = self.target.max_context - settings.evaluation.real_max_tokens
            prompts = read_held_out(rollouts, settings.evaluation.real_prompts, longest)
            self.evaluation.measurement = Measurement(self.target, prompts, settings, recipe.seed, same_bits)
        self.fresh = None
        if settings.on_policy.every:
            self.fresh = FreshRollouts(
                recipe, self.target, self.plan.token_map, self.plan.config, rollouts, directory, accelerator
            )

    def _fingerprint(self, rollouts: Path, world: int) -> str:
        """A hash of all that decides the result; a state of another fingerprint is not resumed."""
        data = self.settings.data
        return sha256_json(
            [
                result_settings(self.settings),
                self.recipe.seed,
                self.target.fingerprint,
                weights_checksum(self.target, self.accelerator),
                str(self.target.dtype),
                *([] if self.target.quantization is None else [self.target.quantization]),
                *(["deterministic"] if self.recipe.rollouts.deterministic else []),
                self.plan.token_map.sha256,
                sha256_file(rollouts),
                *([] if self.plan.init is None else [self.plan.init.weights_sha256, self.plan.config.to_dict()]),
                # Draws of anchors depend on these too: a resumed run must cut the same batches.
                *([] if self.settings.unroll.anchors is None else [data.micro_batch, data.pack, str(world)]),
            ]
        )

    def micro_batch(self) -> int:
        return max(1, self.settings.data.global_batch // (self.readers * self.accumulation))

    def _split_rows(self) -> RowSplit | None:
        data = self.settings.data
        if data.split_rows == 1:
            return None
        group, _ = new_subgroups(data.split_rows, timeout=COLLECTIVE_TIMEOUT)
        return split_rows(self.target, self.plan.config, group, data.max_length)

    def _prepare(self) -> tuple[torch.nn.Module, Any]:
        settings = self.settings
        # A resumed run overwrites every weight, so only a new run computes the regression.
        resumes = from_main(self.accelerator, lambda: bool(stored_states(self.directory)))
        start = "random" if resumes else settings.start
        size = settings.data.micro_batch
        batches = (
            self._collate(batch[first : first + size])
            for batch in self.data.plan.epoch(0)
            for first in range(0, len(batch), size)
        )
        if start == "native":
            head = native_head(self.target)
        elif start == "head":
            assert self.plan.init is not None, "plan_head opens train.init"
            head = continued_head(self.plan.init, self.plan.config, self.plan.token_map, settings, self.target)
        else:
            regressed = {"target": batches, "random": None}[start]
            head = start_head(self.plan, settings, self.target, self.recipe.seed, regressed, self.stored)
        return prepared(
            self.accelerator,
            self._trained(head),
            build_optimizer(head, settings),
        )

    def _trained(self, head: Any) -> torch.nn.Module:
        return trained_head(self.plan, self.settings, head, self.side.teacher)

    def _collate(self, indices: list[int]) -> Batch:
        return collate([self.data.train[index] for index in indices], self.data.pad_id)

    def run(self) -> Path:
        """Train to the last step and return the draft directory. Resumes from the newest state in the run folder.

        Raises `TrainError` when another process trains in the same folder, `ResumeError` when the newest state was
        written with other settings or cannot be converted to these processes.
        """
        with sole_trainer(self.directory) if self.accelerator.is_main_process else nullcontext():
            return self._run()

    def _run(self) -> Path:
        position = restore_state(self.accelerator, self.model, self.directory, self.fingerprint, self._is_finished)
        self.metrics.rewind(position.step, position.rollouts_of_step)
        main, processes = self.accelerator.is_main_process, self.accelerator.num_processes
        batch = self.settings.data.global_batch
        if main and self.readers > batch:
            log.warning("%d processes share a global batch of %d sequences: some processes are idle", processes, batch)
        log.info(
            "%d rollouts, %d steps of %d sequences on %d process(es), %s, ZeRO-%s",
            len(self.data.train),
            self.steps,
            self.settings.data.global_batch,
            self.accelerator.num_processes,
            self.settings.precision,
            self.accelerator.state.deepspeed_plugin.zero_stage,
        )
        if self.plan.init is not None and not position.step:
            position = self.evaluation.before_training(self.model, position)
        bar = Progress(self.steps, "train", "step", initial=position.step) if main else None
        try:
            position = self._train(position, bar)
        finally:
            if bar is not None:
                bar.close()
            self.metrics.close()
        return self._finish(position)

    def _train(self, position: Position, bar: Progress | None) -> Position:
        batches = self._batches(position)
        while not self._is_finished(position):
            if position.step != position.rollouts_of_step and due(position.step, self.settings.on_policy.every):
                position = self._switch_to_fresh(position)
                batches = self._batches(position)
            with self._limited():
                position = self._advance(position, *next(batches), bar)
        return position

    def _is_finished(self, position: Position) -> bool:
        return position.step >= self.steps or has_stopped(position, self.settings)

    def _batches(self, position: Position) -> Iterator[tuple[int, int, StepBatches]]:
        """(epoch, index, batches) of each step from `position` on, of the stored rollouts or the fresh ones it names. A
        thread reads those of the next step while a step runs."""
        step, seed = position.rollouts_of_step, self.recipe.seed
        if self.fresh is not None and step:
            seed = derived_seed(seed, "fresh batches", step)
            self.data = with_fresh(self.data, self.settings, self.fresh.path(step), self.target, seed)
        data, places = self.data, self.data.plan.from_position(position.epoch, position.index)
        with ThreadPoolExecutor(1, "batches") as reader:
            ahead = None
            for number, (epoch, index, indices) in enumerate(places, position.step):
                now, ahead = ahead, (epoch, index, reader.submit(self._read, data, number, indices))
                if now is not None:
                    yield *now[:2], now[2].result()

    def _read(self, data: Data, step: int, indices: list[int]) -> StepBatches:
        k, cut = unroll_steps(step, self.steps, self.settings), self.settings.data
        shares = [process_share(indices, reader, self.readers) for reader in range(self.readers)]
        reader = self.accelerator.process_index // cut.split_rows
        budget = cut.micro_batch * cut.max_length if cut.pack else None
        return read_step(data, shares, reader, self.plan.token_map, k, self.micro_batch(), budget)

    def _switch_to_fresh(self, position: Position) -> Position:
        """Write rollouts with the head of this step as the drafter, and train on them from this step on."""
        assert self.fresh is not None, "fresh rollouts are due only if train.on_policy.every is set"
        # A run that is killed during the rollouts then resumes at this step.
        stored = from_main(self.accelerator, lambda: [state.name for state in stored_states(self.directory)])
        if f"state-{position.step:06d}" not in stored:
            save_state(self.accelerator, self.directory, position)
        self.metrics.write({"step": position.step, **rollouts_row(self.fresh.write(position.step, self.model))})
        return replace(position, rollouts_of_step=position.step, epoch=0, index=0)

    def _advance(
        self, position: Position, epoch: int, index: int, batches: StepBatches, bar: Progress | None
    ) -> Position:
        """Run one optimizer step and write its row of metrics. Evaluate and save the state at their intervals."""
        row = self.step(position.step, batches)
        done = position.step + 1
        position = replace(
            position,
            step=done,
            epoch=epoch,
            index=index + 1,
            seconds=position.seconds + row["seconds_per_step"],
            supervised_tokens=position.supervised_tokens + row["supervised_tokens"],
        )
        source = {"epoch": epoch, "rollouts_of_step": position.rollouts_of_step}
        self.metrics.write({"step": done, **source, "tokens": position.supervised_tokens, **row})
        if bar is not None:
            best = f", forecast {position.best_forecast:.2f}" if position.best_forecast else ""
            bar.update(1, f"loss {row['loss']:.2f}, first draft correct {row['accuracy_by_step'][0]:.0%}{best}")
        last, settings = done == self.steps, self.settings.evaluation
        forecast = last or due(done, settings.eval_every)
        real = settings.real_every is not None and (last or due(done, settings.real_every))
        stored = last or due(done, self.settings.save_every)
        if forecast or real or stored:
            check_weights(self.accelerator, self.model, done, self.directory)
        if forecast or real:
            position = self.evaluation(self.model, position, forecast=forecast, real=real)
        if stored or has_stopped(position, self.settings):
            save_state(self.accelerator, self.directory, position)
        return position

    def optimise(self, step: int, indices: list[int]) -> dict[str, Any]:
        """Read the examples of one global batch and run `step` on them."""
        return self.step(step, self._read(self.data, step, indices))

    def step(self, step: int, batches: StepBatches) -> dict[str, Any]:
        """Run one optimizer step; returns its row of metrics."""
        settings, accelerator = self.settings, self.accelerator
        self.clock.restart()
        counts, k = batches.counts, len(batches.counts)
        factor = rate_factor(step, self.steps, settings)
        set_learning_rates(self.optimizer, factor, settings)
        # DeepSpeed averages gradients over processes and micro-batches, but the loss is a sum over both.
        scale = accelerator.num_processes * self.accumulation
        totals = torch.zeros(4 * k, device=self.target.device)
        # DeepSpeed updates the weights after so many backwards; `scale` knows those of its configuration.
        accelerator.gradient_accumulation_steps, accelerator.step = len(batches.micro), 0
        size = self.micro_batch()
        for number, batch in enumerate(batches.micro):
            with accelerator.accumulate(self.model):
                drawn = anchors_of(self.plan, settings, self.recipe.seed, step, number * size)
                loss, *sums = micro_step(self.model, self.side, batch, counts.clamp(min=1), k, drawn, self.clock)
                with self.clock.part("head"), without_compiling():
                    accelerator.backward(loss * scale)
                    self.optimizer.step()
                self.optimizer.zero_grad()
                totals += torch.cat(sums)
        losses, right, reached, passed = accelerator.reduce(totals, "sum").cpu().split(k)
        read_norm: Callable[[], Any] | None = getattr(self.model, "get_global_grad_norm", None)
        norm = None if read_norm is None else read_norm()
        norm = None if norm is None else float(norm)
        check_finite(step + 1, float(losses.sum()), norm, self.directory)
        return step_row(
            StepSums(losses, right, counts, reached, passed),
            settings,
            factor,
            norm,
            batches.coverage,
            self.clock.read(),
            peak_memory_bytes(self.target.device),
        )

    def _finish(self, position: Position) -> Path:
        ckpt = self.directory.parent / "ckpt"
        token_map = None if self.settings.head.whole_vocabulary else self.plan.token_map
        if self.accelerator.is_main_process:
            best = load_tensors(best_path(self.directory, position.best_step))
            meta = training_record(self.settings, self.recipe.seed, self.target, position, len(self.data.train))
            if token_map is not None:
                meta["token_map_sha256"] = token_map.sha256
            if self.plan.init is not None:
                meta["init"] = self.plan.init.record | accept_lengths(position, self.settings)
            save_draft(ckpt, best, self.plan.config, token_map, meta)
            value = describe_best(position, self.settings)
            log.info("saved the draft head of step %d of %d, %s, to %s", position.best_step, position.step, value, ckpt)
        self.accelerator.wait_for_everyone()
        return ckpt


def accumulation_steps(settings: TrainSettings, processes: int) -> int:
    """Micro-batches of a process in one optimizer step. Raises `RecipeError` if the global batch cannot be shared."""
    settings.check_processes(processes)
    data = settings.data
    return max(1, data.global_batch // max(1, processes // data.split_rows) // data.micro_batch)
