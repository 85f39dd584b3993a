"""One line of `training.py`'s record: a few steps timed, or a whole training with what its head is worth."""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from draft_loss import peak, restart_peak
from training_features import FadingFeaturesTrainer
from training_published import PublishedTrainer

from toolkit.data.batches import BatchPlan, Example
from toolkit.data.examples import load_examples
from toolkit.recipe import Recipe
from toolkit.train.draft_head import trained_head
from toolkit.train.head_snapshot import as_draft, gathered_weights, head_of
from toolkit.train.initialise import regression_batches
from toolkit.train.loop import Trainer
from toolkit.train.real_acceptance import Measurement
from toolkit.train.step import forecast_accept_length
from toolkit.train.training_data import Data, read_held_out
from toolkit.train_settings import OnPolicySettings, TrackingSettings, TrainSettings

VARIANTS: dict[str, type[Trainer]] = {"published": PublishedTrainer, "ours": Trainer}
# Variants of other names differ in their recipe or rollouts.
TRAINERS = {**VARIANTS, "fading features": FadingFeaturesTrainer}
LAYOUTS = ("rollouts", "one row")
STORED = "ours, stored features"  # of a step: the recipe's train.data.features: offline
ROLLOUTS, TOKEN_MAP = "rollouts/rollouts.jsonl", "token_map/token_map.safetensors"
CHAIN = 4
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """One line of the record. layout: of a `step` row, else None; tokens: of a step, or of the training; prompts: at
    most so many are answered by the engine at its end."""

    variant: str
    recipe: Recipe
    run: Path
    tokens: int
    layout: str | None
    steps: int
    prompts: int
    max_tokens: int
    threads: int


def end_with_parent() -> None:
    """This process ends when the one that started it does, however that was: it would go on for minutes, unheard."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by another process"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def in_process_of_its_own(call: Callable[..., Result], *arguments: Any) -> Result:
    """What `call` returns, from a process whose memory ends with it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=end_with_parent) as process:
        return process.submit(call, *arguments).result()


def work(job: Job) -> dict[str, Any]:
    """The row of a job; meant for a process of its own."""
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rollouts = replace(job.recipe.rollouts, keep_features=False)
        recipe = replace(job.recipe, rollouts=rollouts, train=benched(job))
        borrow_features(job.run / "features", folder / "features")
        before = time.process_time()
        kind = TRAINERS[trainer_of(job.variant)]
        trainer = kind(recipe, job.run / ROLLOUTS, job.run / TOKEN_MAP, folder / "train")
        start = {"start_processor_seconds": time.process_time() - before, "start_tokens": start_tokens(trainer)}
        return (trained_row(job, trainer) if job.layout is None else measured_steps(job, trainer)) | start


def trainer_of(variant: str) -> str:
    """The key of TRAINERS: what a variant is called, before a comma behind which other settings are named."""
    name, comma, _ = variant.partition(",")
    if name == "published" and comma:
        raise SystemExit(f"variant {variant!r}: the published recipe has its own settings; choose another name")
    return name if name in TRAINERS else "ours"


def start_tokens(trainer: Trainer) -> int:
    """Answer tokens that the regression of the head's start read: the first of the training's order."""
    if trainer.settings.start != "target":
        return 0
    batches = (trainer._collate(indices) for indices in trainer.data.plan.epoch(0))
    columns = trainer.model.module.head.warm_start().solved.in_features
    return sum(int(batch.response.sum()) for batch in regression_batches(batches, columns))


def borrow_features(theirs: Path, ours: Path) -> None:
    """The run's stored features as links: what a training adds or removes is not in the run's folder."""
    ours.mkdir()
    for file in theirs.glob("*"):
        (ours / file.name).symlink_to(file.resolve())


def benched(job: Job) -> TrainSettings:
    """The recipe's training, one forward a step, and no measurements within. Single steps run the target (but for
    STORED) and unroll all of train.unroll.ttt_steps, whatever the curriculum; they start from random weights, which
    change neither their seconds nor their memory."""
    train = job.recipe.train
    batch = {None: train.data.global_batch, "one row": 1}.get(job.layout) or rollouts_a_step(job)
    return replace(
        train,
        head=replace(train.head, init=train.head.init if job.layout is None else "random"),
        unroll=replace(train.unroll, curriculum=train.unroll.curriculum if job.layout is None else ()),
        data=replace(
            train.data,
            features=train.data.features if job.layout is None or job.variant == STORED else "online",
            global_batch=batch,
            micro_batch=batch,
        ),
        evaluation=replace(
            train.evaluation,
            real_every=None,
            real_shapes=(f"{CHAIN},1,{CHAIN + 1}",),
            real_temperatures=(0.0,),
            real_max_tokens=job.max_tokens,
        ),
        on_policy=OnPolicySettings(),
        tracking=TrackingSettings(),
    )


def rollouts_a_step(job: Job) -> int:
    """So many that a step holds about the job's tokens."""
    examples, _ = load_examples(job.run / ROLLOUTS, "train", job.recipe.train.data.max_length)
    return max(1, round(job.tokens * len(examples) / sum(examples.lengths)))


