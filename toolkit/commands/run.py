"""`toolkit run`: the whole pipeline of a recipe."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from toolkit.pipeline.rehearsal import estimate, rehearsed, write_prompts
from toolkit.pipeline.run import MEASURED, REPORT_PAGE, Run, run_recipe
from toolkit.recipe import print_config
from toolkit.train_settings import changed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="recipe file, e.g. recipes/smollm2-135m.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    parser.add_argument("--print-config", action="store_true", help="print the resolved recipe and end")
    parser.add_argument("--force", metavar="STAGE", help="redo this stage and all after it")
    parser.add_argument("--until", metavar="STAGE", help="end after this stage")
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="training processes (default: one a GPU or part of a row)"
    )
    parser.epilog = (
        "Stages: prompts, rollouts, token_map, train, measure, report. An interrupted run resumes. Files of "
        "changed settings are moved to <run>/replaced, never mixed with new ones."
    )


def run(args: argparse.Namespace) -> int:
    """Runs the stages, prints their results and the commands that use the head."""
    recipe, whole, overrides = rehearsed(args.recipe, args.overrides)
    if args.print_config:
        print_config(recipe)
        return 0
    if whole is not None:
        write_prompts(recipe)
    trains = args.until not in ("prompts", "rollouts", "token_map")
    job = Run(recipe, args.recipe, tuple(overrides), processes=args.num_processes, trains=trains)
    run_recipe(job, force=args.force, until=args.until)
    if args.until in (None, "report"):
        print(next_steps(job) if whole is None else "\n" + estimate(job, whole))
    return 0


def next_steps(job: Run) -> str:
    """What was measured, where the report is, and the commands that use the head or, if it does not pay, may help."""
    text = (job.folder / MEASURED).read_text(encoding="utf-8")
    measured = json.loads(text)  # `weights.read_json` would load torch
    lines = ["", *([measured["outcome"]] if measured.get("outcome") else [])]
    lines += [f"report: {job.folder / REPORT_PAGE}", "", "next:"]
    chosen, own = measured["recommended"], job.recipe.target
    name = own.model if own.revision is None else f"{own.model}@{own.revision}"
    given = [(one, getattr(own, one)) for one in changed(own, "dtype", "quantization", "chat_template")]
    target = shlex.join(["--target", name, *(f"--{one.replace('_', '-')}={value}" for one, value in given)])
    ckpt = shlex.quote(str(job.folder / "ckpt"))
    if chosen is None:
        lines.append(f"  toolkit bench acceptance --draft ngram {target}   # drafts without a head")
        lines.append(f"  toolkit serve {target}   # plain decoding")
    else:
        shape = "" if chosen == "adaptive" else f" --shape {chosen}"
        commands = ("serve",) if own.chat_template == "none" else ("chat", "serve")  # a base model takes no chats
        lines += [f"  toolkit {command} --draft {ckpt}{shape}" for command in commands]
    return "\n".join(lines)
