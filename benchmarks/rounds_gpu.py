"""Rounds of the engine on a GPU, eager and recorded, with and without overlap: milliseconds, kernels.

    python benchmarks/rounds_gpu.py --target llama --batch 1 [--kernels] [--device cpu --target tiny]

Targets of random weights (gpu.py), whose drafts are accepted by chance to a forced accept_length: `llama` has the shape
of Llama-3.1-8B, `tiny` is there to see that the script runs. engine_gpu.py measures a round part by part; this one says
what a first request waits for, what overlap is worth and, with --kernels, how many kernels a round launches and which
take the time. Writes benchmarks/results/rounds-<target>-<hardware>.json.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from gpu import FORCED, HOWS, Clock, Mode, Ours, Sizes, Subject, again, device_of
from harness import Row, leave, parser_of, settings_of, show
from torch.profiler import DeviceType, ProfilerActivity, profile

from toolkit.infer.attention import fused_layer
from toolkit.infer.kernels.float8_linear import to_float8
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.targets.fixed_linear import quantization_of

COLUMNS = ("variant", "batch", "how", "shape", "round_seconds", "tokens_per_s", "accept_length", "first_turn_seconds")
SHOWN, NAMED = 28, 70  # kernels of a round, letters of a kernel's name
DEFINITIONS = {
    "variant": "apart: transformers' layers; fused: our layers, products by cuBLAS; skinny: also products of up to 32 "
    "rows by our kernel; dependent: also dependent launches; fp8: also the head's weights in float8",
    "how": "eager; graph: recorded, a round is launched before the host has read the last one; graph-serial: recorded, "
    "launched after",
    "round_seconds": "of one round, host included; median over turns",
    "first_turn_seconds": "of the first turn: compilations, recordings and the reading of the prompts included",
    "kernels": "kernels and copies of one round on the device; seconds: of all of them; by_name: the longest",
    "peak_memory_bytes": "largest allocation of the process so far",
}


# What runs: each has all that stands before it.
VARIANTS = ("apart", "fused", "skinny", "dependent", "fp8")


def set_variant(variant: str, subject: Subject) -> None:
    """apart: transformers' layers. fused: our layers, products by cuBLAS. skinny: by our kernel. dependent: kernels
    start before the last one is over. fp8: weights of the head in one byte, from now on."""
    step = VARIANTS.index(variant)
    fused_layer.enabled = step >= 1
    if subject.target.device.type == "cuda":
        from toolkit.infer.kernels.triton import launch, layer_ops

        layer_ops.skinny_rows = layer_ops.MAX_ROWS if step >= 2 else 0
        launch.enabled = step >= 3
    if step >= 4 and quantization_of(subject.draft.head) is None:
        to_float8(subject.draft.head)


def measure(
    subject: Subject,
    variant: str,
    mode: Mode,
    batch: int,
    args: argparse.Namespace,
    clock: Clock,
) -> dict[str, Any]:
    """One row."""
    set_variant(variant, subject)
    sizes = Sizes(batch, max(map(len, subject.prompts)), args.rounds)
    began = time.perf_counter()
    engine = Ours(subject, mode, sizes, clock, None if clock.on_device else again)
    try:
        engine.turn(subject.group(batch, 0))
        first = time.perf_counter() - began
        turns = [engine.turn(subject.group(batch, turn)) for turn in range(args.turns)]
        seconds = statistics.median(turn.seconds / turn.rounds for turn in turns)
        length = statistics.mean(turn.accept_length for turn in turns)
        return {
            "target": subject.name,
            "variant": variant,
            "batch": batch,
            "how": mode.how,
            "shape": "plain" if mode.shape is None else mode.shape.name,
            "round_seconds": seconds,
            "tokens_per_s": batch * length / seconds,
            "accept_length": None if mode.shape is None else length,
            "forced": None if mode.shape is None else subject.forced_length,
            "first_turn_seconds": first,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if clock.on_device else None,
            "kernels": kernels_of(engine, subject, batch, args.rounds, clock) if args.kernels else None,
        }
    finally:
        engine.close()


def kernels_of(engine: Ours, subject: Subject, batch: int, rounds: int, clock: Clock) -> dict[str, Any]:
    """Kernels and copies of one round. On a CPU, torch's operations stand for them."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if clock.on_device else [])
    profiler = profile(activities=kinds)

    def end() -> None:
        clock.wait()
        profiler.__exit__(None, None, None)

    engine.turn(subject.group(batch, 0), profiler.__enter__, end)
    wanted = DeviceType.CUDA if clock.on_device else DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == wanted]
    count, spent = collections.Counter[str](), collections.Counter[str]()
    for event in events:
        name = event.name[:NAMED]
        count[name] += 1
        spent[name] += event.device_time if clock.on_device else event.self_cpu_time_total  # microseconds
    longest = {
        name: {"count": count[name] / rounds, "seconds": spent[name] / rounds / 1e6}
        for name, _ in spent.most_common(SHOWN)
    }
    return {"count": len(events) / rounds, "seconds": sum(spent.values()) / rounds / 1e6, "by_name": longest}


