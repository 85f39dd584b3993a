"""One training of a benchmark, in a process of its own: what it took, and what its head is worth."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from harness import peak, restart_peak
from training_published import PublishedTrainer

from toolkit.bench.bootstrap import summarise_replays
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.batches import Example, collate
from toolkit.data.examples import load_examples
from toolkit.heads.draft_head import DraftHead
from toolkit.recipe import Recipe
from toolkit.train.accelerator import check_weights
from toolkit.train.draft_head import trained_head
from toolkit.train.evaluation import Measurement
from toolkit.train.loop import Trainer
from toolkit.train.state import Weights, gathered_weights, head_of
from toolkit.train.step import replayed_steps
from toolkit.train.training_data import FORECAST_ROLLOUTS, WholeTexts, read_held_out
from toolkit.train.warm_start import regression_batches
from toolkit.train_settings import OnPolicySettings, OptimizerSettings, TrackingSettings, TrainSettings
from toolkit.weights import atomic_write, load_tensors, save_tensors

ROLLOUTS, TOKEN_MAP = "rollouts/rollouts.jsonl", "token_map/token_map.safetensors"
VALIDATION, TEST = SPLITS = ("validation", "test")
CHAIN = 4
AT_ONCE = 8  # held-out rollouts of one forward
DEFINITIONS = {
    "tokens": "answer tokens that the training saw, without the first of each answer; under train.data.supervise=all "
    "it learned from prompts as well",
    "learning_rate": "the highest, of Muon under train.optimizer.name muon, else of AdamW",
    "seconds_per_step": "wall time, the mean",
    "processor_seconds_per_step": "processor time of the process, the mean",
    "start_tokens": "tokens that the head's start was fitted on (train.head.init=target): of the first rollouts of the "
    "training, up to the one that reaches `asked_tokens`; under train.data.supervise=all those of prompts count",
    "start_seconds": "building the head with its start, and its optimizer",
    "seconds": "of the training: all steps and the start. Loading the target and storing features is in no row",
    "tokens_per_s": "tokens / seconds",
    "peak_memory_bytes": "held while steps run: resident memory of the process on a CPU (pages of stored features "
    "included), tensors on a GPU",
    "held_before_bytes": "held before the first step: programs, target and head",
    "loss": "of the last step, each variant's own: not to be compared",
    "forecast": "accept_length of a chain of 4 on held-out rollouts, teacher-forced",
    "accept_length": "by the engine: greedy, a chain of 4, on the prompts of held-out rollouts",
    "interval": "95 %, bootstrap over rollouts or prompts",
    "by_prompt": "tokens committed by the engine's verify steps, and their number, by prompt",
    "forecast_by_prompt": "the same of the forecast, by rollout",
}


@dataclass(frozen=True)
class Job:
    """One training, and the judgement of its head. run: a folder with rollouts, token map and features. tokens:
    supervised, of the training. split: the half of the held-out rollouts that judges the head, run/<split>.jsonl; None:
    all of them. prompts: at most so many are answered by the engine, none of `validation`. head: the file or folder
    that keeps the trained weights, beside what their training took: a job that finds both trains nothing."""

    variant: str
    recipe: Recipe
    run: Path
    tokens: int
    split: str | None
    prompts: int
    max_tokens: int
    threads: int
    head: Path | None = None


def work(job: Job) -> dict[str, Any]:
    """The row of a job; meant for a process of its own. Of a head that is kept, what its training took is read."""
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as name:
        began = trainer_of(job.variant, job.recipe, benched(job), job.run, Path(name))
        row = about(job.variant, job.recipe, began)
        if job.head is not None and (took := what_it_took(job.head)) is not None:
            row |= took
            weights: Weights = load_tensors(job.head)
        else:
            took = trained(job, began)
            row |= took
            weights = gathered_weights(began.accelerator, began.model)
            if job.head is not None:
                save_tensors(job.head, weights)
                keep_what_it_took(job.head, took)
        device, config = began.target.device, began.plan.config
        return row | judged(job, began, lambda dtype: head_of(weights, config, device, dtype))


def what_it_took(head: Path) -> dict[str, Any] | None:
    """The columns of a kept head's training; None where the head is missing, or was left half written."""
    file = _took(head)
    return json.loads(file.read_text(encoding="utf-8")) if head.exists() and file.is_file() else None


