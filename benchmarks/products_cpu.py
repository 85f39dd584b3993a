"""A step of the engine on a CPU beside the products that it consists of: what is left to gain outside of them.

    OMP_NUM_THREADS=2 python benchmarks/products_cpu.py [--target NAME] [--quantization int8]

Products: all matrix products of the target, joined as the engine joins them, called by themselves one after the other.
A step of one row is a plain step; of n rows it verifies a perfect draft of n - 1 tokens, without a head. All take turns
prompt by prompt. Writes benchmarks/results/products-<hardware>.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from harness import asked_ids, leave, parser_of, questions, set_threads, settings_of, show
from torch import Tensor

from toolkit.bench.acceptance import ONE_BY_ONE
from toolkit.bench.side_by_side import BenchError, PerfectDrafter, SideBySide, with_context
from toolkit.errors import exit_status
from toolkit.infer.cpu.blocked_product import BlockedLinear
from toolkit.infer.engine.cpu_door import QUANTIZATIONS, load_target, pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.gguf_file import DEMO_NAME
from toolkit.targets.target import Target

COLUMNS = ("rows", "products", "products_ms", "step_ms", "step_over_products")
DEFINITIONS = {
    "products_ms": "median milliseconds of all products of a step with so many rows, by themselves",
    "step_ms": "median milliseconds of a step of the engine; the first two and the last of an answer are left out",
}


def products_of(target: Target) -> list[Callable[[Tensor], Tensor]]:
    """Every packed product of the target: [rows, K] -> [rows, N]. Raises BenchError where none is packed."""
    linears = [one for one in target.model.modules() if isinstance(one, BlockedLinear) and one.blocked]
    parts = {id(part): part for part in (one.joined or one for one in linears)}
    if not parts:
        raise BenchError(f"no product of {target.name} in {target.precision} is packed on this machine")
    return [part.blocked_product for part in parts.values()]


def inputs_of(target: Target, rows: int) -> list[Tensor]:
    """An input of each product, [rows, K]."""
    linears = [one for one in target.model.modules() if isinstance(one, BlockedLinear) and one.blocked]
    widths = {id(one.joined or one): one.in_features for one in linears}
    made = {width: torch.randn(rows, width).to(target.dtype) for width in set(widths.values())}
    return [made[width] for width in widths.values()]


def steps_of(engine: Engine, prompt: Sequence[int], max_tokens: int, rows: int) -> tuple[tuple[int, ...], list[float]]:
    """The answer, and the seconds of its full steps."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = engine.add_request(prompt, params, speculative=rows > 1)
    seconds = []
    while engine.has_work():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return tuple(request.output_ids), seconds[2:-1]


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, limit=8, max_tokens=128)
    parser.add_argument("--target", default=DEMO_NAME)
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--rows", type=int, nargs="+", default=[6, 16], help="beside one row (default: 6 16)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16"))
    args = parser.parse_args(argv)
    if min(args.rows) < 2 or args.max_tokens < 6 * max(args.rows):
        raise BenchError(
            f"--rows {args.rows} --max-tokens {args.max_tokens}: at least 2 and six times the rows are needed"
        )
    threads = set_threads(2)
    target = load_target(args.target, dtype=args.dtype, quantization=args.quantization)
    pack(target)
    prompts = [tuple(ids) for ids in asked_ids(target.tokenizer, questions(args.limit))]
    counts = [1, *args.rows]
    products, inputs = products_of(target), {rows: inputs_of(target, rows) for rows in counts}
    alone: dict[int, list[float]] = {rows: [] for rows in counts}
    steps: dict[int, list[float]] = {rows: [] for rows in counts}
    with SideBySide(with_context(ONE_BY_ONE, max(map(len, prompts)), args.max_tokens), target, 2) as engines:
        plain, perfect = engines.open(), engines.open_perfect(max(args.rows) - 1).engine
        drafter = perfect.drafter
        assert isinstance(drafter, PerfectDrafter)
        for prompt in prompts:
            for rows in counts:
                drafter.depth = rows - 1
                answer, seconds = steps_of(plain if rows == 1 else perfect, prompt, args.max_tokens, rows)
                drafter.answers[0] = answer  # the seed of greedy requests
                steps[rows] += seconds
                for _ in range(len(seconds)):
                    began = time.perf_counter()
                    for product, given in zip(products, inputs[rows], strict=True):
                        product(given)
                    alone[rows].append(time.perf_counter() - began)
    table = [
        {
            "rows": rows, "products": len(products), "products_ms": 1e3 * median(alone[rows]),
            "step_ms": 1e3 * median(steps[rows]), "step_over_products": median(steps[rows]) / median(alone[rows]),
        }
        for rows in counts
    ]  # fmt: skip
    show(table, COLUMNS, f"{args.target} in {target.precision}, {threads} threads")
    leave(args, "products", "products", settings_of(args, threads=threads), table, definitions=DEFINITIONS)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
