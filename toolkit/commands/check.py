"""`toolkit check`: one page that says whether a draft head is right for its target and decodes without loss."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from toolkit.commands.model_arguments import add_engine_arguments, engine_config, errors_with_flags
from toolkit.pipeline.launch import set_threads

ENGINE = ("draft", "target", "revision", "token_map", "quantization", "device", "chat_template")
DRAFT_HELP = (
    "the head to check: a draft directory, another project's head (a directory or a hub id), or native (the MTP module "
    "in the checkpoint of the target, given by `target`)"
)
PAGE = 120  # columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, ENGINE, draft=DRAFT_HELP, target="target model (default: the one that `draft` names)")
    parser.add_argument(
        "--quick", action="store_true", help="leave out the draws at temperature 1, which take most of the time"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a record of the findings, too")
    parser.epilog = (
        "Target and head run in float32, where speculative decoding must write the tokens of plain decoding. "
        "accept_length is compared with that of the run's measurement. The exit status is 1 when a check fails."
    )


def run(args: argparse.Namespace) -> int:
    """Prints each finding as soon as it is known."""
    set_threads()  # before torch loads
    from toolkit.bench.check import FAILED, SKIPPED, findings
    from toolkit.bench.records import command_line, make_record, write_record

    rows = []
    with errors_with_flags():
        config = engine_config(args, dtype="float32")
        for name, found in findings(config, quick=args.quick):
            rows.append({"check": name, "status": found.status, "detail": found.detail, **found.numbers})
            begin = f"  {name:<19}  {found.status:<7}  "
            print(
                textwrap.fill(found.detail, PAGE, initial_indent=begin, subsequent_indent=" " * len(begin)), flush=True
            )
    failed = [row["check"] for row in rows if row["status"] == FAILED]
    skipped = sum(row["status"] == SKIPPED for row in rows)
    passed = f"passed: {len(rows) - skipped} checks" + (f", {skipped} skipped" if skipped else "")
    print(f"FAILED: {', '.join(failed)}" if failed else passed)
    if args.out is not None:
        settings = {"draft": str(config.draft), "quick": args.quick}
        write_record(args.out, make_record("check", command_line(), settings, rows, passed=not failed))
    return 1 if failed else 0