def keep_what_it_took(head: Path, took: dict[str, Any]) -> None:
    """The last thing that is written of a training: a head without it was cut off."""
    with atomic_write(_took(head)) as file:
        file.write_text(json.dumps(took), encoding="utf-8")


def _took(head: Path) -> Path:
    return head.with_name(f"{head.name}.json")


def trainer_of(variant: str, recipe: Recipe, train: TrainSettings, run: Path, folder: Path) -> Any:
    """The trainer of a variant with its head, whose start took `start_seconds` and `start_processor_seconds`; every
    variant but "published" is the product's own trainer. train: in place of the recipe's; folder: an empty one, for
    what it writes."""
    base: type[Trainer] = PublishedTrainer if variant == "published" else Trainer

    class Timed(base):  # type: ignore[misc, valid-type]
        def _prepare(self) -> Any:
            began, before = time.perf_counter(), time.process_time()
            found = super()._prepare()
            self.start_seconds = time.perf_counter() - began
            self.start_processor_seconds = time.process_time() - before
            return found

    recipe = replace(recipe, rollouts=replace(recipe.rollouts, keep_features=False), train=train)
    borrow_features(run / "features", folder / "features")
    return Timed(recipe, run / ROLLOUTS, run / TOKEN_MAP, folder / "train")


def borrow_features(theirs: Path, ours: Path) -> None:
    """The run's stored features as links: what a training adds or removes is not in the run's folder."""
    ours.mkdir()
    for file in theirs.glob("*"):
        (ours / file.name).symlink_to(file.resolve())


def benched(job: Job) -> TrainSettings:
    """The recipe's training, one forward a step, no measurements within, and a start of no more than its tokens."""
    train = job.recipe.train
    most = job.tokens if train.start == "target" else None
    return replace(
        alone(train),
        head=replace(train.head, start_tokens=most),
        data=replace(train.data, micro_batch=train.data.global_batch),
        evaluation=replace(
            train.evaluation,
            real_every=None,
            real_shapes=(f"{CHAIN},1,{CHAIN + 1}",),
            real_temperatures=(0.0,),
            real_max_tokens=job.max_tokens,
        ),
    )


def alone(train: TrainSettings) -> TrainSettings:
    """The same training without fresh rollouts, trackers and measurements by the engine."""
    evaluation = replace(train.evaluation, real_every=None)
    return replace(train, evaluation=evaluation, on_policy=OnPolicySettings(), tracking=TrackingSettings())


def rate_of(optimizer: OptimizerSettings) -> float:
    return optimizer.muon_learning_rate if optimizer.name == "muon" else optimizer.learning_rate


def trained(job: Job, trainer: Any) -> dict[str, Any]:
    """What a training took that ends with the batch that reaches the job's supervised tokens."""
    batches, of_data = batches_until(trainer, job.tokens)
    trainer.steps = len(batches)
    held = restart_peak(trainer.target.device)
    began, before, loss = time.perf_counter(), time.process_time(), float("nan")
    for step, indices in enumerate(batches):
        loss = trainer.optimise(step, indices)["loss"]
        if step % 50 == 0:
            print(f"{job.variant}: step {step} of {len(batches)}, loss {loss:.3f}", file=sys.stderr, flush=True)
    wall, processor = time.perf_counter() - began, time.process_time() - before
    check_weights(trainer.accelerator, trainer.model, len(batches), trainer.directory)
    seconds = wall + trainer.start_seconds
    return of_data | {
        "start_tokens": start_tokens(trainer),
        "start_seconds": trainer.start_seconds,
        "start_processor_seconds": trainer.start_processor_seconds,
        "steps": len(batches),
        "seconds_per_step": wall / len(batches),
        "processor_seconds_per_step": processor / len(batches),
        "seconds": seconds,
        "processor_seconds": processor + trainer.start_processor_seconds,
        "tokens_per_s": of_data["tokens"] / seconds,
        "peak_memory_bytes": peak(trainer.target.device),
        "held_before_bytes": held,
        "loss": loss,
    }


