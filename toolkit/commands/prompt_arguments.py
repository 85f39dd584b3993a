"""The options that `toolkit forecast` and `toolkit search` share: head, prompts and answers, sizes of shapes."""

from __future__ import annotations

import argparse
from typing import Any

from toolkit.commands.model_arguments import Arguments, add_engine_arguments
from toolkit.recipe import BenchSettings
from toolkit.recipe_yaml import build

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
