"""One training step of ours beside the published EAGLE-3 recipe's: seconds and memory, at equal ids, dtype and threads.

    python benchmarks/training.py [--run runs/smollm2-135m] [--step-tokens 2048] [--steps 5] [--repeats 3] [a.b=c ...]

`published` is the EAGLE-3 recipe as others publish it (`PublishedHead`), `ours` the trainer by the recipe's settings.
Both unroll all of the recipe's train.unroll.ttt_steps in one forward of --step-tokens ids, and run the target in the
step; of a recipe with train.data.features: offline `ours, stored features` is ours without the target (what of the
features is absent is made first). A step is of rollouts as they are, or of one row as long as that, as long
conversations would lie there. Every line is measured --repeats times, in turns, each in a process of its own.

What a trained head is worth, `few_tokens.py` measures. Ratios hold within one run: what else the machine does changes
both. Processor seconds, with one thread, hardly show it.
Writes benchmarks/results/training-recipes-step-<hardware>.json.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, in_process_of_its_own, leave, parser_of, peak, restart_peak, set_threads, settings_of, show
from torch import Tensor, nn

from toolkit.bench.bootstrap import summarise_replays
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.batches import Batch, BatchPlan, Example, collate
from toolkit.data.examples import load_examples
from toolkit.heads.draft_head import DraftHead
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe, result_settings
from toolkit.train.accelerator import check_weights
from toolkit.train.draft_head import trained_head
from toolkit.train.evaluation import Measurement
from toolkit.train.loop import Trainer
from toolkit.train.optimizer import rate_factor, set_learning_rates
from toolkit.train.state import Weights, gathered_weights, head_of
from toolkit.train.step import replayed_steps
from toolkit.train.target_side import OnlineFeatures
from toolkit.train.training_data import FORECAST_ROLLOUTS, Data, WholeTexts, read_held_out
from toolkit.train_settings import OnPolicySettings, OptimizerSettings, TrackingSettings, TrainSettings
from toolkit.weights import load_tensors, save_tensors

PUBLISHED: dict[str, dict[str, Any]] = {
    "head": {
        "kind": "eagle3", "layers": 1, "init": "random", "start_tokens": None, "lm_head": None, "fc_norm": False,
        "norm_output": False, "sliding_window": None,
    },
    "unroll": {
        "loss": "soft_cross_entropy", "step_decay": 0.8, "curriculum": (), "anchors": None, "checkpointing": False,
    },
    "optimizer": {
        "name": "adamw", "betas": (0.9, 0.999), "weight_decay": 0.0, "max_grad_norm": 0.5, "schedule": "cosine",
    },
    "data": {"pack": False, "supervise": "answers"},
}  # fmt: skip


def published_settings(settings: TrainSettings) -> TrainSettings:
    """The published recipe at these settings' rate, warm-up, number of steps, batch, lengths and precision."""
    sections = {name: replace(getattr(settings, name), **values) for name, values in PUBLISHED.items()}
    return replace(settings, **sections)


def shifted(x: Tensor) -> Tensor:
    """Column 0 of [B, L, ...] dropped, a column of zeros appended."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)


class DenseAttention:
    """Scores of every root with all step-0 keys [L, L], and one column for its own key of each later step."""

    def __init__(self, batch: int, length: int, device: torch.device) -> None:
        self.batch = batch
        self.future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, hd], k and v [T, kv_heads, hd] of one step -> [T, heads, hd]."""
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        self.keys.append(k.repeat_interleave(groups, dim=1))
        self.values.append(v.repeat_interleave(groups, dim=1))
        scores = q @ self.keys[0].transpose(-1, -2)
        scores = scores.masked_fill(self.future, torch.finfo(scores.dtype).min)
        own = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        scores = torch.cat((scores, *own), dim=-1) * q.shape[-1] ** -0.5
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        length = q.shape[2]
        out = weights[..., :length] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            out = out + weights[..., length + step, None] * value
        return out.transpose(1, 2).flatten(0, 1)


