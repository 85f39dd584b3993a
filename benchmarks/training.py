"""Ours beside the EAGLE-3 recipe as published: the same rollouts, token map, tokens, seed and machine.

    python benchmarks/training.py [--run runs/smollm2-135m] [--tokens 50000 200000] [--seeds 0 1 2] [a.b=c ...]

`published` is `training_published.py`; `ours` is the trainer by the recipe's own settings (`train.x.y=z` sets them).
Both unroll the recipe's train.unroll.ttt_steps and take the same batches in the same order, from the same rollouts.
Every line of the record has a process of its own. Two measurements:

step           a few steps of --step-tokens ids in one forward, the target's included: the rollouts as they are, and
               joined into one row as long as that, as long conversations would lie there: seconds, most memory held;
               of a recipe with train.data.features: offline, ours also with stored features in the target's place (what
               of them is absent is made first)
accept_length  a training on --tokens supervised tokens, of stored features where the recipe has them; then the
               forecast on the held-out rollouts, and the engine's own accept_length on their prompts, greedy, with a
               chain of 4

The published recipe keeps its authors' learning rate, which is too low for so few tokens: its accept_length is no
measure of ours. Ratios hold within one run: what else the machine does changes both. Processor seconds, with one
thread, hardly show it.
Writes benchmarks/results/training-recipes-<hardware>.json; with --only its name too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from rich.console import Console
from rich.table import Table
from training_jobs import CHAIN, LAYOUTS, STORED, VARIANTS, Job, in_process_of_its_own, work
from training_published import published_settings

from toolkit.bench.records import command_line, make_record
from toolkit.bench.table import decimal
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe, result_settings
from toolkit.threads import users_threads

DEFINITIONS = {
    "variant": "of a step the target's forward is in it, but for 'ours, stored features', which reads them from disk; "
    "trainings take features as the recipe says",
    "tokens": "of a step: ids in it, padding not counted; of a training: supervised tokens it saw",
    "seconds_per_step": "wall time; of `step` rows the least of the steps, of a training their mean",
    "processor_seconds_per_step": "processor time of the process; the least of the steps, of a training their mean",
    "start_processor_seconds": "loading the target, where the head starts from it fitting it, and where features are "
    "stored making or checking them; not in the steps",
    "start_tokens": "answer tokens that the head's start was fitted on (train.head.init=target), perhaps more than "
    "`tokens`",
    "tokens_per_s": "tokens of a step (the mean) by seconds_per_step",
    "peak_memory_bytes": "the most held while steps run: resident memory of the process on a CPU (pages of stored "
    "features included), tensors on a GPU",
    "held_before_bytes": "held before the first step: programs, target and head",
    "loss": "of the last step, each variant's own: not to be compared",
    "forecast": "accept_length of a chain of 4 on the held-out rollouts, teacher-forced",
    "accept_length": "by the engine: greedy, a chain of 4, on the prompts of the held-out rollouts",
    "interval": "95 %, bootstrap over rollouts and prompts",
}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The two tables, each line of ours beside the published one's."""
    steps = Table(title="one training step, one forward", title_justify="left")
    for column in ("ids", "laid out as", "variant", "seconds", "processor time", "peak, MB", "of the step, MB"):
        steps.add_column(column, justify="right")
    heads = Table(title=f"heads: greedy, chain of {CHAIN}, held-out prompts", title_justify="left")
    for column in ("tokens", "seed", "variant", "accept_length", "forecast", "verify steps", "s/step", "tokens/s"):
        heads.add_column(column, justify="right")
    for row in rows:
        if row["layout"] is not None:
            memory = (row["peak_memory_bytes"], row["peak_memory_bytes"] - row["held_before_bytes"])
            times = (decimal(row[name]) for name in ("seconds_per_step", "processor_seconds_per_step"))
            steps.add_row(
                f"{row['tokens']:.0f}", row["layout"], row["variant"], *times, *(f"{held / 1e6:.0f}" for held in memory)
            )
            continue
        heads.add_row(
            str(row["tokens"]),
            str(row["seed"]),
            row["variant"],
            with_interval(row["accept_length"], row["interval"]),
            with_interval(row["forecast"], row["forecast_interval"]),
            str(row["verify_steps"]),
            decimal(row["seconds_per_step"]),
            decimal(row["tokens_per_s"], 0),
        )
    for table in (steps, heads):
        if table.row_count:
            Console(width=110).print(table)


def with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    return decimal(value) + ("" if interval is None else " [{:.2f}, {:.2f}]".format(*interval))


def planned(args: argparse.Namespace, recipe: Recipe) -> list[Job]:
    """All lines of the record, ours right behind the published one."""
    base = Job("", recipe, args.run, 0, None, args.steps, args.prompts, args.max_tokens, args.threads)
    wanted: list[Job] = []
    if args.only != "accept_length":
        wanted += [replace(base, tokens=args.step_tokens, layout=layout) for layout in LAYOUTS]
    if args.only != "step":
        seeded = [replace(base, recipe=replace(recipe, seed=seed)) for seed in args.seeds]
        wanted += [replace(one, tokens=tokens) for tokens in args.tokens for one in seeded]
    stored = [STORED] if recipe.train.data.features == "offline" and "ours" in args.variants else []
    return [
        replace(job, variant=variant)
        for job in wanted
        for variant in [*args.variants, *(stored if job.layout == LAYOUTS[0] else [])]
    ]


def in_own_process(job: Job) -> dict[str, Any]:
    """A process that has ended gives all its memory back, and its peak is its own."""
    row = in_process_of_its_own(work, job)
    print(f"{row}", file=sys.stderr, flush=True)
    return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    parser.add_argument("--recipe", default=None, help="of the run, and of `ours` (default: the demo recipe)")
    parser.add_argument("--run", type=Path, help="folder with rollouts/ and token_map/ (default: the recipe's)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 200_000], help="supervised, of a training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--only", choices=("step", "accept_length"), help="one of the two measurements")
    parser.add_argument("--step-tokens", type=int, default=2048, help="ids of a measured step (default: 2048)")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed, behind one that is not")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts that the engine answers, at most")
    parser.add_argument("--max-tokens", type=int, default=96, help="of the engine's answers")
    parser.add_argument("--at-once", type=int, default=1, help="lines measured at a time, which then share the machine")
    parser.add_argument("--note", help="what else the machine did, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.threads = int(users_threads() or 1)
    return args


def main() -> int:
    args = arguments()
    recipe = load_recipe(args.recipe or DEMO_RECIPE, args.overrides)
    if recipe.train.head.kind != "eagle3":
        raise SystemExit(f"train.head.kind is {recipe.train.head.kind}; the published recipe is one of eagle3 heads")
    args.run = args.run or Path(recipe.run_dir)
    torch.set_num_threads(args.threads)
    with ThreadPoolExecutor(args.at_once) as waiting:
        rows = list(waiting.map(in_own_process, planned(args, recipe)))
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "run", "recipe", "note")}
    settings |= {"recipe": recipe.name, "target": recipe.target.model}
    settings["train"] = {
        "published": result_settings(published_settings(recipe.train)),
        "ours": result_settings(recipe.train),
    }
    record = make_record(
        "training", f"python benchmarks/{command_line()}", settings, rows, definitions=DEFINITIONS, note=args.note
    )
    show(rows)
    kind = f"-{args.only.replace('_', '-')}" if args.only else ""
    leave(record, f"training-recipes{kind}", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
