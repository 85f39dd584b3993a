"""`toolkit check`: one page that says whether a draft head is right for its target and decodes without loss."""

from __future__ import annotations

import argparse
from pathlib import Path

from toolkit.commands.model_arguments import add_engine_arguments, engine_config, errors_with_flags
from toolkit.pipeline.launch import set_threads

HELP = "test a draft head on its target: files, settings, and that decoding with it is lossless"
PROMPTS, MAX_TOKENS = 16, 32
ENGINE = ("draft", "target", "revision", "token_map", "quantization", "device")
DRAFT_HELP = (
    "the head to check: a draft directory, another project's head (a directory or a hub id), or native (the MTP module "
    "in the checkpoint of the target, given by `target`)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, ENGINE, draft=DRAFT_HELP, target="target model (default: the one that `draft` names)")
    parser.add_argument(
        "--limit", type=int, default=PROMPTS, metavar="N", help=f"use N built-in prompts (default: {PROMPTS})"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help=f"tokens of an answer at most (default: {MAX_TOKENS})"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a record of the findings, too")
    parser.epilog = (
        "Target and head run in float32, where speculative decoding must write the tokens of plain decoding. The exit "
        "status is 1 when a check fails."
    )


def run(args: argparse.Namespace) -> int:
    """Prints each finding as soon as it is known."""
    set_threads()  # before torch loads
    from toolkit.bench.check import check_record, findings, line, open_checked, title, verdict
    from toolkit.bench.records import command_line, write_record

    with errors_with_flags():
        config = engine_config(args, dtype="float32")
        head = open_checked(config, args.limit, args.max_tokens)
        print(title(head, str(config.draft)), flush=True)
        found = []
        for name, finding in findings(head):
            found.append((name, finding))
            print(line(name, finding), flush=True)
    text, passed = verdict(found)
    print(text)
    if args.out is not None:
        write_record(args.out, check_record(head, str(config.draft), found, command_line()))
    return 0 if passed else 1
