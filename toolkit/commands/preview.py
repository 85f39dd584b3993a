"""`toolkit preview`: what a training on rollouts will supervise, in colour."""

from __future__ import annotations

import argparse
import os
import sys
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.chat import UNPRINTABLE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from toolkit.data.batches import Example

HELP = "show which tokens of rollouts a training supervises"

CONTEXT, FIRST, SUPERVISED = "context", "first", "supervised"
COLOURS = {CONTEXT: "\x1b[2m", FIRST: "\x1b[33m", SUPERVISED: "\x1b[32m"}
MARKS = {CONTEXT: ("", ""), FIRST: ("(", ")"), SUPERVISED: ("[", "]")}
END = "\x1b[0m"
LEGEND = (
    "Green (or in [brackets] without colours): the head is trained to predict it. Yellow (or in parentheses): the "
    "first token of an answer, which always comes from the target. Dim: read, never predicted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl, e.g. runs/smollm2-135m/rollouts/rollouts.jsonl")
    parser.add_argument("--target", help="whose tokenizer to read them with (default: the one that wrote them)")
    parser.add_argument("--split", choices=("train", "held_out"), default="train", help="default: train")
    parser.add_argument("--limit", type=int, default=3, metavar="N", help="rollouts shown (default: 3)")
    parser.add_argument(
        "--max-length", type=int, default=512, metavar="N", help="as train.data.max_length (default: 512)"
    )
    parser.epilog = LEGEND


def run(args: argparse.Namespace) -> int:
    from toolkit.data.jsonl import DataError

    if args.limit < 1:
        raise DataError(f"--limit {args.limit} came; at least 1 rollout has to be shown")
    show(args.rollouts, args.target, args.split, args.limit, args.max_length)
    return 0


def show(
    rollouts: Path, target: str | None, split: str, limit: int, max_length: int, *, revision: str | None = None
) -> None:
    """Prints the first rollouts of a split, in the order in which they are numbered for training.

    target: whose tokenizer; None: that of the target that wrote them. Raises `DataError` when they do not say that.
    """
    from toolkit.data.examples import load_examples
    from toolkit.data.jsonl import DataError, read_rows
    from toolkit.targets.load import load_tokenizer

    examples, cut = load_examples(rollouts, split, max_length)
    provenance = next(read_rows(rollouts))[1].get("provenance") or {}
    name = target or provenance.get("target")
    if name is None:
        raise DataError(f"{rollouts} does not say which target wrote it; name it with --target")
    tokenizer = load_tokenizer(name, revision)
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for example in islice(examples, limit):
        kinds = token_kinds(example.response)
        print(f"{example.id}: {kinds.count(SUPERVISED)} of {len(kinds)} tokens supervised")
        print(painted(example, kinds, tokenizer, coloured), end="\n\n")
    total = sum(token_kinds(example.response).count(SUPERVISED) for example in examples)
    print(f"{len(examples)} {split} rollouts, {total} supervised tokens at step 0; {cut} cut to {max_length}")


def token_kinds(response: list[bool]) -> list[str]:
    """Per token: context, first (A0 of an answer) or supervised, by the rule of `supervised_mask` at step 0."""
    before = [False, *response[:-1]]
    return [
        CONTEXT if not inside else SUPERVISED if earlier else FIRST
        for inside, earlier in zip(response, before, strict=True)
    ]


def painted(example: Example, kinds: list[str], tokenizer: PreTrainedTokenizerBase, coloured: bool) -> str:
    """The rollout's text, runs of one kind painted alike; special tokens are shown."""
    parts = []
    for kind, run_of in groupby(zip(kinds, example.input_ids, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run_of], clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "the ids of one rollout decode to one text"
        text = text.translate(UNPRINTABLE)
        opening, closing = (COLOURS[kind], END) if coloured else MARKS[kind]
        parts.append(f"{opening}{text}{closing}")
    return "".join(parts)
