"""The train stage: the training processes under `accelerate launch`, over the run folder."""

from __future__ import annotations

from pathlib import Path

from toolkit.pipeline.launch import run_training, set_threads, training_line, training_processes
from toolkit.pipeline.run import CKPT_CONFIG, Run
from toolkit.pipeline.stages import PipelineError, say
from toolkit.weights import read_json


def train_stage(run: Run) -> str:
    """Run the training processes; they continue from their newest state. Returns a headline.

    Raises `PipelineError` with their exit status when they fail.
    """
    run.release_target()
    processes = training_processes(run.processes, run.recipe.train)
    run.recipe.train.check_processes(processes)
    threads = set_threads(processes)
    line = training_line(run.recipe_path, run.overrides, processes, run.accelerate_config, run.recipe.train.head.kind)
    say(f"      {processes} process(es), {threads} threads each")
    status = run_training(line)
    if status:
        kept = f"; states in {states} are kept" if any((states := run.folder / "train").glob("state-*")) else ""
        raise PipelineError(f"training ended with status {status}; its message is above{kept}", status)
    return training_headline(run.folder)


def training_headline(folder: Path) -> str:
    """What the draft directory of a finished training says of it."""
    block = read_json(folder / CKPT_CONFIG)["toolkit"]
    training, before = block.get("training", {}), block.get("init", {}).get("accept_length_before")
    forecast, real = training.get("forecast_accept_length"), training.get("real_accept_length")
    best = "" if forecast is None else f", forecast accept_length {forecast:.2f} on held-out rollouts"
    if real is not None:
        best = f", real accept_length {real:.2f} on held-out prompts (mean over draft shapes and temperatures)"
    return f"{training.get('steps', '?')} steps{best}{'' if before is None else f', {before:.2f} before training'}"
