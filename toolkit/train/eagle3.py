"""Train an EAGLE-3 head: `accelerate launch toolkit/train/eagle3.py [--recipe R] [a.b=c ...]`.

Without arguments it trains the demo recipe. Rollouts and token map come from the recipe's run folder; where they are
absent, or made by other settings than these, `toolkit run RECIPE --until token_map` makes them first.
"""

import sys
from pathlib import Path

if not __package__:
    # Run by path: the repository takes the place of toolkit/train at the head of the search path.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
from collections.abc import Sequence

from toolkit.errors import is_for_users
from toolkit.recipe import Recipe, default_recipe_path, load_recipe
from toolkit.train.earlier_stages import bring_up_to_date


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, make what is missing, train. Returns an exit status; errors of ours are one line on stderr."""
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 draft head.")
    parser.add_argument("--recipe", default=None, help="recipe file; default: the demo recipe")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    args = parser.parse_args(argv)
    try:
        path = args.recipe or str(default_recipe_path())
        return train(load_recipe(path, args.overrides), path, args.overrides)
    except (ValueError, OSError) as error:
        if not is_for_users(error):
            raise
        print(f"toolkit: error: {error}", file=sys.stderr)
        return 2


def train(recipe: Recipe, recipe_path: str, overrides: Sequence[str]) -> int:
    """Train by `recipe` in its run folder."""
    run_dir = Path(recipe.run_dir)
    rollouts, token_map = run_dir / "rollouts" / "rollouts.jsonl", run_dir / "token_map" / "token_map.safetensors"
    bring_up_to_date(run_dir, (rollouts, token_map), recipe_path, overrides)
    # The trainer's imports take seconds, which a misspelt recipe need not wait for.
    from toolkit.train.accelerator import set_threads
    from toolkit.train.loop import Trainer

    set_threads()
    Trainer(recipe, rollouts, token_map, run_dir / "train").run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
