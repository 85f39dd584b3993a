"""`toolkit train`: the training stage, in processes of its own under `accelerate launch`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from toolkit.commands.launch import run_training, set_threads, training_line, training_processes
from toolkit.commands.pipeline import CKPT_CONFIG, PROMPTS, ROLLOUTS, TOKEN_MAP, Run
from toolkit.commands.recipe_arguments import add_recipe_arguments, run_of, say
from toolkit.commands.stages import PipelineError, run_stages
from toolkit.weights import read_json

HELP = "train the draft head of a recipe (starts accelerate launch toolkit/train/eagle3.py, or that of its kind)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--num-processes", type=int, metavar="N", help="processes (default: one a GPU, else 1)")
    parser.add_argument(
        "--config-file", type=Path, metavar="FILE", help="accelerate settings (default: recipes/accelerate/zero2.yaml)"
    )
    parser.add_argument("--force", action="store_true", help="train again, even when the head is up to date")
    parser.epilog = "Rollouts and token map come from the recipe's run folder; what is absent is made first."


def run(args: argparse.Namespace) -> int:
    """Trains; the exit status is that of the training processes."""
    job = run_of(args)
    job.processes, job.accelerate_config, job.trains = args.num_processes, args.config_file, True
    there = all((job.folder / name).is_file() for name in (PROMPTS, ROLLOUTS, TOKEN_MAP))
    selection = {"only": "train"} if there else {"until": "train"}
    if not there:
        set_threads()
    try:
        run_stages(job.folder, job.stages(), force="train" if args.force else None, say=say, **selection)
    except PipelineError as error:
        # The training processes' own status, for scripts.
        print(f"toolkit: error: {error}", file=sys.stderr)
        return error.status
    return 0


def train_head(job: Run) -> str:
    """Run the training processes over the run folder; they continue from their newest state.

    Raises `PipelineError` with their exit status when they fail.
    """
    processes = training_processes(job.processes, job.recipe.train)
    job.recipe.train.check_processes(processes)
    threads = set_threads(processes)
    line = training_line(job.recipe_path, job.overrides, processes, job.accelerate_config, job.recipe.train.head.kind)
    say(f"      {processes} process(es), {threads} threads each (OMP_NUM_THREADS)")
    status = run_training(line)
    if status:
        raise PipelineError(f"training ended with status {status}; its message is above, its states are kept", status)
    training = read_json(job.folder / CKPT_CONFIG)["toolkit"].get("training", {})
    forecast, real = training.get("forecast_accept_length"), training.get("real_accept_length")
    best = "" if forecast is None else f", forecast accept_length {forecast:.2f} on held-out rollouts"
    if real is not None:
        best = f", real accept_length {real:.2f} on held-out prompts (mean over draft shapes and temperatures)"
    return f"{training.get('steps', '?')} steps{best}"
