"""`toolkit prepare-data`: the stages of a recipe that come before training."""

from __future__ import annotations

import argparse

from toolkit.commands.recipe_arguments import add_recipe_arguments, run_of
from toolkit.pipeline.run import run_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs what is not up to date of the stages up to the token map."""
    run_recipe(run_of(args), until="token_map")
    return 0
