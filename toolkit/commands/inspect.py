"""`toolkit inspect`: what a checkpoint or a token map is, what it needs, what looks wrong."""

from __future__ import annotations

import argparse

from toolkit.commands.model_arguments import errors_with_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a draft head's directory, .gguf file or hub id (org/name@revision), ours or another project's; a "
        "target's name; or the file of a token map",
    )
    parser.add_argument(
        "--target", metavar="MODEL", help="the target a head or a map is checked against (org/name@revision)"
    )
    parser.epilog = "The exit status is 1 when it cannot be used as it is."


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    from toolkit.checkpoint.inspect_path import inspect_path  # loads torch

    with errors_with_flags():
        report = inspect_path(args.path, args.target)
    print(report.text())
    return 0 if report.usable else 1
