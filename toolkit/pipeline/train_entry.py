"""What the accelerate entries (toolkit/train/eagle3.py and others) do: parse, make what is missing, train."""

from __future__ import annotations

import argparse
import atexit
import os
import time
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import exit_status
from toolkit.pipeline.launch import STAGES_DONE, check_packages
from toolkit.pipeline.prerequisites import bring_up_to_date
from toolkit.pipeline.recipe_stages import recipe_stages
from toolkit.pipeline.run import ROLLOUTS, TOKEN_MAP, Run
from toolkit.pipeline.stages import record_done
from toolkit.pipeline.train import training_headline
from toolkit.recipe import DEMO_RECIPE, RecipeError, load_recipe
from toolkit.recipe_fields import HeadName


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
    recipe.train.check_processes(int(os.environ.get("WORLD_SIZE", "1")))
    run_dir = Path(recipe.run_dir)
    bring_up_to_date(run_dir, path, [*overrides, f"train.head.kind={head}"])
    # The trainer's imports take seconds: a mistake in the recipe is reported before them.
    from toolkit.train.accelerator import end_process_group, lost_process_named, set_threads
    from toolkit.train.loop import Trainer

    set_threads()
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
