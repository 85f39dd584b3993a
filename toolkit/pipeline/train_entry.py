"""What the accelerate entries (toolkit/train/eagle3.py and others) do: parse, bring the stages before training up to
date, train.

Process 0 runs these stages in a process of its own, `toolkit prepare-data`, for two reasons. The launcher gives its
workers one thread each and a rank, and torch and accelerate read both only once. And the memory of the engine is free
again when that process ends.
"""

from __future__ import annotations

import argparse
import atexit
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from toolkit.errors import exit_status
from toolkit.log import get_logger
from toolkit.pipeline.launch import STAGES_DONE, check_packages
from toolkit.pipeline.run import ROLLOUTS, TOKEN_MAP, Run, put_by_hand, recipe_stages, training_headline
from toolkit.pipeline.stages import PipelineError, record_done
from toolkit.recipe import DEMO_RECIPE, REPOSITORY, RecipeError, load_recipe
from toolkit.recipe_fields import HeadName
from toolkit.threads import users_threads

log = get_logger(__name__)

_STORE_KEY = "toolkit/stages before training"
# Rollouts of a large target take days. If process 0 fails meanwhile, the launcher ends the others.
_PATIENCE = timedelta(days=30)
_kept: list[Any] = []
# The launcher's variables describe its group of processes; the stages run outside of it.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def bring_up_to_date(run_dir: Path, recipe_path: str, overrides: Sequence[str]) -> None:
    """Process 0 brings the stages before training up to date; the others wait for it. All processes must call this.

    Files without a manifest were put there by hand; they are taken as they are.
    Raises `PipelineError` when a stage fails.
    """
    if os.environ.get(STAGES_DONE) == "1":
        return
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        _run_where_needed(run_dir, recipe_path, overrides)
        return
    import torch.distributed

    # The launch's own key-value store: files of an earlier launch could be mistaken for those of this one.
    store, rank, _ = next(iter(torch.distributed.rendezvous("env://")))
    if rank == 0:
        _run_where_needed(run_dir, recipe_path, overrides)
        store.set(_STORE_KEY, "done")
    store.wait([_STORE_KEY], _PATIENCE)
    # Process 0 may be the server of the store. The process group uses the same server while this store is alive.
    _kept.append(store)


def _run_where_needed(run_dir: Path, recipe_path: str, overrides: Sequence[str]) -> None:
    if put_by_hand(run_dir):
        return
    line = [sys.executable, "-m", "toolkit", "prepare-data", "--recipe", recipe_path, *overrides]
    status = subprocess.run(line, env=stage_environment(), check=False).returncode
    if status:
        raise PipelineError(f"the stages before training ended with status {status}; see their message above")


def stage_environment() -> dict[str, str]:
    """Our environment without the launcher's variables for its workers; this checkout can be imported there."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHERS and not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    threads = users_threads()
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return environment


def train_from_command_line(head: HeadName, argv: Sequence[str] | None) -> int:
    """Train a head of this kind. Returns an exit status; errors for the user are one line on stderr."""
    parser = argparse.ArgumentParser(description=f"Train a draft head: {head}.")
    parser.add_argument("--recipe", default=str(DEMO_RECIPE), help="recipe file; default: the demo recipe")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    args = parser.parse_args(argv)
    return exit_status(lambda: _train(head, args.recipe, args.overrides))


def _train(head: HeadName, path: str, overrides: Sequence[str]) -> int:
    recipe = load_recipe(path, overrides, head=head)
    asked = recipe.train.head.kind
    if asked != head:
        raise RecipeError(f"train.head.kind is {asked}, and this script trains {head}: launch toolkit/train/{asked}.py")
    check_packages(recipe.train)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    recipe.train.check_processes(processes)
    from toolkit.train.needed_memory import check_memory

    check_memory(recipe, processes, int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")))
    run_dir = Path(recipe.run_dir)
    bring_up_to_date(run_dir, path, [*overrides, f"train.head.kind={head}"])
    # The trainer's imports take seconds: a mistake in the recipe is reported before them.
    from toolkit.train.accelerator import end_process_group, lost_process_named, share_threads
    from toolkit.train.loop import Trainer

    share_threads()
    # A process that exits with gloo's threads still running may abort (PyTorch #190489), also after an error. Not
    # before the exit: DeepSpeed keeps the group for the next training of the process.
    atexit.register(end_process_group)
    with lost_process_named(run_dir / "train"):  # also before the first step and after the last
        begin = time.monotonic()
        Trainer(recipe, run_dir / ROLLOUTS, run_dir / TOKEN_MAP, run_dir / "train").run()
    by_hand = os.environ.get(STAGES_DONE) != "1" and os.environ.get("RANK", "0") == "0"
    if by_hand and (recipe.prompts.sources or recipe.prompts.synthesize):
        stage = next(one for one in recipe_stages(Run(recipe, Path(path), overrides)) if one.name == "train")
        record_done(run_dir, stage, training_headline(run_dir), time.monotonic() - begin)
    return 0
