"""`toolkit export`: a head, ours or anybody's, in the form another engine reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from toolkit.checkpoint.push_head import check_push, push_head
from toolkit.commands.recipe_arguments import ArgumentsError

HELP = "write a draft head as SGLang, vLLM, speculators or EAGLE read it, and say how to serve it there"
FORMATS = ("sglang", "vllm", "speculators", "eagle", "toolkit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", required=True, metavar="DIR", help="any head's directory or hub id")
    parser.add_argument("--to", required=True, choices=FORMATS, help="who reads it; toolkit: our own draft directory")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder that does not exist yet")
    parser.add_argument(
        "--target", metavar="MODEL", help="the head's target (org/name@revision), where it names none or another"
    )
    parser.add_argument(
        "--shape",
        metavar="S,K,N",
        help="levels, branches, nodes with the root, for the launch line (default: the best measured one, else 3,1,4)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="how an ambiguous setting of a foreign checkpoint is read: norm_output=false, aux_layer_ids=2,16,29",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="ORG/NAME",
        help="send what was written to this repository of the hub too (made where there is none), in one commit",
    )
    parser.add_argument("--private", action="store_true", help="with --push-to-hub: a private repository")
    parser.epilog = "What was written is read back and must be the same head, bit for bit; else nothing is left of it."


def run(args: argparse.Namespace) -> int:
    """Exports, pushes where that is asked for, and prints what was written and the launch line."""
    if args.push_to_hub is not None:
        check_push(args.push_to_hub)
    elif args.private:
        raise ArgumentsError("--private belongs to --push-to-hub ORG/NAME; give that too, or leave --private out")
    settings = parse_settings(args.set)
    from toolkit.checkpoint.export_path import export_path  # loads torch

    kind, launch, notes = export_path(
        args.draft,
        args.to,
        args.out,
        target=args.target,
        shape=args.shape,
        settings=settings,
        hub_name=args.push_to_hub,
    )
    print(f"{args.out}: {kind} head for {args.to}, read back and equal")
    for note in notes:
        print(f"  {note}")
    if args.push_to_hub is not None:
        commit = push_head(args.out, args.push_to_hub, private=args.private)
        print(f"  on the hub: {args.push_to_hub}@{commit}")
    print(f"serve it:\n  {launch}")
    return 0


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """--set KEY=VALUE: true, false, numbers, and lists of numbers. Raises `ArgumentsError`."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ArgumentsError(f"--set {pair}: KEY=VALUE is needed, such as norm_output=false")
        value = yaml.safe_load(f"[{text}]" if "," in text and not text.startswith("[") else text)
        settings[key] = tuple(value) if isinstance(value, list) else value
    return settings
