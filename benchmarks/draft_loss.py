"""Memory and time of one draft loss, forward and backward, at vocabularies of published targets.

    python benchmarks/draft_loss.py [--vocabulary 49152 128256 262144] [--tokens 2048] [--hidden 576] [--dtype bfloat16]

`naive` is the loss as it is usually written: the teacher's distribution and the head's logits of all tokens in one
piece, softmax in fp32. `tiled` is `toolkit/train/loss.py`. Both are soft cross-entropy against a teacher of the same
width on the whole vocabulary, with gradients of states and output matrix; `loss` says that they agree. Every
measurement has a process of its own. Writes benchmarks/results/training-draft-loss-<hardware>.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results_folder import leave
from rich.console import Console
from rich.table import Table

from toolkit.bench.records import make_record
from toolkit.threads import users_threads
from toolkit.train.loss import DraftLoss
from toolkit.train.teacher import TeacherRows

DEFINITIONS = {
    "seconds_per_step": "one forward and backward, the least of the repetitions",
    "processor_seconds": "as seconds_per_step, in processor time: with one thread, other programs hardly show",
    "peak_memory_bytes": "the most that was held at once beyond states and output matrices; gradients count",
    "loss": "mean over tokens",
}
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def naive(states: torch.Tensor, matrix: torch.Tensor, teacher: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """states [T, H] and matrix [V, H] of the head, teacher [T, H] and output [V, H] of the target -> mean loss."""
    probs = F.linear(teacher, output).float().softmax(-1)
    logits = F.linear(states, matrix).float()
    return -(probs * logits.log_softmax(-1)).sum(-1).mean()


def tiled(states: torch.Tensor, matrix: torch.Tensor, teacher: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """As `naive`."""
    rows = torch.arange(len(states), device=states.device)
    everywhere = torch.ones_like(rows, dtype=torch.bool)
    source = TeacherRows(teacher, rows, everywhere, lambda hidden: F.linear(hidden, output).float().softmax(-1))
    weight = torch.full((len(states),), 1 / len(states), device=states.device)
    return DraftLoss("soft_cross_entropy", source, rows, rows, weight)(states, matrix)[0]


VARIANTS: dict[str, Step] = {"naive": naive, "tiled": tiled}


def measure(variant: str, vocabulary: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the record; meant for a process of its own."""
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.25).to(device, getattr(torch, args.dtype))

    states, teacher = random(args.tokens, args.hidden).requires_grad_(True), random(args.tokens, args.hidden)
    matrix, output = random(vocabulary, args.hidden).requires_grad_(True), random(vocabulary, args.hidden)
    seconds, processor, held, loss = [], [], restart_peak(device), torch.zeros(())
    for _ in range(args.repeats):
        states.grad = matrix.grad = None
        started, before = time.perf_counter(), time.process_time()
        loss = VARIANTS[variant](states, matrix, teacher, output)
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - before)
    return {
        "variant": variant,
        "vocabulary": vocabulary,
        "tokens": args.tokens,
        "seconds_per_step": min(seconds),
        "tokens_per_s": args.tokens / min(seconds),
        "processor_seconds": min(processor),
        "peak_memory_bytes": peak(device) - held,
        "accept_length": None,
        "loss": loss.item(),
    }


def restart_peak(device: torch.device) -> int:
    """Bytes held now; the peak counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: torch.device) -> int:
    """Most bytes held since the start or `restart_peak`: on a CPU, the process's resident memory (Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="one draft loss, forward and backward")
    for column in ("vocabulary", "variant", "seconds", "processor time", "peak memory, MB", "loss"):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = (f"{row[name]:.2f}" for name in ("seconds_per_step", "processor_seconds"))
        memory, loss = f"{row['peak_memory_bytes'] / 1e6:.0f}", f"{row['loss']:.4f}"
        table.add_row(str(row["vocabulary"]), row["variant"], *seconds, memory, loss)
    Console(width=100).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 128256, 262144])
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576, help="width of states (default: the demo target's)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.threads = int(users_threads() or 1)
    torch.set_num_threads(args.threads)
    rows = []
    for vocabulary in args.vocabulary:
        for variant in args.variant:
            # A process that has ended gives all its memory back, and its peak is its own.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                rows.append(process.submit(measure, variant, vocabulary, args).result())
            print(f"{rows[-1]}", file=sys.stderr, flush=True)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    record = make_record("training", ["python", *sys.argv], settings, rows, definitions=DEFINITIONS)
    show(rows)
    leave(record, "training-draft-loss", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