class PublishedHead(nn.Module):
    """A head with its unroll and loss. kept_ids [V] bool: the target ids that the draft vocabulary has.

    What SafeAILab's EAGLE (traineagle3) and SpecForge do, written anew: every weight random; the target's
    logits of all positions over its whole vocabulary, in fp32; a [L, L] matrix of attention scores for each of
    the K steps; draft logits of all positions kept for backward; a loss mask that is not shifted with the
    predictions (SpecForge issue 885); the mean over all B*L positions, supervised or not; AdamW. Where the two
    differ, SpecForge's choice is taken (rate 1e-4, cosine, the teacher's distribution computed once, not in
    each step). The head, the data, the target's forward and DeepSpeed are the product's, so that only the
    recipe differs. Its rate and warm-up (1e-4 and 0.015, which its authors chose for half a million samples)
    are the settings' own: `few_tokens.py` chooses them for the tokens there are. So is K, 4 in the demo's
    recipe and 7 in SpecForge's: a chain of 4, which judges the head, drafts by the first four steps.
    """

    def __init__(self, head: Eagle3Head, steps: int, step_decay: float, kept_ids: Tensor) -> None:
        super().__init__()
        self.head, self.steps, self.step_decay = head, steps, step_decay
        self.kept_ids = kept_ids

    def forward(self, aux: Tensor, embeds: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        """aux [B, L, W] and scores [B, L, V] fp32 of the target at each position, embeds [B, L, H] of each id, mask
        [B, L] bool as `lagging_mask` gives it -> the loss, sum over k of decay^k * (mean over B*L)."""
        (batch, length), reach = mask.shape, mask.shape[1] + self.steps
        positions = torch.arange(length, device=mask.device).repeat(batch)
        embeds, scores = shifted(embeds), shifted(scores)
        in_draft = self.kept_ids[scores.argmax(-1)]
        teacher = scores[..., self.kept_ids].softmax(-1)
        del scores
        attend = DenseAttention(batch, length, mask.device)
        hidden = self.head.first_hidden(aux.flatten(0, 1))
        total = aux.new_zeros((), dtype=torch.float32)
        for step in range(self.steps):
            hidden = self.head(embeds.flatten(0, 1), hidden, positions + step, attend, reach)
            logits = self.head.logits(hidden).float().unflatten(0, (batch, length))
            cross_entropy = -(teacher * F.log_softmax(logits, dim=-1)).sum(-1)
            total = total + self.step_decay**step * (cross_entropy * (in_draft & mask)).mean()
            embeds, teacher, in_draft, mask = map(shifted, (embeds, teacher, in_draft, mask))
        return total


def lagging_mask(batch: Batch) -> Tensor:
    """[B, L] bool: root t of step k, which predicts x_{t+2+k}, is supervised where x_{t+k} is a response id.

    A row's last id is taken out, as SpecForge does: its prediction would lie two past the end.
    """
    mask = batch.response.clone()
    mask[torch.arange(len(mask)), batch.lengths.cpu() - 1] = False
    return mask


class PublishedTrainer(Trainer):
    """The product's trainer with another head module, loss and step."""

    def __init__(self, recipe: Recipe, rollouts: Path, token_map: Path, directory: Path) -> None:
        super().__init__(replace(recipe, train=published_settings(recipe.train)), rollouts, token_map, directory)

    def _trained(self, head: Any) -> nn.Module:
        kept_ids = self.plan.token_map.t2d.to(self.target.device)
        return PublishedHead(head, self.settings.unroll.ttt_steps, self.settings.unroll.step_decay, kept_ids)

    def optimise(self, step: int, indices: list[int]) -> dict[str, Any]:
        set_learning_rates(self.optimizer, rate_factor(step, self.steps, self.settings), self.settings)
        batch = self._collate(indices)
        with torch.no_grad():
            features = self.side.features(batch)
            scores = self.target.logits(features.last).float()
            embeds = self.target.embed_tokens(batch.input_ids.to(self.target.device))
        dtype = self.side.head_dtype
        mask = lagging_mask(batch).to(self.target.device)
        with self.accelerator.accumulate(self.model):
            loss = self.model(features.aux.to(dtype), embeds.to(dtype), scores, mask)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": float(loss.detach())}


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
}


@dataclass(frozen=True)
class Job:
    """One training, and the judgement of its head by a half of the held-out rollouts, run/<split>.jsonl.

    run: a folder with rollouts, token map and features. tokens: supervised, of the training. prompts: at most so many
    are answered by the engine, none of `validation`. head: the file that keeps the trained weights.
    """

    variant: str
    recipe: Recipe
    run: Path
    tokens: int
    split: str
    prompts: int
    max_tokens: int
    threads: int
    head: Path = Path()


def work(job: Job) -> dict[str, Any]:
    """The row of a job; meant for a process of its own. A test of a head that is kept trains nothing."""
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as name:
        trainer = trainer_of(job.variant, job.recipe, benched(job), job.run, Path(name))
        row = about(job.variant, job.recipe, trainer)
        if job.split == TEST and job.head.exists():
            weights: Weights = load_tensors(job.head)
        else:
            row |= trained(job, trainer)
            weights = gathered_weights(trainer.accelerator, trainer.model)
            save_tensors(job.head, weights)
        device, config = trainer.target.device, trainer.plan.config
        return row | judged(job, trainer, lambda dtype: head_of(weights, config, device, dtype))


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


def judged(job: Job, trainer: Any, head_in: Callable[[torch.dtype], DraftHead]) -> dict[str, Any]:
    """Forecast and real accept_length of a head, measured alike for all; the real one where the job has prompts.
    head_in: gives the head in a dtype, the training's or the target's."""
    target, side, plan = trainer.target, copy.copy(trainer.side), trainer.plan
    side.features = OnlineFeatures(target, side.capture)  # these texts are not stored
    settings = replace(trainer.settings, unroll=replace(trainer.settings.unroll, ttt_steps=CHAIN))
    module = trained_head(plan, settings, head_in(side.head_dtype), side.teacher)
    file = job.run / f"{job.split}.jsonl"
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