def batches_until(trainer: Any, wanted: int) -> tuple[list[list[int]], dict[str, int]]:
    """The rollouts of each step until so many tokens are supervised, and how many those are, all and unique."""
    train = trainer.data.train
    answers = train.examples if isinstance(train, WholeTexts) else train
    seen = [supervised(answers[index]) for index in range(len(answers))]
    batches, tokens = [], 0
    for _, _, indices in trainer.data.plan.from_position():
        batches.append(indices)
        tokens += sum(seen[index] for index in indices)
        if tokens >= wanted:
            break
    unique = sum(seen[index] for index in {index for indices in batches for index in indices})
    return batches, {"tokens": tokens, "unique_tokens": unique}


def supervised(example: Example) -> int:
    """Tokens of a rollout that are supervised at the first step: response ids behind a response id."""
    return sum(a and b for a, b in zip(example.response, example.response[1:], strict=False))


def start_tokens(trainer: Any) -> int:
    """Supervised tokens that the regression of the head's start read: the first of the training's order."""
    if trainer.settings.start != "target":
        return 0
    batches = (trainer._collate(indices) for indices in trainer.data.plan.epoch(0))
    columns = trainer.model.module.head.warm_start().solved.in_features
    taken = regression_batches(batches, columns, trainer.settings.head.start_tokens)
    return sum(int(batch.response.sum()) for batch in taken)


def judged(job: Job, trainer: Any, head_in: Callable[[torch.dtype], DraftHead]) -> dict[str, Any]:
    """Forecast and real accept_length of a head, measured alike for all; the real one where the job has prompts.
    head_in: gives the head in a dtype, the training's or the target's."""
    target, side, plan = trainer.target, trainer.side.online(), trainer.plan
    settings = replace(trainer.settings, unroll=replace(trainer.settings.unroll, ttt_steps=CHAIN))
    module = trained_head(plan, settings, head_in(side.head_dtype), side.teacher)
    file = job.run / (ROLLOUTS if job.split is None else f"{job.split}.jsonl")
    examples, _ = load_examples(file, "held_out", min(settings.data.max_length, target.max_context))
    kept = list(islice(examples, FORECAST_ROLLOUTS))
    batches = [collate(kept[at : at + AT_ONCE], trainer.data.pad_id) for at in range(0, len(kept), AT_ONCE)]
    replays = replayed_steps(module.eval(), side, batches, CHAIN)
    forecast = summarise_replays(replays, CHAIN)
    row = {
        "split": job.split,
        "forecast": forecast.accept_length,
        "forecast_interval": forecast.interval,
        "forecast_verify_steps": forecast.verify_steps,
        "forecast_by_prompt": [(sum(steps) + len(steps), len(steps)) for steps in replays],
        "shape": "chain",
        "num_steps": CHAIN,
        "top_k": 1,
        "num_draft_tokens": CHAIN + 1,
        "temperature": 0.0,
    }
    if not job.prompts or job.split == VALIDATION:
        return row | {"accept_length": None, "interval": None, "prompts": 0}
    prompts = read_held_out(file, job.prompts, target.max_context - job.max_tokens)
    measurement = Measurement(target, prompts, settings, job.recipe.seed)
    (real,) = measurement.by_engine(DraftCheckpoint(head_in(target.dtype), plan.token_map))
    return row | {
        "accept_length": real.accept_length,
        "interval": real.interval,
        "by_prompt": real.by_prompt,
        "accept_rate": [None if math.isnan(rate) else rate for rate in real.stats.accept_rate],
        "prompts": len(prompts),
        "verify_steps": real.stats.verify_steps,
    }


def about(variant: str, recipe: Recipe, trainer: Any) -> dict[str, Any]:
    """What every row states of its training's settings."""
    return {
        "variant": variant,
        "seed": recipe.seed,
        "optimizer": trainer.settings.optimizer.name,
        "learning_rate": rate_of(trainer.settings.optimizer),
        "warmup_ratio": trainer.settings.optimizer.warmup_ratio,
        "precision": trainer.settings.precision,
        "target_dtype": str(trainer.target.dtype),
    }
