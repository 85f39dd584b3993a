"""`toolkit inspect`: what a checkpoint is, what it needs, what looks wrong."""

from __future__ import annotations

import argparse

from toolkit.commands.recipe_arguments import ArgumentsError

HELP = "say what a draft head or a target is, what it needs, and what looks wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a draft head's directory or hub id (org/name@revision), ours or another project's; or a target's name",
    )
    parser.add_argument("--target", metavar="MODEL", help="the target a head is checked against (org/name@revision)")
    parser.epilog = "The exit status is 1 when it cannot be used as it is."


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    from toolkit.checkpoint.files import locate, target_named
    from toolkit.checkpoint.inspect_head import inspect_head
    from toolkit.checkpoint.inspect_target import inspect_target

    target = target_named(args.path)
    if target is not None and args.target is not None:
        raise ArgumentsError(f"{args.path} is a target itself; --target {args.target} is what heads are compared with")
    report = inspect_target(*target) if target is not None else inspect_head(locate(args.path), args.target)
    print(report.text())
    return 0 if report.usable else 1