VARIANTS = ("published", "ours")
LAYOUTS = ("rollouts", "one row")
COLUMNS = ("layout", "variant", "tokens", "seconds_per_step", "processor_seconds_per_step", "peak_memory_bytes",
           "held_before_bytes")  # fmt: skip
STORED = "ours, stored features"  # the recipe's train.data.features: offline
STEP_DEFINITIONS = {
    "variant": "the target's forward is in the step, but for 'ours, stored features', which reads them from disk",
    "tokens": "ids in a step, padding not counted",
    "seconds_per_step": "wall time, the least of the steps",
    "processor_seconds_per_step": "processor time of the process, the least of the steps",
    "tokens_per_s": "tokens of a step (the mean) / seconds_per_step",
    "repeat": "which of the measurements of this line, each in a process of its own",
    **{name: DEFINITIONS[name] for name in ("peak_memory_bytes", "held_before_bytes")},
}


@dataclass(frozen=True)
class StepJob:
    """One line of the record. tokens: ids of a step; steps: those that are timed; repeat: which measurement it is."""

    variant: str
    recipe: Recipe
    run: Path
    tokens: int
    layout: str
    steps: int
    threads: int
    repeat: int


def step_row(job: StepJob) -> dict[str, Any]:
    """The row of a job: seconds and memory of its steps behind one that is not timed."""
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as name:
        trainer = trainer_of(job.variant, job.recipe, single_steps(job), job.run, Path(name))
        return about(job.variant, job.recipe, trainer) | measured_steps(job, trainer)


def single_steps(job: StepJob) -> TrainSettings:
    """Steps of one forward that run the target (but for STORED) and unroll all of train.unroll.ttt_steps, whatever the
    curriculum; from random weights, which change neither their seconds nor their memory."""
    train = alone(job.recipe.train)
    batch = 1 if job.layout == "one row" else rollouts_a_step(job)
    features = train.data.features if job.variant == STORED else "online"
    return replace(
        train,
        head=replace(train.head, init="random", start_tokens=None),
        unroll=replace(train.unroll, curriculum=()),
        data=replace(train.data, features=features, global_batch=batch, micro_batch=batch),
    )


def rollouts_a_step(job: StepJob) -> int:
    """So many that a step holds about the job's tokens."""
    examples, _ = load_examples(job.run / ROLLOUTS, "train", job.recipe.train.data.max_length)
    return max(1, round(job.tokens * len(examples) / sum(examples.lengths)))


def measured_steps(job: StepJob, trainer: Any) -> dict[str, Any]:
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
        "layout": job.layout,
        "repeat": job.repeat,
        "tokens": statistics.mean(ids),
        "steps": job.steps,
        "seconds_per_step": min(wall),
        "processor_seconds_per_step": min(processor),
        "tokens_per_s": statistics.mean(ids) / min(wall),
        "peak_memory_bytes": peak(device),
        "held_before_bytes": held,
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


def medians(rows: Sequence[Row]) -> list[Row]:
    """A line a step: medians over the repeats."""
    found = []
    for layout, variant in dict.fromkeys((row["layout"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["layout"], row["variant"]) == (layout, variant)]
        middle = {name: statistics.median(row[name] for row in mine) for name in COLUMNS[2:]}
        found.append({"layout": layout, "variant": variant, **middle})
    return found


def planned(args: argparse.Namespace, recipe: Recipe) -> list[StepJob]:
    """All lines of the record, ours right behind the published one, repeat by repeat."""
    stored = [STORED] if recipe.train.data.features == "offline" else []
    return [
        StepJob(variant, recipe, args.run, args.step_tokens, layout, args.steps, args.threads, repeat)
        for repeat in range(args.repeats)
        for layout in LAYOUTS
        for variant in [*VARIANTS, *(stored if layout == LAYOUTS[0] else [])]
    ]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    parser.add_argument("--recipe", default=DEMO_RECIPE, help="of the run, and of `ours` (default: the demo recipe)")
    parser.add_argument("--run", type=Path, help="folder with rollouts/ and token_map/ (default: the recipe's)")
    parser.add_argument("--step-tokens", type=int, default=2048, help="ids of a measured step (default: 2048)")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed, behind one that is not")
    args = parser.parse_intermixed_args()
    args.threads = set_threads(1)
    return args


def main() -> int:
    args = arguments()
    recipe = load_recipe(args.recipe, args.overrides)
    if recipe.train.head.kind != "eagle3":
        raise SystemExit(f"train.head.kind is {recipe.train.head.kind}; the published recipe is one of eagle3 heads")
    args.run = args.run or Path(recipe.run_dir)
    rows = [in_process_of_its_own(step_row, job) for job in planned(args, recipe)]
    trainings = {"published": result_settings(published_settings(recipe.train)), "ours": result_settings(recipe.train)}
    settings = settings_of(args, recipe=recipe.name, target=recipe.target.model, train=trainings)
    show(medians(rows), COLUMNS, "one training step, one forward: medians")
    leave(args, "training", "training-recipes-step", settings, rows, definitions=STEP_DEFINITIONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
