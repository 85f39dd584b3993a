"""One training step of ours beside the published EAGLE-3 recipe's: seconds and memory, at equal ids, dtype and threads.

    python benchmarks/training.py [--run runs/smollm2-135m] [--step-tokens 2048] [--steps 5] [--repeats 3] [a.b=c ...]

`published` is `training_published.py`; `ours` is the trainer by the recipe's own settings (`train.x.y=z` sets them).
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
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from harness import Row, in_process_of_its_own, leave, parser_of, peak, restart_peak, set_threads, settings_of, show
from training_jobs import ROLLOUTS, about, alone, trainer_of
from training_published import published_settings

from toolkit.data.batches import BatchPlan, Example
from toolkit.data.examples import load_examples
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe, result_settings
from toolkit.train.training_data import Data
from toolkit.train_settings import TrainSettings

VARIANTS = ("published", "ours")
LAYOUTS = ("rollouts", "one row")
COLUMNS = ("layout", "variant", "tokens", "seconds_per_step", "processor_seconds_per_step", "peak_memory_bytes",
           "held_before_bytes")  # fmt: skip
STORED = "ours, stored features"  # the recipe's train.data.features: offline
DEFINITIONS = {
    "variant": "the target's forward is in the step, but for 'ours, stored features', which reads them from disk",
    "tokens": "ids in a step, padding not counted",
    "seconds_per_step": "wall time, the least of the steps",
    "processor_seconds_per_step": "processor time of the process, the least of the steps",
    "tokens_per_s": "tokens of a step (the mean) / seconds_per_step",
    "peak_memory_bytes": "held while steps run: resident memory of the process on a CPU (pages of stored features "
    "included), tensors on a GPU",
    "held_before_bytes": "held before the first step: programs, target and head",
    "repeat": "which of the measurements of this line, each in a process of its own",
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


def work(job: StepJob) -> dict[str, Any]:
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
    stored = [STORED] if recipe.train.data.features == "offline" and "ours" in args.variants else []
    return [
        StepJob(variant, recipe, args.run, args.step_tokens, layout, args.steps, args.threads, repeat)
        for repeat in range(args.repeats)
        for layout in LAYOUTS
        for variant in [*args.variants, *(stored if layout == LAYOUTS[0] else [])]
    ]


def in_own_process(job: StepJob) -> dict[str, Any]:
    """A process that has ended gives all its memory back, and its peak is its own."""
    row = in_process_of_its_own(work, job)
    print(f"{row}", file=sys.stderr, flush=True)
    return row


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    parser.add_argument("--recipe", default=None, help="of the run, and of `ours` (default: the demo recipe)")
    parser.add_argument("--run", type=Path, help="folder with rollouts/ and token_map/ (default: the recipe's)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--step-tokens", type=int, default=2048, help="ids of a measured step (default: 2048)")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed, behind one that is not")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of every line (default: 3)")
    args = parser.parse_intermixed_args()
    args.threads = set_threads(1)
    return args


def main() -> int:
    args = arguments()
    recipe = load_recipe(args.recipe or DEMO_RECIPE, args.overrides)
    if recipe.train.head.kind != "eagle3":
        raise SystemExit(f"train.head.kind is {recipe.train.head.kind}; the published recipe is one of eagle3 heads")
    args.run = args.run or Path(recipe.run_dir)
    rows = [in_own_process(job) for job in planned(args, recipe)]
    trainings = {"published": result_settings(published_settings(recipe.train)), "ours": result_settings(recipe.train)}
    settings = settings_of(args, recipe=recipe.name, target=recipe.target.model, train=trainings)
    show(medians(rows), COLUMNS, "one training step, one forward: medians")
    leave(args, "training", "training-recipes-step", settings, rows, definitions=DEFINITIONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
