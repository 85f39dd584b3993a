"""Adaptive drafting against plain decoding, with a head that is useless (random weights) and with any others.

    python benchmarks/never_slower.py [--draft runs/NAME/ckpt ngram] [--shape 4,1,5 5,4,16] [--batch 1 4 16]

Both engines answer the same groups of prompts in turns, so that what else the machine does hits them alike. Each has a
target of its own: plain decoding pays for none of the head's hooks. The ratio counts decoding only. The head drafts
alone: lookup, which `toolkit serve` has beside it, would hide what it costs.
A batch size has --limit prompts, or as many as its interval needs, if there are so many.
Writes benchmarks/results/engine-never-slower-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from gpu import random_head
from harness import Row, leave, parser_of, prompts_of, ratio, set_threads, settings_of, show

from toolkit import __version__
from toolkit.bench.bootstrap import LEAST_GROUPS
from toolkit.bench.rows import number
from toolkit.bench.side_by_side import Mode, Round, Sampling, run_side_by_side
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.cpu_door import pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_draft import fit_draft, load_draft
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import summarise
from toolkit.targets.load import read_target

RANDOM, RANDOM_IDS = "random head", 8192  # ids that it drafts from, at most
COLUMNS = ("batch", "draft", "shape", "ratio", "interval", "worst_group_ratio", "accept_length", "drafted_steps")
DEFINITIONS = {
    "batch": "conversations at a time; groups: how many such groups were timed",
    "ratio": "seconds of decoding / plain decoding's for as many tokens of the same prompts; 95 % bootstrap interval "
    f"over groups, null below {LEAST_GROUPS} groups",
    "drafted_steps": "share of verify steps in which anything was drafted",
    "seconds": "decoding only, from the first token to the last",
}


def engine_of(args: argparse.Namespace, name: str | None, shape: DraftShape, batch: int) -> Engine:
    """Plain (name None), or with adaptive drafting by a head; the random one is in no directory."""
    target, draft = read_target(args.target, dtype=args.dtype), None
    if name is not None:
        size = min(RANDOM_IDS, target.vocab_size // 2)
        unfitted: Draft = random_head(target, size) if name == RANDOM else load_draft(name)
        draft = fit_draft(unfitted, target)
    pack(target, draft)
    options: dict[str, Any] = {} if name is None else {"adaptive": True}
    return Engine(target, draft, None if name is None else shape, max_running_requests=batch, **options)


def row_of(mine: Sequence[Round], plain: Sequence[Round], name: str, shape: DraftShape, batch: int) -> Row:
    events = [event for done in mine for answer in done.answers for event in answer.events]
    seconds, tokens = sum(done.decode_s for done in mine), sum(done.decode_tokens for done in mine)
    others = [done.decode_s for done in plain]
    as_many = [one.decode_s * other.decode_tokens / one.decode_tokens for one, other in zip(mine, plain, strict=True)]
    over, interval = ratio(as_many, others)
    return {
        "engine": "ours-adaptive",
        "version": __version__,
        "batch": batch,
        "groups": len(mine),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "accept_length": number(summarise(events).accept_length),
        "draft": name,
        "shape": shape.as_text(),
        "drafted_steps": sum(event.offered > 0 for event in events) / len(events),
        "ratio": over,
        "interval": interval,
        "worst_group_ratio": max(a / b for a, b in zip(as_many, others, strict=True)),
    }


def measure(args: argparse.Namespace, name: str, shape: DraftShape, batch: int) -> Row:
    """The row of one head, shape and batch size. Raises BenchError where there are fewer prompts than rows."""
    print(f"{name}, {shape.name}, batch {batch}", file=sys.stderr)
    with (
        closing(engine_of(args, None, shape, batch)) as plain,
        closing(engine_of(args, name, shape, batch)) as adaptive,
    ):
        modes = [Mode(plain, None, label="plain"), Mode(adaptive, shape, adaptive=True)]
        limit = max(args.limit, LEAST_GROUPS * batch)
        prompts, sampling = prompts_of(limit, batch, args.prompts), Sampling(args.max_tokens, 0.0, 0)
        done = run_side_by_side(modes, plain.target.tokenizer, prompts, sampling, batch=batch)
    mine, others = ([one for one in done if (one.mode == "plain") is wanted] for wanted in (False, True))
    return row_of(mine, others, name, shape, batch)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, batch=[1, 4, 16], limit=16, max_tokens=128)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", nargs="*", default=[], help="draft directories or ngram, beside the random head")
    parser.add_argument("--shape", nargs="+", default=["4,1,5", "5,4,16"], help="the largest shapes (both by default)")
    parser.add_argument("--prompts", help="a file in MT-bench's field style (default: the built-in prompts)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    args = parser.parse_args(argv)
    set_threads()
    heads = [(name, DraftShape.parse(text)) for name in (RANDOM, *args.draft) for text in args.shape]
    rows = [measure(args, *head, batch) for batch in args.batch for head in heads]
    show(rows, COLUMNS, "decoding with drafts / plain decoding, same prompts, in turns (lower is better)")
    leave(args, "engine", "engine-never-slower", settings_of(args), rows, definitions=DEFINITIONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
