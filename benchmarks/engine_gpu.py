"""The engine on one GPU beside its roofline: what a plain step, and each part of a speculative round, could cost.

    python benchmarks/engine_gpu.py [--draft runs/smollm2-135m/ckpt] [--eagle-python PATH]

Two targets (roofline_targets.py): the demo with its trained head, and the shape of Llama-3.1-8B with random weights, a
random head and a FORCED accept_length. At each batch size all entrants (roofline_engines.py) take turns on one
card, the first one rotating, and are then measured part by part (round_parts.py). The card's bandwidth is measured
first, by a copy and a sum. Whatever the card cannot hold, or --budget has no time for, is named and left out.
Writes benchmarks/results/engine-gpu-<hardware>.json.

`--device cpu --smoke` runs all of it in seconds, on tiny random models: to see that it runs, not how fast.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import leave
from rich.console import Console
from roofline_measure import Bench, logger, measure, open_eagle
from roofline_rows import (
    DEFINITIONS,
    beside_published,
    parts_table,
    published_table,
    speed_table,
    targets_table,
    verdicts,
)
from roofline_targets import Subject, demo_subject, shaped_subject, tiny_subjects
from round_parts import Clock, bandwidth

from toolkit.bench.records import make_record
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import DraftShapeError, EngineError
from toolkit.infer.verify.forced import ForcedAcceptance

COPIED, COPIED_IN_SMOKE = 2**31, 2**22  # bytes
LLAMA_BYTES = 22e9  # to make the 8B shape and its head
NEEDED = (
    "engine_gpu.py measures one NVIDIA GPU, by --device cuda, and PyTorch sees none here: it needs a CUDA build of "
    "PyTorch, and 22 GB of the card's memory for the 8B shape, more for larger batches (what a card cannot hold is "
    "left out). To see that the script runs: --device cpu --smoke"
)


def subjects(bench: Bench) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """What builds each target; one is let go before the next is built. First the one that targets are stated for."""
    args, device = bench.args, bench.device
    if args.smoke:
        for one in tiny_subjects(device, args.context, args.force_accept_length):
            yield one.name, partial(_ready, one)
        return
    if "llama" in args.only and bench.holds("llama", LLAMA_BYTES):
        yield "llama", lambda: shaped_subject(device, args.context, args.force_accept_length)
    if "demo" in args.only:
        yield "demo", lambda: demo_subject(args.target, args.draft, device)


def _ready(subject: Subject) -> Subject:
    return subject


def run(bench: Bench) -> None:
    size = COPIED_IN_SMOKE if bench.args.smoke else COPIED
    bench.bandwidth = bandwidth(bench.clock, bench.device, size)
    for name, build in subjects(bench):
        if bench.late(name):
            continue
        with bench.surviving(name), contextlib.ExitStack() as stack:
            subject = build()
            logger.info("%s: %s; %s", subject.name, subject.head, subject.acceptance)
            eagle = open_eagle(bench, subject, stack)
            measure(bench, subject, eagle)
            _show(bench, subject)
            del subject
        torch.compiler.reset()  # what was compiled for a target holds it
        gc.collect()


def _show(bench: Bench, subject: Subject) -> None:
    rows = [row for row in bench.rows if row["target"] == subject.name]
    title = f"{subject.name}; {subject.head}; {subject.acceptance}"
    console = Console(width=None if os.isatty(1) else 160)
    for table in (speed_table(rows, title), parts_table(rows, f"milliseconds of a round; {title}")):
        console.print(table)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft directory of the demo's head (else untrained)")
    parser.add_argument("--target", help="default: the one that --draft names, else the demo")
    parser.add_argument("--only", nargs="+", choices=("demo", "llama"), default=["demo", "llama"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shapes", nargs="+", default=["3,1,4", "7,8,32"], metavar="S,K,N", help="a chain and a tree")
    parser.add_argument("--context", type=int, default=512, help="tokens of random prompts (default: 512)")
    parser.add_argument(
        "--force-accept-length", default="2.5", metavar="X",
        help="accept_length of the random head, or rates by depth, as of toolkit bench acceptance (default: 2.5)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=24, help="measured in each turn (default: 24)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every entrant (default: 5)")
    parser.add_argument(
        "--hf-batch", type=int, nargs="*", default=[1], metavar="N", help="with Hugging Face (default: 1)"
    )
    parser.add_argument(
        "--torch-compile-max-bs", type=int, default=1, metavar="N",
        help="rows with compiled layers up to this batch size (default: 1; 0: none)",
    )  # fmt: skip
    parser.add_argument("--eagle-python", metavar="PATH", help="interpreter that imports SafeAILab/EAGLE as `eagle`")
    parser.add_argument(
        "--budget", type=float, default=400, help="seconds after which nothing new begins (default: 400)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny random models, to see that the script runs")
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Exits with a message where arguments do not go together."""
    if args.smoke and (args.draft or args.target or args.eagle_python):
        parser.error("--smoke is of tiny random models: leave --draft, --target and --eagle-python out")
    if min(*args.batch, args.rounds, args.repeats, args.context) < 1 or args.torch_compile_max_bs < 0:
        parser.error("--batch, --rounds, --repeats and --context are 1 at least, --torch-compile-max-bs 0")
    try:
        shapes = [DraftShape.parse(text) for text in args.shapes]
    except DraftShapeError as error:
        parser.error(f"--shapes: {error}")
    try:
        args.force_accept_length = ForcedAcceptance.parse(args.force_accept_length)
        args.force_accept_length.check_shapes(shapes)
    except (DraftShapeError, EngineError) as error:
        parser.error(f"--force-accept-length: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    args = checked(parser, parser.parse_args(argv))
    device = torch.device(args.device)
    if not (args.smoke and device.type == "cpu") and not (device.type == "cuda" and torch.cuda.is_available()):
        print(NEEDED, file=sys.stderr)
        return 2
    if args.smoke:
        args.context, args.rounds, args.repeats = min(args.context, 20), min(args.rounds, 4), min(args.repeats, 2)
        args.batch = [1, 2] if args.batch == [1, 8, 32] else args.batch
    torch.manual_seed(0)
    bench = Bench(args, device, Clock(device))
    run(bench)
    if not bench.rows:
        print(f"engine_gpu.py: error: nothing was measured: {bench.left_out}", file=sys.stderr)
        return 1
    found = verdicts(bench.rows)
    beside = beside_published(bench.rows)
    for table in (targets_table(found), published_table(beside)) if beside else (targets_table(found),):
        Console(width=None if os.isatty(1) else 160).print(table)
    for left, why in bench.left_out.items():
        print(f"no row of {left}: {why}")
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "draft", "eagle_python")}
    settings["draft"] = None if args.draft is None else str(args.draft)
    settings["force_accept_length"] = args.force_accept_length.accept_length
    seconds = time.perf_counter() - bench.started
    card = {"bytes_per_s": bench.bandwidth, "seconds_of_the_run": seconds}
    extra: dict[str, Any] = {"card": card, "targets": found, "published": beside, "left_out": bench.left_out}
    extra["definitions"] = DEFINITIONS
    record = make_record("engine", ["python", *sys.argv], settings, bench.rows, **extra)
    leave(record, "engine-gpu-smoke" if args.smoke else "engine-gpu", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
