"""Arguments that several commands share: a recipe; and of forecasts and searches head, prompts and shapes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from toolkit.commands.model_arguments import Arguments, add_engine_arguments
from toolkit.pipeline.run import Run, recipe_stages
from toolkit.pipeline.stages import run_stages
from toolkit.recipe import DEMO_RECIPE, BenchSettings, load_recipe
from toolkit.recipe_yaml import build


class ArgumentsError(ValueError):
    """Arguments of a command that contradict each other, or lack another one."""


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """--recipe and dotted overrides."""
    parser.add_argument("--recipe", metavar="FILE", help="recipe file (default: the demo recipe)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")


def run_of(args: argparse.Namespace) -> Run:
    """The run that --recipe and the overrides describe. Raises `RecipeError`, FileNotFoundError."""
    path = Path(args.recipe) if args.recipe else DEMO_RECIPE
    return Run(load_recipe(path, args.overrides), path, tuple(args.overrides))


def run_one_stage(run: Run, stage: str, force: bool = False) -> None:
    """Bring one stage of the run folder up to date; its input must be there."""
    run_stages(run.folder, recipe_stages(run), only=stage, force=stage if force else None)


def numbers_by_count(flag: str, text: str) -> dict[int, float]:
    """`1:7.1,32:9` -> {1: 7.1, 32: 9.0}. Raises `ArgumentsError` unless all are above 0."""
    found = {}
    for pair in text.split(","):
        count, _, value = pair.partition(":")
        try:
            found[int(count)] = float(value)
        except ValueError:
            found = {0: 0.0}
        if min(found) < 1 or min(found.values()) <= 0:
            raise ArgumentsError(f"{flag} {pair!r}: COUNT:NUMBER is needed, both above 0, such as 1:7.1,32:9")
    return found


SETTINGS = ("prompts", "limit", "max_tokens", "temperature")


# Options of the engine that change what a head drafts or how long it takes.
ENGINE = (
    "draft", "token_map", "target", "dtype", "quantization", "draft_quantization", "deterministic",
    "torch_compile", "chat_template",
)  # fmt: skip


def add_head_arguments(group: Arguments) -> None:
    """Add --draft and the engine's options that matter for it."""
    add_engine_arguments(
        group, ENGINE, draft="the head: a draft directory, another project's head, or native, with --target"
    )


def add_size_arguments(group: Arguments) -> None:
    """Add the limits of the shapes: --num-steps and --num-draft-tokens."""
    group.add_argument("--num-steps", type=int, help="levels of the deepest shape (default: 8)")
    group.add_argument("--num-draft-tokens", type=int, help="nodes of the largest tree, with the root (default: 64)")


def add_prompt_arguments(group: Arguments) -> None:
    """Add --prompts, --limit, --max-tokens, --temperature and --seed."""
    defaults = BenchSettings()
    group.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="prompts in MT-bench's form or conversations (messages); default: the 40 built-in ones",
    )
    group.add_argument("--limit", type=int, metavar="N", help="take N prompts, evenly over the tasks")
    group.add_argument("--max-tokens", type=int, help=f"tokens of an answer at most (default: {defaults.max_tokens})")
    group.add_argument("--temperature", type=float, help="temperature of the answers (default: 0, greedy)")
    group.add_argument("--seed", type=int, default=0, help="seed of the answers (default: 0)")


def prompt_settings(args: argparse.Namespace) -> BenchSettings:
    """The settings that were given, checked. Raises `RecipeError`."""
    given: dict[str, Any] = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    return build(BenchSettings, given, "bench.")