def measured_steps(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Seconds and memory of `job.steps` steps behind one that is not timed."""
    if job.layout == "one row":
        trainer.data = joined(trainer.data, job.tokens, job.steps + 1, trainer.target.max_context)
    data, device = trainer.data, trainer.target.device
    trainer.steps = job.steps + 1
    wall, processor, ids, loss = [], [], [], float("nan")
    held = restart_peak(device)
    for step, (_, _, indices) in enumerate(islice(data.plan.from_position(), trainer.steps)):
        began, before = time.perf_counter(), time.process_time()
        loss = trainer.optimise(step, indices)["loss"]
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step > 0:
            wall.append(time.perf_counter() - began)
            processor.append(time.process_time() - before)
            ids.append(sum(len(data.train[index].input_ids) for index in indices))
    return {
        **of_both(job, trainer),
        "layout": job.layout,
        "tokens": statistics.mean(ids),
        "steps": job.steps,
        "seconds_per_step": min(wall),
        "processor_seconds_per_step": min(processor),
        "tokens_per_s": statistics.mean(ids) / min(wall),
        "peak_memory_bytes": peak(device),
        "held_before_bytes": held,
        "accept_length": None,
        "loss": loss,
    }


def joined(data: Data, tokens: int, count: int, longest: int) -> Data:
    """Rollouts one behind the other in texts of `tokens` ids, one a step. Raises `ValueError` for a target that is not
    made for so many."""
    if tokens > longest:
        raise ValueError(f"a row of {tokens} ids came, but the target reads at most {longest}; lower --step-tokens")
    order = (index for _, _, batch in data.plan.from_position() for index in batch)
    texts = []
    while len(texts) < count:
        ids: list[int] = []
        response: list[bool] = []
        while len(ids) < tokens:
            example = data.train[next(order)]
            ids += example.input_ids
            response += example.response
        texts.append(Example(f"joined {len(texts)}", ids[:tokens], response[:tokens]))
    return replace(data, train=texts, plan=BatchPlan([tokens] * count, 1, data.plan.seed))


def trained_row(job: Job, trainer: Trainer) -> dict[str, Any]:
    """A training on the job's supervised tokens, and what its head is worth."""
    seen = [supervised(trainer.data.train[index]) for index in range(len(trainer.data.train))]
    batches, tokens = [], 0
    for _, _, indices in trainer.data.plan.from_position():
        batches.append(indices)
        tokens += sum(seen[index] for index in indices)
        if tokens >= job.tokens:
            break
    trainer.steps = len(batches)
    held = restart_peak(trainer.target.device)
    began, before, loss = time.perf_counter(), time.process_time(), float("nan")
    for step, indices in enumerate(batches):
        loss = trainer.optimise(step, indices)["loss"]
        if step % 50 == 0:
            print(f"{job.variant}: step {step} of {len(batches)}, loss {loss:.3f}", file=sys.stderr, flush=True)
    wall, processor = time.perf_counter() - began, time.process_time() - before
    return {
        **of_both(job, trainer),
        "layout": None,
        "tokens": tokens,
        "unique_tokens": sum(seen[index] for index in {index for indices in batches for index in indices}),
        "steps": len(batches),
        "seconds_per_step": wall / len(batches),
        "processor_seconds_per_step": processor / len(batches),
        "tokens_per_s": tokens / wall,
        "peak_memory_bytes": peak(trainer.target.device),
        "held_before_bytes": held,
        "loss": loss,
        **judged(job, trainer),
    }


def supervised(example: Example) -> int:
    """Tokens of a rollout that are supervised at the first step: response ids behind a response id."""
    return sum(a and b for a, b in zip(example.response, example.response[1:], strict=False))


def judged(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Forecast and real accept_length of the head as it is at the end of the training, measured alike for both; the
    real one where the job has prompts."""
    weights = gathered_weights(trainer.accelerator, trainer.model)
    target, side, plan = trainer.target, trainer.side, trainer.plan
    settings = replace(trainer.settings, unroll=replace(trainer.settings.unroll, ttt_steps=CHAIN))
    head = head_of(weights, plan.config, target.device, side.head_dtype)
    forecast = forecast_accept_length(
        trained_head(plan, settings, head, side.teacher).eval(), side, trainer.data.held_out, CHAIN
    )
    row = {
        "forecast": forecast.accept_length,
        "forecast_interval": forecast.interval,
        "forecast_verify_steps": forecast.verify_steps,
        "shape": "chain",
        "num_steps": CHAIN,
        "top_k": 1,
        "num_draft_tokens": CHAIN + 1,
        "temperature": 0.0,
    }
    if not job.prompts:
        return row | {"accept_length": None, "interval": None, "prompts": 0}
    prompts = read_held_out(job.run / ROLLOUTS, job.prompts, target.max_context - job.max_tokens)
    measurement = Measurement(target, prompts, settings, job.recipe.seed)
    (real,) = measurement.by_engine(as_draft(weights, plan.config, plan.token_map, target))
    return row | {
        "accept_length": real.accept_length,
        "interval": real.interval,
        "accept_rate": [None if math.isnan(rate) else rate for rate in real.stats.accept_rate],
        "prompts": len(prompts.prompts),
        "verify_steps": real.stats.verify_steps,
    }


def of_both(job: Job, trainer: Trainer) -> dict[str, Any]:
    return {
        "variant": job.variant,
        "seed": job.recipe.seed,
        "precision": trainer.settings.precision,
        "target_dtype": str(trainer.target.dtype),
    }