def rows(
    subject: Subject, args: argparse.Namespace, clock: Clock, left_out: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """A mode that fails costs its own row."""
    shapes = [None, *(DraftShape.parse(text) for text in args.shapes)]
    ends = time.perf_counter() + args.budget
    for batch, variant in itertools.product(args.batch, args.variants):
        for mode in (Mode(shape, how) for how in args.hows for shape in shapes):
            name = f"{variant} {mode.name}, batch {batch}"
            if mode.shape is None and variant == "fp8":  # of a head alone
                continue
            if time.perf_counter() > ends:
                left_out[name] = f"no time left of {args.budget:g} seconds"
                continue
            try:
                yield measure(subject, variant, mode, batch, args, clock)
            except Exception as error:  # process edge: the record says why there is no row
                left_out[name] = f"{type(error).__name__}: {error}"[:500]
                print(f"no row of {name}: {error}", file=sys.stderr)
            if clock.on_device:
                torch.cuda.empty_cache()


def print_kernels(found: Sequence[Row]) -> None:
    for row in found:
        if row["kernels"] is not None:
            of, kernels = f"{row['variant']} {row['how']} {row['shape']}, batch {row['batch']}", row["kernels"]
            print(f"{of}: {kernels['count']:.0f} kernels a round, {1e3 * kernels['seconds']:.3f} ms")
            for name, one in kernels["by_name"].items():
                print(f"  {1e6 * one['seconds']:9.1f} us {one['count']:7.1f} x  {name}")


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--target", choices=tuple(FORCED), default="llama")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["dependent"], help="(default: dependent)")
    parser.add_argument("--hows", nargs="+", choices=HOWS, default=["graph", "graph-serial", "eager"])
    parser.add_argument("--shapes", nargs="*", default=["3,1,4", "4,1,5", "7,8,32"], metavar="S,K,N")
    parser.add_argument("--context", type=int, default=512, help="tokens of random prompts (default: 512)")
    parser.add_argument("--rounds", type=int, default=24, help="measured in each turn (default: 24)")
    parser.add_argument("--turns", type=int, default=3, help="of which the median counts (default: 3)")
    parser.add_argument("--force-accept-length", default="2.5", metavar="X", help="see toolkit bench acceptance")
    parser.add_argument("--kernels", action="store_true", help="profile a turn: kernels by number and time")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no row begins (default: 3600)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    device = device_of(args, "rounds_gpu.py")
    if device is None:
        return 2
    subject = FORCED[args.target](device, args.context, ForcedAcceptance.parse(args.force_accept_length))
    left_out: dict[str, str] = {}
    found = list(rows(subject, args, Clock(device), left_out))
    print_kernels(found)
    show(found, COLUMNS, f"{subject.name}; {subject.head}; {subject.acceptance}", left_out)
    more = {"left_out": left_out, "definitions": DEFINITIONS}
    leave(args, "rounds", f"rounds-{args.target}", settings_of(args), found, **more)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
