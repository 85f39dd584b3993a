"""`toolkit run`: the whole pipeline of a recipe."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from toolkit.pipeline.run import MEASURED, REPORT_PAGE, Run, run_recipe
from toolkit.recipe import load_recipe, print_config
from toolkit.train_settings import changed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="recipe file, e.g. recipes/smollm2-135m.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    parser.add_argument("--print-config", action="store_true", help="print the resolved recipe and end")
    parser.add_argument("--force", metavar="STAGE", help="redo this stage and all after it")
    parser.add_argument("--until", metavar="STAGE", help="end after this stage")
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="training processes (default: one a GPU, else 1)"
    )
    parser.epilog = (
        "Stages: prompts, rollouts, token_map, train, measure, report. An interrupted run resumes. Files of "
        "changed settings are moved to <run>/replaced, never mixed with new ones."
    )


def run(args: argparse.Namespace) -> int:
    """Runs the stages, prints their results and the commands that use the head."""
    recipe = load_recipe(args.recipe, args.overrides)
    if args.print_config:
        print_config(recipe)
        return 0
    trains = args.until not in ("prompts", "rollouts", "token_map")
    job = Run(recipe, args.recipe, tuple(args.overrides), processes=args.num_processes, trains=trains)
    outcomes = run_recipe(job, force=args.force, until=args.until)
    if outcomes[-1].stage == "report":
        print(next_steps(job))
    return 0


def next_steps(job: Run) -> str:
    """What was measured, where the report is, and the commands that use the head or, if it does not pay, may help."""
    text = (job.folder / MEASURED).read_text(encoding="utf-8")
    measured = json.loads(text)  # `weights.read_json` would load torch
    lines = ["", *([measured["outcome"]] if measured.get("outcome") else [])]
    lines += [f"report: {job.folder / REPORT_PAGE}", "", "next:"]
    # A file of an earlier version has no recommendation; serve and chat then draft adaptively.
    chosen, own = measured.get("recommended", "adaptive"), job.recipe.target
    name = own.model if own.revision is None else f"{own.model}@{own.revision}"
    given = [(one, getattr(own, one)) for one in changed(own, "dtype", "quantization", "chat_template")]
    target = shlex.join(["--target", name, *(f"--{one.replace('_', '-')}={value}" for one, value in given)])
    ckpt = shlex.quote(str(job.folder / "ckpt"))
    if chosen is None:
        train = job.recipe.train
        more = {"epochs": 2 * train.epochs} if train.max_steps is None else {"max_steps": 2 * train.max_steps}
        new = [*(f"train.{name}={value}" for name, value in more.items()), f"run_dir={job.recipe.run_dir}-longer"]
        kept = [one for one in job.overrides if not one.startswith(tuple(one.partition("=")[0] + "=" for one in new))]
        lines.append(f"  toolkit bench acceptance --draft ngram {target}   # drafts without a head")
        lines.append(f"  toolkit run {shlex.join([str(job.recipe_path), *kept, *new])}   # longer training")
        rows = [row for row in measured.get("rows", ()) if row["shape"] == "adaptive" and row.get("lookup")]
        pays = any(round(row["speedup"] or 0, 2) > 1 for row in rows)
        how = f"--draft ngram {target}   # lookup alone" if pays else f"{target}   # plain decoding"
        lines.append(f"  toolkit serve {how}")
    else:
        shape = "" if chosen == "adaptive" else f" --shape {chosen}"
        lines += [f"  toolkit {command} --draft {ckpt}{shape}" for command in ("chat", "serve")]
    return "\n".join(lines)
