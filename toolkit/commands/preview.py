"""`toolkit preview`: what a training on rollouts will supervise, in colour."""

from __future__ import annotations

import argparse
import os
import sys
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.jsonl import DataError, read_rows
from toolkit.log import DIM, END, GREEN, UNPRINTABLE, YELLOW

if TYPE_CHECKING:  # the parser is built without torch
    from transformers import PreTrainedTokenizerBase

    from toolkit.data.batches import Example

LEGEND = (
    "Green (or in [brackets] without colours): the head is trained to predict it. Yellow (or in parentheses): the "
    "first token of an answer, which always comes from the target. Dim: read, never predicted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="rollouts.jsonl, e.g. runs/smollm2-135m/rollouts/rollouts.jsonl")
    parser.add_argument(
        "--target", help="model whose tokenizer turns the ids into text (default: the target that wrote the rollouts)"
    )
    parser.add_argument(
        "--split",
        choices=("train", "held_out"),
        default="train",
        help="which rollouts: those that are trained on, or those kept for evaluation (default: train)",
    )
    parser.add_argument("--limit", type=int, default=3, metavar="N", help="show N rollouts (default: 3)")
    parser.add_argument(
        "--max-length",
        type=int,
        default=512,
        metavar="N",
        help="longest sequence in tokens, as train.data.max_length (default: 512)",
    )
    parser.epilog = LEGEND


CONTEXT, FIRST, SUPERVISED = "context", "first", "supervised"
COLOURS = {CONTEXT: DIM, FIRST: YELLOW, SUPERVISED: GREEN}
MARKS = {CONTEXT: ("", ""), FIRST: ("(", ")"), SUPERVISED: ("[", "]")}


def run(args: argparse.Namespace) -> int:
    """Prints the first rollouts of a split, in the order of training and in colours on a terminal, then the totals."""
    from toolkit.data.examples import load_examples
    from toolkit.targets.load import load_tokenizer

    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    examples, cut = load_examples(args.rollouts, args.split, args.max_length)
    provenance = next(read_rows(args.rollouts))[1].get("provenance") or {}
    name = args.target or provenance.get("target")
    if name is None:
        raise DataError(f"{args.rollouts} does not name the target that wrote it; give it with --target")
    tokenizer = load_tokenizer(name)
    for example in islice(examples, max(0, args.limit)):
        kinds = token_kinds(example.response)
        print(f"{example.id}: {kinds.count(SUPERVISED)} of {len(kinds)} tokens supervised")
        print(painted(example, kinds, tokenizer, coloured) + "\n")
    total = sum(token_kinds(example.response).count(SUPERVISED) for example in examples)
    print(f"{len(examples)} {args.split} rollouts, {total} supervised tokens at step 0; {cut} cut to {args.max_length}")
    return 0


def token_kinds(response: list[bool]) -> list[str]:
    """Return the kind of each token: context, first (A0 of an answer) or supervised, as `supervised_mask` at step 0."""
    before = [False, *response[:-1]]
    return [
        CONTEXT if not inside else SUPERVISED if earlier else FIRST
        for inside, earlier in zip(response, before, strict=True)
    ]


def painted(example: Example, kinds: list[str], tokenizer: PreTrainedTokenizerBase, coloured: bool) -> str:
    """Return the rollout's text with a colour or mark per kind; special tokens are shown."""
    parts = []
    for kind, run_of in groupby(zip(kinds, example.input_ids, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run_of], clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "the ids of one rollout decode to one text"
        text = text.translate(UNPRINTABLE)
        opening, closing = (COLOURS[kind], END) if coloured else MARKS[kind]
        parts.append(f"{opening}{text}{closing}")
    return "".join(parts)
