"""Train an EAGLE-3 head: `accelerate launch toolkit/train/eagle3.py [--recipe R] [a.b=c ...]`.

Without arguments it trains the demo recipe. Rollouts and token map come from the recipe's run folder; where they are
absent, `toolkit run RECIPE --until token_map` makes them first.
"""

import sys
from pathlib import Path

if not __package__:
    # Run by path: the repository takes the place of toolkit/train at the head of the search path.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import os
import subprocess
import time
from collections.abc import Sequence

from toolkit.log import get_logger
from toolkit.recipe import Recipe, default_recipe_path, load_recipe
from toolkit.train.accelerator import set_threads

log = get_logger("toolkit.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, make what is missing, train. Returns an exit status; errors of ours are one line on stderr."""
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 draft head.")
    parser.add_argument("--recipe", default=None, help="recipe file; default: the demo recipe")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    args = parser.parse_args(argv)
    try:
        path = args.recipe or str(default_recipe_path())
        return train(load_recipe(path, args.overrides), path, args.overrides)
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("TOOLKIT_LOG") == "debug":
            raise
        print(f"toolkit: error: {error}", file=sys.stderr)
        return 2


def train(recipe: Recipe, recipe_path: str, overrides: Sequence[str]) -> int:
    """Train by `recipe` in its run folder."""
    run_dir = Path(recipe.run_dir)
    rollouts, token_map = run_dir / "rollouts" / "rollouts.jsonl", run_dir / "token_map" / "token_map.safetensors"
    if not (rollouts.is_file() and token_map.is_file()):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            prepare(recipe_path, overrides)
        wait_for(token_map)
    set_threads()
    # The trainer's imports take seconds, which a misspelt recipe need not wait for.
    from toolkit.train.loop import Trainer

    Trainer(recipe, rollouts, token_map, run_dir / "train").run()
    return 0


def prepare(recipe_path: str, overrides: Sequence[str]) -> None:
    """Run the stages before training, in a process of their own."""
    log.info("no rollouts or token map yet: making them first (toolkit run %s --until token_map)", recipe_path)
    repository = str(Path(__file__).resolve().parents[2])
    # The launcher's variables describe this group of processes; the stages run outside of it.
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (repository, os.environ.get("PYTHONPATH"))))
    line = [sys.executable, "-m", "toolkit", "run", recipe_path, *overrides, "--until", "token_map"]
    status = subprocess.run(line, env=environment, check=False).returncode
    if status:
        raise ValueError(f"the stages before training ended with status {status}; see their message above")


def wait_for(path: Path) -> None:
    """Wait until process 0 has made `path`, the last file it makes; the launcher ends us if it fails."""
    while not path.is_file():
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
