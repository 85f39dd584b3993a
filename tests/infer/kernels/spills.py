"""Registers that the kernels spill, and shared memory that they take, at the shapes of real models; needs no GPU.

    python -m tests.infer.kernels.spills 90           typical models and sizes of trees, for sm_90
    python -m tests.infer.kernels.spills 90 dots      of these the kernels of attention, whose tiles grow with heads

Prints one JSON object a line for each variant of a kernel: what it was launched for, its tile, and what ptxas says.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from toolkit.infer.kernels.paged_reference import Pages, Scoring


@dataclass(frozen=True)
class Launch:
    """A launch that was caught instead of run. named: further arguments, and options of the compiler."""

    kernel: JITFunction
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    named: dict[str, Any]


launches: list[Launch] = []


def catch(kernel: JITFunction, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
    launches.append(Launch(kernel, tuple(grid), given, named))


JITFunction.run = catch

from toolkit.infer.kernels.dispatch import triton_ops  # noqa: E402
from toolkit.infer.kernels.tree_reference import Beams, Candidates  # noqa: E402
from toolkit.infer.kernels.triton.skinny_product import skinny_product  # noqa: E402
from toolkit.train import triton_attention, triton_loss  # noqa: E402
from toolkit.train.loss import ETA  # noqa: E402

launched: set[str] = set()


def noted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> None:
        launched.add(name)
        op(*given)

    return run


KERNELS = {name: op for name, op in vars(triton_ops()).items() if callable(op)}
OPS = replace(triton_ops(), **{name: noted(name, op) for name, op in KERNELS.items()})
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
DTYPES = {"bf16": BF16, "fp32": FP32}
# Key heads, query heads of each, head dim.
MODELS = {"SmolLM2-135M": (3, 3, 64), "Llama-3.1-8B": (8, 4, 128), "Gemma-2-9B": (8, 2, 256)}
# Of a tree and new tokens of a prompt: a full tile of each head dim, and the small tiles of one.
SIZES = {"SmolLM2-135M": ((32,), (512,)), "Llama-3.1-8B": ((1, 8, 32), (1, 512)), "Gemma-2-9B": ((32,), (512,))}
MOST_PROGRAMS = 65535  # of CUDA in the second and third dimension of a grid
CONSTANTS = ("rows", "block", "wide", "value_wide", "lanes", "parts_wide", "num_warps", "num_stages")


def there(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """A tensor without memory: launches are caught, so nothing reads it."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def pages_of(kv: int, width: int, dtype: torch.dtype, rows: int, span: int) -> Pages:
    store = there(1600, kv, width, dtype=dtype)
    return Pages(store, store, there(rows, span // 16), 16, span)


def attention(op: str, heads: tuple[int, int, int], dtype: torch.dtype, new: int, *more: Any, **sizes: int) -> None:
    """Of `new` nodes of a tree or positions of a prompt: plain, and if asked for in a layer with a window, soft caps
    and sinks, which no model has all."""
    (kv, groups, width), rows, span = heads, sizes.get("rows", 2), sizes.get("span", 4096)
    q, pages = there(rows, new, kv * groups, width, dtype=dtype).transpose(1, 2), pages_of(kv, width, dtype, rows, span)
    masks = {
        "attend_causal": (),
        "attend_tree": (there(rows, new, new, dtype=torch.bool), there(rows, new)),
        "attend_paths": (there(rows, *more, 33), there(rows, new)),  # one path: a prompt's queries share it
    }
    if not sizes.get("windowed"):
        getattr(OPS, op)(q, pages, there(rows), *masks[op], Scoring(0.1))
    if sizes.get("windowed") or op == "attend_paths":
        scoring = Scoring(0.1, 128, 50.0, there(kv * groups, dtype=dtype))
        getattr(OPS, op)(q, pages, there(rows), *masks[op], scoring)


def ragged_prompts(heads: tuple[int, int, int], dtype: torch.dtype, new: int) -> None:
    """Two prompts of several lengths, of at most `new` positions."""
    kv, groups, width = heads
    q, pages = there(1, new + 9, kv * groups, width, dtype=dtype).transpose(1, 2), pages_of(kv, width, dtype, 2, 4096)
    OPS.attend_causal(q, pages, there(2), Scoring(0.1), there(3), new)


def product(width: int, size: int, dtype: torch.dtype) -> None:
    OPS.product(there(32, width, dtype=dtype), there(size, width, dtype=dtype), there(size, dtype=dtype))


def training(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    kv, groups, width = heads
    q, k = there(2, kv * groups, 2048, width, dtype=dtype), there(2, kv, 2048, width, dtype=dtype)
    triton_attention.attend(q, k, k)
    lse = there(2, kv * groups, 2048, dtype=FP32)
    triton_attention.attend_backward(q, q, k, k, q, lse)
    triton_attention.merge(q, q, lse, [k], [k])
    triton_attention.merge_backward(q, q, [k], [k], q, lse, q.float())


def losses(vocabulary: int, dtype: torch.dtype) -> None:
    scores, probs = there(64, vocabulary, dtype=dtype), there(64, vocabulary, dtype=FP32)
    for name in triton_loss.KINDS:
        triton_loss.score_rows(name, scores, probs, there(64), there(64), there(64, dtype=FP32), ETA)


def trees(k: int, steps: int, nodes: int) -> None:
    """What a tree takes beside attention."""
    count, sees = k + (steps - 1) * k * k, there(2, k, 1 + steps * k, dtype=torch.bool)
    found = Candidates.empty(2, count, torch.device("meta"))
    beams = Beams(*(there(2, k) for _ in range(3)), there(2, k, dtype=FP32), sees)
    for one in (beams, beams._replace(sees=None)):
        OPS.grow_beams(one, there(2, k, k, dtype=FP32), there(2, k, k), there(32000), found, k, None, k, 1 + k)
    OPS.rank_candidates(there(2), found.tokens, found.parents, found.scores, (nodes, nodes), steps)
    ids, mask = there(2, nodes), there(2, nodes, nodes, dtype=torch.bool)
    OPS.follow_choices(ids, ids, ids, mask, mask[:, 0], ids, steps + 1)


def entries(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    kv, groups, width = heads
    pages, new = pages_of(kv, width, dtype, 2, 4096), there(2, 8, kv, width, dtype=dtype)
    OPS.write_kv(pages, new, new, there(2), 1)
    OPS.compact([pages.keys], [pages.values], pages.table, 16, there(2), there(2, 9), there(2))
    q, turn = there(16, kv * groups, width, dtype=dtype), there(16, 1, width, dtype=dtype)
    OPS.rotate(q, q[:, :kv], turn, turn)
    OPS.gated(there(16, 14336, dtype=dtype), there(16, 14336, dtype=dtype))
    OPS.rms_norm(there(16, 8192, dtype=dtype), there(8192, dtype=dtype), 1e-6, 0.0, True)


def fused_layer(rows: int, dtype: torch.dtype) -> None:
    """What a fused layer of Llama-3.1-8B takes beside attention, and a product of a float8 head."""
    x, joined = there(rows, 4096, dtype=dtype), there(1, rows, 6144, dtype=dtype)
    OPS.linear(x, there(6144, 4096, dtype=dtype), None, None)
    if dtype == BF16:
        skinny_product(x, there(6144, 4096, dtype=dtype), pdl=True)
    OPS.linear(x, there(4096, 4096, dtype=dtype), None, x)
    OPS.gated_linear(x, there(28672, 4096, dtype=dtype))
    OPS.scaled_product(x, there(32000, 4096, dtype=torch.float8_e4m3fn), there(32000, dtype=FP32))
    turn, pages = there(1, rows, 128, dtype=dtype), pages_of(8, 128, dtype, 1, 4096)
    OPS.rotate_joined(joined, turn, turn, (32, 8), None, pages, there(1), 0)


def attention_cases() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Name, dtype and launches."""
    for model, heads in MODELS.items():
        trees_of, prompts = SIZES[model]
        for name, dtype in DTYPES.items():
            for nodes in trees_of:
                yield f"{model}, {nodes} nodes", name, partial(attention, "attend_tree", heads, dtype, nodes)
            for new in prompts:
                yield f"{model}, {new} new", name, partial(attention, "attend_causal", heads, dtype, new)
                yield f"{model}, prompts of {new}", name, partial(ragged_prompts, heads, dtype, new)
            for paths in (1, 32):
                yield f"{model}, {paths} paths", name, partial(attention, "attend_paths", heads, dtype, 32, paths)
            if heads[2] > 64:
                yield f"{model}, training", name, partial(training, heads, dtype)
            if model == "Llama-3.1-8B":
                for op in ("attend_tree", "attend_causal"):
                    windowed = partial(attention, op, heads, dtype, 32, windowed=True)
                    yield f"{model}, window and soft cap of {op}", name, windowed
                for sizes in ({"rows": 1, "span": 131072}, {"rows": 16384}):
                    yield f"{model}, {sizes}", name, partial(attention, "attend_tree", heads, dtype, 1, **sizes)


def other_cases() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    vocabulary = 128256
    for name, dtype in DTYPES.items():
        for size in (4096, 14336, vocabulary):
            yield f"product of 4096 by {size}", name, partial(product, 4096, size, dtype)
        yield "entries and layers of Llama-3.1-8B", name, partial(entries, MODELS["Llama-3.1-8B"], dtype)
        for rows in (4, 32):
            yield f"a fused layer of Llama-3.1-8B, {rows} rows", name, partial(fused_layer, rows, dtype)
        logits = there(4, vocabulary, dtype=dtype)
        yield f"{vocabulary} tokens", name, partial(OPS.argmax, logits)
        yield f"best 10 of {vocabulary}", name, partial(OPS.top_log_probs, logits, 10)
        yield f"loss over {vocabulary}", name, partial(losses, vocabulary, dtype)
    for k, steps, nodes in ((8, 7, 32), (10, 7, 64)):
        yield f"tree {steps},{k},{nodes}", "fp32", partial(trees, k, steps, nodes)
    yield "uniform numbers", "fp64", partial(OPS.uniform, there(4, 1), there(4, 8))
    cuts = there(4), there(4, dtype=FP64), there(4, dtype=FP32)
    yield f"cuts of {vocabulary}", "fp32", partial(OPS.least_kept, there(4, vocabulary, dtype=FP32), *cuts)
    yield f"draw of {vocabulary}", "fp32", partial(OPS.draw, there(4, vocabulary, dtype=FP32), there(4, dtype=FP64))


def compiled(launch: Launch, capability: int, done: set[str]) -> dict[str, Any] | None:
    """Compile what the launch would run on sm_<capability> down to machine code. Returns its tile, the bytes of
    registers that a thread stores to memory, and of shared memory that a block takes; None for a variant of `done`."""
    kernel, target = launch.kernel, GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, options = bind(*launch.given, **launch.named)  # by Triton's own rules, which read the values
    names, values = list(bound), list(bound.values())
    types = {name: kind for name, (kind, _) in zip(names, kinds, strict=True)}
    constants = {place: values[place] for place, (kind, _) in enumerate(kinds) if kind == "constexpr"}
    divisible = {(place,): backend.parse_attr(key) for place, (_, key) in enumerate(kinds) if isinstance(key, str)}
    variant = repr((kernel.__name__, types, constants, divisible, options))
    if variant in done:
        return None
    done.add(variant)
    knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = True, True
    source = ASTSource(kernel, types, {(place,): value for place, value in constants.items()}, divisible)
    with redirect_stdout(io.StringIO()) as log:
        made = triton.compile(source, target=target, options=options)
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", log.getvalue())]
    assert spilled and made.asm["cubin"], f"ptxas said nothing of {kernel.__name__}: {log.getvalue()}"
    named = {kernel.arg_names[place]: value for place, value in constants.items()} | options
    tile = {name: named[name] for name in CONSTANTS if name in named}
    return {"kernel": kernel.__name__, "tile": tile, "spilled": sum(spilled), "shared": made.metadata.shared}


def found(capability: int, dots: bool) -> Iterator[dict[str, Any]]:
    """Each variant once: what it was launched for, its tile, and what ptxas says."""
    done: set[str] = set()
    for case, dtype, run in (*attention_cases(), *([] if dots else other_cases())):
        launches.clear()
        run()
        for launch in launches:
            assert max(launch.grid[1:], default=0) <= MOST_PROGRAMS, f"{case}: {launch.kernel.__name__}{launch.grid}"
            if (one := compiled(launch, capability, done)) is not None:
                yield {"dtype": dtype, "case": case} | one
    assert dots or launched == KERNELS.keys(), f"no case for {', '.join(KERNELS.keys() - launched)}"


if __name__ == "__main__":
    for one in found(int(sys.argv[1]), dots="dots" in sys.argv):
        print(json.dumps(one), flush=True)
