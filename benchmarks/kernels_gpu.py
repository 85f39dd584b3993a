"""Each Triton kernel of the engine against the roofline of the card it runs on, at the shape of an 8B target.

    python benchmarks/kernels_gpu.py [--context 1024 8192] [--batch 1 8] [--nodes 4 32 64] [--dtype bfloat16]

The roofline is measured here, first: bytes a second of a copy (read and written), and operations a second of a matrix
product. A kernel's is the larger of its bytes over the one and its operations over the other. Times are medians of
launches with a cold second-level cache. max_error: largest difference from the plain torch reference, computed in fp32
from the same numbers. Needs a CUDA device and triton. Writes benchmarks/results/kernels-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from rich.console import Console
from rich.table import Table

from toolkit.bench.records import make_record
from toolkit.infer.kernels.dispatch import REFERENCE, Ops, triton_ops
from toolkit.infer.kernels.paged_reference import Pages, Scoring
from toolkit.infer.kernels.tree_reference import ancestor_mask

PAGE_SIZE = 16
TOP_K, STEPS = 8, 7  # of the tree whose candidates are ranked
Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Problem:
    """One launch. run(ops, exact): the result by these ops; exact: from fp32 copies of the same numbers."""

    kernel: str
    shape: str
    bytes: int
    operations: int
    run: Callable[[Ops, bool], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a target (defaults: Llama-3.1-8B)."""

    dtype: torch.dtype
    device: torch.device
    kv_heads: int = 8
    groups: int = 4
    width: int = 128
    vocabulary: int = 128256

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def pages(self, rows: int, span: int) -> Pages:
        """Full rows, their pages in a random order."""
        count = -(-span // PAGE_SIZE)
        table = (torch.randperm(rows * count, device=self.device) + 1).view(rows, count)
        keys, values = (self.random((rows * count + 1) * PAGE_SIZE, self.kv_heads, self.width) for _ in range(2))
        return Pages(keys, values, table, PAGE_SIZE, span)


def attention(kernel: str, sizes: Sizes, rows: int, context: int, new: int) -> Problem:
    """`new` queries behind `context` positions of every row: causal, or the nodes of a tree."""
    heads, scoring = sizes.kv_heads * sizes.groups, Scoring(sizes.width**-0.5)
    pages, q = sizes.pages(rows, context + new), sizes.random(rows, new, heads, sizes.width).transpose(1, 2)
    held = torch.full((rows,), context, device=sizes.device)
    more: tuple[Any, ...] = ()
    if kernel == "attend_tree":
        node = torch.arange(1, new, device=sizes.device)
        mask = ancestor_mask(((node - 1) // 2).expand(rows, -1), new.bit_length())  # every node has two children
        more = (mask, None)

    def run(ops: Ops, exact: bool) -> torch.Tensor:
        seen, asked = pages, q
        if exact:
            seen, asked = replace(pages, keys=pages.keys.float(), values=pages.values.float()), q.float()
        return getattr(ops, kernel)(asked, seen, held, *more, scoring)

    size, per_position = sizes.dtype.itemsize, 2 * sizes.kv_heads * sizes.width
    pairs = rows * (new * context + new * (new + 1) // 2)  # of a query and a key it sees, where all are seen
    moved = (rows * (context + new) * per_position + 2 * q.numel()) * size
    return Problem(kernel, f"{rows} x {new} behind {context}", moved, 4 * pairs * heads * sizes.width, run)


def writing(sizes: Sizes, tokens: int) -> Problem:
    pages = sizes.pages(1, tokens)
    start = torch.zeros(1, dtype=torch.long, device=sizes.device)
    keys, values = (sizes.random(1, sizes.kv_heads, tokens, sizes.width).transpose(1, 2) for _ in range(2))

    def run(ops: Ops, exact: bool) -> torch.Tensor:
        if exact:  # what the other one wrote must not stand for what this one did not
            pages.keys.zero_(), pages.values.zero_()
        ops.write_kv(pages, keys, values, start, 0)
        return torch.stack((pages.keys, pages.values))[:, PAGE_SIZE:].float() if exact else pages.keys

    return Problem("write_kv", f"{tokens} positions", 4 * keys.numel() * sizes.dtype.itemsize, 0, run)


def choosing(kernel: str, sizes: Sizes, rows: int) -> Problem:
    logits = sizes.random(rows, sizes.vocabulary)
    more = (TOP_K,) if kernel == "top_log_probs" else ()

    def run(ops: Ops, exact: bool) -> torch.Tensor:
        found = getattr(ops, kernel)(logits, *more)
        if not more:
            return found
        return found[0]  # of equal scores any id may stand

    return Problem(kernel, f"{rows} x {sizes.vocabulary}", logits.numel() * logits.element_size(), 0, run)


def trees(sizes: Sizes, rows: int, nodes: int) -> Iterator[Problem]:
    """The tree of the best candidates, and the walk through it."""
    found, device = TOP_K + (STEPS - 1) * TOP_K**2, sizes.device
    candidate = torch.arange(found, device=device)
    levels = torch.where(candidate < TOP_K, 1, 2 + (candidate - TOP_K) // TOP_K**2)
    first_above = torch.where(levels > 2, TOP_K + (levels - 3) * TOP_K**2, 0)
    parents = torch.where(levels > 1, first_above + candidate % TOP_K, -1).expand(rows, -1)
    scores = -levels.float() - torch.rand(rows, found, device=device) / 2  # they fall along every path
    given = (torch.zeros(rows, dtype=torch.long, device=device), candidate.expand(rows, -1), parents, levels, scores)

    def rank(ops: Ops, exact: bool) -> torch.Tensor:
        return ops.rank_candidates(*given, [nodes] * rows, STEPS).mask

    yield Problem("rank_candidates", f"{rows} x {found} to {nodes}", rows * (found * 20 + nodes * nodes), 0, rank)
    tree = REFERENCE.rank_candidates(*given, [nodes] * rows, STEPS)

    def follow(ops: Ops, exact: bool) -> torch.Tensor:
        return ops.follow_choices(*tree, tree.tokens, STEPS + 1).path

    yield Problem("follow_choices", f"{rows} x {nodes}", rows * nodes * 25, 0, follow)


def problems(sizes: Sizes, args: argparse.Namespace) -> Iterator[Problem]:
    for rows in args.batch:
        for context in args.context:
            yield attention("attend_causal", sizes, rows, context, 1)
            for nodes in args.nodes:
                yield attention("attend_tree", sizes, rows, context, nodes)
        yield choosing("argmax", sizes, rows * max(args.nodes))
        yield choosing("top_log_probs", sizes, rows * TOP_K)
        yield from trees(sizes, rows, min(max(args.nodes), 1 + TOP_K + (STEPS - 1) * TOP_K**2))
    yield attention("attend_causal", sizes, 1, max(args.context), args.chunk)
    yield writing(sizes, args.chunk)


def measure(problem: Problem, ops: Ops, seconds_of: Timer, bandwidth: float, speed: float) -> dict[str, Any]:
    """One row of the record; the card moves `bandwidth` bytes and does `speed` operations a second."""
    wanted, got = problem.run(REFERENCE, True).double(), problem.run(ops, problem.kernel == "write_kv").double()
    assert not got.isnan().any(), f"{problem.kernel} {problem.shape}: nan"
    both = torch.where(wanted == got, 0.0, (wanted - got).abs())  # -inf equals -inf
    seconds = seconds_of(lambda: problem.run(ops, False))
    least = max(problem.bytes / bandwidth, problem.operations / speed)
    return {
        "kernel": problem.kernel,
        "shape": problem.shape,
        "seconds": seconds,
        "bytes": problem.bytes,
        "operations": problem.operations,
        "share_of_roofline": least / seconds,
        "max_error": both.max().item(),
    }


def median_seconds(launch: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(launch, warmup=50, rep=200, return_mode="median")) / 1e3


def card(device: torch.device, dtype: torch.dtype, seconds_of: Timer) -> tuple[float, float]:
    """Bytes a second of a copy of 2 GiB, and operations a second of a product of matrices of 8192."""
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / seconds_of(lambda: target.copy_(source))
    matrix = torch.randn(8192, 8192, device=device).to(dtype)
    return bandwidth, 2 * 8192**3 / seconds_of(lambda: matrix @ matrix)


def show(rows: list[dict[str, Any]], bandwidth: float, speed: float) -> None:
    table = Table(title=f"kernels; the card: {bandwidth / 1e12:.2f} TB/s, {speed / 1e12:.0f} T operations/s")
    for column in ("kernel", "shape", "microseconds", "roofline", "max error"):
        table.add_column(column, justify="right")
    for row in rows:
        share = f"{row['share_of_roofline']:.0%}"
        table.add_row(row["kernel"], row["shape"], f"{row['seconds'] * 1e6:.1f}", share, f"{row['max_error']:.2g}")
    Console(width=100).print(table)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192], help="positions before the new ones")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 32, 64], help="sizes of the verified trees")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prompt read at once")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--out", type=Path)
    return parser


def main() -> int:
    args = arguments().parse_args()
    if not torch.cuda.is_available() or torch.version.hip is not None:
        print("kernels_gpu.py times kernels on an NVIDIA GPU, and PyTorch sees none here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    sizes = Sizes(getattr(torch, args.dtype), torch.device("cuda"))
    bandwidth, speed = card(sizes.device, sizes.dtype, median_seconds)
    rows = []
    for problem in problems(sizes, args):
        rows.append({**measure(problem, triton_ops(), median_seconds, bandwidth, speed), "dtype": args.dtype})
        print(f"{rows[-1]}", file=sys.stderr, flush=True)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    measured = {"bytes_per_s": bandwidth, "operations_per_s": speed}
    record = make_record("kernels", ["python", *sys.argv], settings, rows, card=measured)
    show(rows, bandwidth, speed)
    leave(record, "kernels", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
