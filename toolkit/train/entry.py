"""What the three entries share: parse, make what is missing, train."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import is_for_users
from toolkit.recipe import Recipe, RecipeError, default_recipe_path, load_recipe
from toolkit.train.prerequisites import bring_up_to_date
from toolkit.train_settings import HeadName


def train_from_command_line(head: HeadName, argv: Sequence[str] | None) -> int:
    """Train a head of this kind. Returns an exit status; errors of ours are one line on stderr."""
    parser = argparse.ArgumentParser(description=f"Train a draft head: {head}.")
    parser.add_argument("--recipe", default=None, help="recipe file; default: the demo recipe")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    args = parser.parse_args(argv)
    try:
        path = args.recipe or str(default_recipe_path())
        recipe = load_recipe(path, args.overrides, head=head)
        asked = recipe.train.head.kind
        if asked != head:
            raise RecipeError(
                f"train.head.kind is {asked}, and this script trains {head}: launch toolkit/train/{asked}.py"
            )
        return _train(recipe, path, [*args.overrides, f"train.head.kind={head}"])
    except (ValueError, OSError) as error:
        if not is_for_users(error):
            raise
        print(f"toolkit: error: {error}", file=sys.stderr)
        return 2


def _train(recipe: Recipe, recipe_path: str, overrides: Sequence[str]) -> int:
    """Train by `recipe` in its run folder."""
    recipe.train.check_processes(int(os.environ.get("WORLD_SIZE", "1")))
    run_dir = Path(recipe.run_dir)
    rollouts, token_map = run_dir / "rollouts" / "rollouts.jsonl", run_dir / "token_map" / "token_map.safetensors"
    bring_up_to_date(run_dir, (rollouts, token_map), recipe_path, overrides)
    # The trainer's imports take seconds, which a misspelt recipe need not wait for.
    from toolkit.train.accelerator import set_threads
    from toolkit.train.failures import lost_process_named
    from toolkit.train.loop import Trainer

    set_threads()
    with lost_process_named(run_dir / "train"):  # also before the first step and behind the last
        Trainer(recipe, rollouts, token_map, run_dir / "train").run()
    return 0
