"""Products of few rows at the shapes of Llama-3.1-8B and its draft head: cuBLAS against `skinny_product`.

    python benchmarks/products_gpu.py [--budget 150] [--out FILE] [--device cpu]

Weights rotate through 1.5 GB: what a load marks to be evicted first takes the place of its like, so that a part of the
second-level cache keeps old weights. A graph of at least 20 launches is replayed 7 times; seconds are medians, of one
launch. A tile whose result is wrong, or has other bits in a graph or beside other rows, is
named WRONG. Tiles are compiled by processes that need no GPU. The chain is 32 layers of products, without what stands
between them. `--device cpu` rehearses in Triton's interpreter with tiny sizes. Writes
benchmarks/results/products-<hardware>.json, also when the budget of seconds ends.
"""
# ruff: noqa: E402

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

REHEARSAL = "cpu" in sys.argv
os.environ["TRITON_INTERPRET"] = "1" if REHEARSAL else "0"

import torch
from harness import leave, parser_of
from torch import Tensor
from torch.nn.functional import linear, silu
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from toolkit.infer.kernels.triton.skinny_product import PROCESSORS, Tile, skinny_product

DEVICE = "cpu" if REHEARSAL else "cuda"
BANDWIDTH, LATENCY, SHARED = 3.1e12, 1.0e-6, 227 * 1024  # of an H100
LAUNCHES, REPLAYS, LAYERS, TILES, FINALISTS, ROTATED = (2, 1, 1, 1, 1, 0) if REHEARSAL else (20, 7, 32, 18, 4, 1.5e9)
WRONG = 0.02 if REHEARSAL else 0.015  # of the largest result; the interpreter truncates instead of rounding
ROWS = (1, 4, 16)
GRID = [  # outputs, bytes of inputs, warps, stages; over 48 KiB each, so that launches share one carve-out and overlap
    (64, 256, 4, 3), (64, 256, 4, 4), (64, 256, 4, 5), (64, 128, 4, 6), (64, 512, 4, 2), (128, 128, 8, 6),
    (128, 256, 8, 3), (32, 256, 2, 6), (32, 256, 2, 9), (32, 512, 2, 4), (32, 256, 1, 6), (16, 512, 2, 5),
    (16, 512, 2, 7), (16, 1024, 2, 3), (16, 512, 1, 5),
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    name: str
    size: int
    width: int
    gated: bool = False
    residual: bool = False
    itemsize: int = 2

    def bytes(self) -> int:
        return self.size * self.width * self.itemsize

    def tensors(self, copies: int, device: str) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
        """x, weights of which any may be used, and the rest of what `skinny_product` takes."""
        random = partial(torch.empty if device == "meta" else torch.randn, device=device, dtype=torch.bfloat16)
        weights = [random(self.size, self.width).mul_(self.width**-0.5) for _ in range(copies)]
        more: dict[str, Any] = {"gated": self.gated}
        if self.itemsize == 1:
            more["scales"] = torch.full((self.size,), 2.0**-10, device=device)
            weights = [(one * 2**10).clamp(-448, 448).to(torch.float8_e4m3fn) for one in weights]
        if self.residual:
            more["residual"] = random(max(ROWS), self.size)
        return random(max(ROWS), self.width), weights, more

    def unfused(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        found = linear(x, weight)
        if self.gated:
            gate, up = found.chunk(2, -1)
            found = silu(gate) * up
        return found if residual is None else found + residual


LAYER = [
    Shape("gate_up", 28672, 4096, gated=True), Shape("down", 4096, 14336, residual=True), Shape("qkv", 6144, 4096),
    Shape("o", 4096, 4096, residual=True),
]  # fmt: skip
REST = [
    Shape("lm_head", 128256, 4096), Shape("draft_lm_head", 32000, 4096), Shape("fc", 4096, 12288),
    Shape("draft_qkv", 6144, 8192), Shape("kv", 1024, 4096),
]  # fmt: skip
if REHEARSAL:
    LAYER = [replace(one, size=one.size // 128, width=one.width // 128) for one in LAYER]
    REST = [Shape("lm_head", 72, 100)]


def predicted(shape: Shape, tile: Tile) -> float:
    """Seconds of a launch, from the bytes that programs keep in flight and how they fill the processors."""
    buffers = tile.stages - (tile.outputs < 64)  # asynchronous products hold one more
    shared = buffers * (tile.outputs * shape.itemsize + 32) * tile.inputs + 1024
    slots = PROCESSORS * min(SHARED // shared, 64 // tile.warps, 32)
    programs = -(-shape.size // tile.outputs) * tile.split
    work, flying = shape.bytes() / programs, (tile.stages - 1) * tile.outputs * tile.inputs * shape.itemsize
    seconds = (2 + (tile.split > 1)) * LATENCY
    while programs > 0:
        together = min(programs, slots)
        uneven = -(-together // PROCESSORS) * PROCESSORS / together
        moved = together * work / min(BANDWIDTH, together * flying / LATENCY)
        seconds += 0.3 * LATENCY + moved * (0.9 + 0.1 * uneven)
        programs -= together
    return seconds


def tiles_of(shape: Shape) -> list[Tile]:
    """The TILES most promising: of each place in GRID the best number of parts, then the second best ones."""
    first, second = [], []
    for outputs, wide, warps, stages in GRID:
        inputs, tiles = wide // shape.itemsize, -(-shape.size // outputs)
        splits = [n for n in (1, 2, 4, 6, 8) if tiles * n >= 120 and (n == 1 or tiles * n <= 600)] or [8]
        same = [Tile(outputs, inputs, n, warps, stages) for n in splits]
        best, *others = sorted(same, key=partial(predicted, shape))
        first.append(best)
        second += others[:1]
    return [tile for some in (first, second) for tile in sorted(some, key=partial(predicted, shape))][:TILES]


class Absent:
    """Stands for Triton's driver of an H100 in a process that only compiles."""

    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


def compile_only() -> None:
    driver.set_active(Absent())
    run = JITFunction.run
    JITFunction.run = lambda self, *given, warmup, **named: run(self, *given, warmup=True, **named)


def compiled(shape: Shape, tile: Tile, pdl: bool) -> None:
    x, [weight], more = shape.tensors(1, "meta")
    skinny_product(x, weight, tile=tile, pdl=pdl, **more)


def timed(launches: Sequence[Callable[[], Tensor]]) -> tuple[float, Tensor]:
    """Seconds of a launch as part of a graph, and what the last one gave."""
    begun, found = time.perf_counter(), [launch() for launch in launches]
    if REHEARSAL:
        return (time.perf_counter() - begun) / len(launches), found[-1]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [launch() for launch in launches]
    graph.replay()
    seconds = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return median(seconds) / len(launches), found[-1].clone()


class Sweep:
    def __init__(self, budget: float) -> None:
        self.ends, self.rows = time.monotonic() + budget, list[dict[str, Any]]()
        self.jobs: dict[tuple[Shape, Tile, bool], Future[None]] = {}
        self.best: dict[tuple[Shape, bool], Tile] = {}

    def over(self) -> bool:
        return time.monotonic() > self.ends

    def note(self, name: str, itemsize: int, rows: int, what: str, seconds: float, moved: float, **more: Any) -> None:
        row = {"shape": name, "itemsize": itemsize, "rows": rows, "what": what, "seconds": seconds}
        self.rows.append({**row, "bytes_per_s": moved / seconds, **more})
        print(self.rows[-1], file=sys.stderr, flush=True)

    def product(self, shape: Shape) -> None:
        """cuBLAS, then each tile with one row, then the best with more."""
        x, weights, more = shape.tensors(1 if shape.bytes() > ROTATED else 1 + int(ROTATED // shape.bytes()), DEVICE)
        residual, about = more.pop("residual", None), (shape.name, shape.itemsize)
        rotated = [weights[at % len(weights)] for at in range(max(LAUNCHES, len(weights)))]
        for rows in (*ROWS, 32) if shape.itemsize == 2 else ():
            wide = x.repeat(2, 1)[:rows]
            given = None if residual is None else residual.repeat(2, 1)[:rows]
            self.note(*about, rows, "cublas", timed([partial(linear, wide, one) for one in rotated])[0], shape.bytes())
            if shape.gated or shape.residual:
                seconds = timed([partial(shape.unfused, wide, one, given) for one in rotated])[0]
                self.note(*about, rows, "cublas+", seconds, shape.bytes())
        factors = rotated[-1].float() * (more["scales"][:, None] if "scales" in more else 1)
        exact = shape.unfused(x.float(), factors, None if residual is None else residual.float())

        def one(pdl: bool, rows: int, tile: Tile) -> float:
            if self.jobs:
                wait([self.jobs[shape, tile, pdl]])
            op: Any = partial(skinny_product, tile=tile, pdl=pdl, **more)
            whole = op(x, rotated[-1], residual=residual)
            error = ((whole - exact).abs().max() / exact.abs().max()).item()
            given = None if residual is None else residual[:rows]
            seconds, found = timed([partial(op, x[:rows], weight, residual=given) for weight in rotated])
            right = error < WRONG and torch.equal(found, whole[:rows])
            what = ("dependent" if pdl else "ours") if right else "WRONG"
            noted: dict[str, Any] = {"tile": asdict(tile), "max_error": error, "predicted": predicted(shape, tile)}
            self.note(*about, rows, what, seconds, shape.bytes(), **noted)
            return seconds if right else float("inf")

        for pdl in (False, True):
            took: dict[Tile, float] = {}
            for tile in tiles_of(shape):
                try:
                    took[tile] = float("inf") if self.over() else one(pdl, 1, tile)
                except Exception as error:  # a tile that this compiler or card refuses
                    print(f"DROPPED {shape.name} {tile}: {error!r}"[:600], file=sys.stderr)
            finals = {
                tile: seconds + sum(one(pdl, rows, tile) for rows in ROWS[1:])
                for tile, seconds in sorted(took.items(), key=lambda both: both[1])[:FINALISTS]
                if seconds < float("inf")
            }
            if finals:
                self.best[shape, pdl] = min(finals, key=finals.__getitem__)

    def chain(self) -> None:
        """LAYERS of q/k/v, output, gate and up, down, each with weights of its own."""
        random = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        layers = [[random(one.size, one.width).mul_(0.004) for one in LAYER] for _ in range(LAYERS)]
        width, moved = LAYER[0].width, LAYERS * sum(map(Shape.bytes, LAYER))

        def run(x: Tensor, gate_up: Any, down: Any, qkv: Any, out: Any) -> Tensor:
            for of_gate_up, of_down, of_qkv, of_out in layers:
                x = out(qkv(x, of_qkv)[:, :width], of_out, residual=x)
                x = down(gate_up(x, of_gate_up), of_down, residual=x)
            return x

        for rows in ROWS[:1] if REHEARSAL else (*ROWS, 32):
            x, wanted = random(rows, width), None
            for what, pdl, ahead in (
                ("cublas+", None, None), ("ours", False, None), ("dependent", True, None),
                ("dependent, no prefetch", True, 0), ("dependent, prefetch 16", True, 16),
            ):  # fmt: skip
                products: list[Any] = [shape.unfused for shape in LAYER]
                if pdl is not None:
                    if any((shape, pdl) not in self.best for shape in LAYER):
                        continue
                    tiles = [self.best[shape, pdl] for shape in LAYER]
                    tiles = tiles if ahead is None else [replace(tile, ahead=ahead) for tile in tiles]
                    both = zip(LAYER, tiles, strict=True)
                    products = [partial(skinny_product, gated=one.gated, pdl=pdl, tile=tile) for one, tile in both]
                seconds, found = timed([partial(run, x, *products)])
                wanted = found if wanted is None else wanted
                error = ((found - wanted).float().norm() / wanted.float().norm()).item()
                self.note(f"chain of {LAYERS}", 2, rows, what, seconds, moved, difference=error)

    def show(self) -> None:
        """One line a shape and number of rows: microseconds and TB/s of each way's best."""
        table: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
        for row in sorted(self.rows, key=lambda row: -row["seconds"]):
            table.setdefault((row["shape"], row["itemsize"], row["rows"]), {})[row["what"]] = row
        for (name, itemsize, rows), ways in sorted(table.items()):
            best = [f"{way} {row['seconds'] * 1e6:.1f} ({row['bytes_per_s'] / 1e12:.2f})" for way, row in ways.items()]
            print(f"{name} {'fp8' if itemsize == 1 else 'bf16'} x{rows}:", ", ".join(best))
        for (shape, pdl), tile in self.best.items():
            if pdl:
                print(f"    {(shape.size, shape.width, shape.gated, shape.itemsize)}: Tile{(*asdict(tile).values(),)},")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no further tile is tried")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    torch.manual_seed(0)
    gc.freeze()  # a capture collects garbage first, and would look at all of torch
    sweep = Sweep(args.budget)
    shapes = [*LAYER, *REST, *(replace(one, itemsize=1) for one in (*REST, *LAYER))]
    pool = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), initializer=compile_only)
    for shape in () if REHEARSAL else shapes:
        for pdl in (False, True):
            sweep.jobs |= {(shape, tile, pdl): pool.submit(compiled, shape, tile, pdl) for tile in tiles_of(shape)}
    steps: list[Callable[[], None]] = [partial(sweep.product, shape) for shape in shapes]
    for step in (*steps[: len(LAYER)], sweep.chain, *steps[len(LAYER) :]):
        try:
            if not sweep.over() or step == sweep.chain:
                step()
        except Exception:  # the other steps still have their minutes
            traceback.print_exc()
    pool.shutdown(cancel_futures=True)
    settings = {"budget": args.budget, "launches": LAUNCHES, "replays": REPLAYS, "layers": LAYERS}
    leave(args, "products", "products", settings, sweep.rows)
    sweep.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
