"""Products of few rows at the shapes of Llama-3.1-8B, by themselves: cuBLAS, ours, ours with dependent launch, float8.

    python benchmarks/products_gpu.py [--budget 120] [--target llama]

Weights rotate through 1.5 GB, so that none is in the second-level cache. A graph of at least 20 launches is replayed
--repeats times. Without a GPU (--device cpu --target tiny) set TRITON_INTERPRET=1; times then mean nothing.
Writes benchmarks/results/products-gpu-<hardware>.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu import TARGETS, Bench, bandwidth, gpu_parser
from harness import Row, show
from torch import Tensor
from torch.nn.functional import linear, silu

from toolkit.infer.kernels.triton.skinny_product import skinny_product

ROTATED, LAUNCHES = 1.5e9, 20
WRONG = 0.03  # of the largest result
SCALE = 2.0**-10  # of float8 weights: normal ones of a layer then lie in its range
COLUMNS = ("product", "outputs", "inputs", "rows", "way", "seconds", "share_of_bandwidth", "error")
DEFINITIONS = {
    "product": "gate_up: with silu(gate) * up behind it; cublas takes three kernels for it, ours one",
    "way": "cublas: torch's; ours: skinny_product; dependent: with programmatic dependent launch; fp8: dependent, "
    "weights of one byte with a scale a row",
    "seconds": "of a launch as part of a graph, median of replays",
    "share_of_bandwidth": "bytes of the weight / seconds / the larger of the card's bandwidths (`card`)",
    "error": "largest difference from the product in fp32, over its largest result",
}


def products(config: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the six products and the joined ones, the most decisive first."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * head
    return {
        "gate_up": (2 * inner, hidden), "down": (hidden, inner), "qkv": (hidden + 2 * kv, hidden),
        "q_o": (hidden, hidden), "lm_head": (config.vocab_size, hidden), "kv": (kv, hidden), "gate": (inner, hidden),
    }  # fmt: skip


def by_cublas(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    found = linear(x, weight)
    if not gated:
        return found
    gate, up = found.chunk(2, -1)
    return silu(gate) * up


class Products(Bench):
    """One run."""

    def timed(self, launches: Sequence[Callable[[], Tensor]]) -> float:
        """Seconds of a launch."""
        run: Callable[[], object] = lambda: [launch() for launch in launches]  # noqa: E731
        if self.clock.on_device:
            run()  # compiled before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        return self.clock.median(run, self.args.repeats) / len(launches)

    def product(self, name: str, size: int, width: int, card: float) -> None:
        """All rows of one product."""
        random = partial(torch.randn, device=self.device, dtype=torch.bfloat16)
        copies = 1 + int(ROTATED / (2 * size * width)) if self.clock.on_device else 1
        weights = [random(size, width).mul_(width**-0.5) for _ in range(copies)]
        small = [(one / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn) for one in weights]
        scales, gated = torch.full((size,), SCALE, device=self.device), name == "gate_up"
        ways: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]] = {
            "cublas": (partial(by_cublas, gated=gated), weights),
            "ours": (partial(skinny_product, gated=gated), weights),
            "dependent": (partial(skinny_product, gated=gated, pdl=True), weights),
            "fp8": (partial(skinny_product, gated=gated, pdl=True, scales=scales), small),
        }
        for rows in self.args.rows:
            x = random(rows, width)
            for way, (call, given) in ways.items():
                full = given[0].float() * (SCALE if way == "fp8" else 1)
                self.attempt(f"{name} x{rows}, {way}", partial(self.one, name, way, x, call, given, full, card), 60)

    def one(
        self, name: str, way: str, x: Tensor, call: Callable[[Tensor, Tensor], Tensor], given: Sequence[Tensor],
        full: Tensor, card: float,
    ) -> None:  # fmt: skip
        exact = by_cublas(x.float(), full, name == "gate_up")
        error = ((call(x, given[0]) - exact).abs().max() / exact.abs().max()).item()
        assert error < WRONG, f"its result is wrong by {error:.3g} of the largest"
        launches = [partial(call, x, given[at % len(given)]) for at in range(max(LAUNCHES, len(given)))]
        seconds, moved = self.timed(launches if self.clock.on_device else launches[:1]), given[0].nbytes
        row: Row = {"product": name, "outputs": full.shape[0], "inputs": full.shape[1], "rows": len(x), "way": way}
        self.rows.append(row | {"seconds": seconds, "share_of_bandwidth": moved / seconds / card, "error": error})


def main(argv: Sequence[str] | None = None) -> int:
    parser = gpu_parser(__doc__, 120, repeats=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32], help="at most 32 (default: 1 4 16 32)")
    args = parser.parse_args(argv)
    bench = Products.of(args)
    rates = bandwidth(bench.clock, bench.device, 2**31 if bench.clock.on_device else 2**22)
    for name, (size, width) in products(TARGETS[args.target][1]).items():
        bench.attempt(name, partial(bench.product, name, size, width, max(rates.values())))
    show(bench.rows, COLUMNS, TARGETS[args.target][0], bench.left_out)
    return bench.leave("products", "products-gpu", DEFINITIONS, card={"bytes_per_s": rates})


if __name__ == "__main__":
    sys.exit(main())
