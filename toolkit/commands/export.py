"""`toolkit export`: convert a draft head to the format of another engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from toolkit.commands.model_arguments import errors_with_flags
from toolkit.commands.recipe_arguments import ArgumentsError

FORMATS = ("sglang", "vllm", "speculators", "eagle", "gguf", "native", "toolkit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft", required=True, metavar="DIR", help="the draft head: a directory, a .gguf file or a hub id"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        help="engine to convert for; gguf: llama.cpp; native: an mtp head becomes the MTP module in a copy of its "
        "target; toolkit: our draft directory",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="new folder for the export")
    parser.add_argument(
        "--target", metavar="MODEL", help="the head's target (org/name@revision), if the head names none or another one"
    )
    parser.add_argument(
        "--shape",
        metavar="S,K,N",
        help="draft shape of the launch line: levels, branches, nodes with the root (default: the best measured one, "
        "else 3,1,4); or mtp-3, mtp-4",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="correct how a setting of another project's head was read: norm_output=false, aux_layer_ids=2,16,29",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="ORG/NAME",
        help="also upload the export to this hub repository in one commit; a repository that does not exist is created",
    )
    parser.add_argument("--private", action="store_true", help="with --push-to-hub: a private repository")
    parser.epilog = "The export is read back and compared with the head bit for bit. If they differ, it is deleted."


def run(args: argparse.Namespace) -> int:
    """Exports, pushes where that is asked for, and prints what was written and the launch line."""
    if args.push_to_hub is not None and args.to == "native":
        raise ArgumentsError(
            "--push-to-hub uploads heads, and --to native writes a whole model; upload it by `hf upload`"
        )
    if args.push_to_hub is not None:
        from toolkit.checkpoint.model_card import check_push  # loads torch

        check_push(args.push_to_hub)
    elif args.private:
        raise ArgumentsError(
            "--private is given without --push-to-hub; give --push-to-hub ORG/NAME, or leave --private out"
        )
    settings = parse_settings(args.set)
    from toolkit.checkpoint.export_head import export_path  # loads torch

    with errors_with_flags():
        kind, launch, notes = export_path(
            args.draft,
            args.to,
            args.out,
            target=args.target,
            shape=args.shape,
            settings=settings,
            hub_name=args.push_to_hub,
        )
    what = "a copy of the target with its module" if args.to == "native" else f"{kind} head for {args.to}"
    print(f"{args.out}: {what}, read back and equal")
    for note in notes:
        print(f"  {note}")
    if args.push_to_hub is not None:
        from toolkit.checkpoint.model_card import push_head

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
