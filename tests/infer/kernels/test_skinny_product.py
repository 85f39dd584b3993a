"""The product of few rows equals `F.linear` and what follows it, gives a row the same bits beside any other rows, and
compiles without spills.

Run as a program, `python -m tests.infer.kernels.test_skinny_product cpu|cuda|compile`, it prints {case: what is wrong}:
Triton's interpreter is chosen at import.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.program import said_by

PROGRAM = "infer.kernels.test_skinny_product"
SHARED = 232448  # bytes of shared memory that a program can have


@dataclass(frozen=True)
class Case:
    size: int
    width: int
    rows: int
    tile: tuple[int, int, int] | None = None  # outputs, inputs, parts; the shape's own by default
    gated: bool = False
    residual: bool = False
    fp8: bool = False
    pdl: bool = False


SMALL = (
    Case(70, 100, 1, (32, 32, 1), residual=True),  # a tail of outputs, and of inputs
    Case(32, 84, 32, (16, 32, 2), residual=True),
    Case(16, 208, 16, (16, 64, 3)),  # the last part is shorter
    Case(44, 100, 16, (32, 32, 2), gated=True),
    Case(40, 64, 2, (16, 32, 1), gated=True, fp8=True),
    Case(38, 100, 3, (32, 32, 2), fp8=True),
    Case(34, 256, 3),
)
LARGE = tuple(
    Case(*shape, rows, fp8=fp8, pdl=pdl, gated=shape[0] == 28672, residual=shape[0] == 4096)
    for shape in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (32000, 4096), (4096, 12288))
    for rows, fp8, pdl in ((1, False, False), (4, False, True), (16, True, True), (32, False, False))
)


def truncated(x: Tensor) -> Tensor:
    """fp32 as Triton's interpreter converts it to bfloat16."""
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def tensors(case: Case, device: str) -> dict[str, Tensor | None]:
    random = torch.empty if device == "meta" else torch.randn
    weight = random(case.size, case.width, device=device) * case.width**-0.5
    scales = None
    if case.fp8:
        scales = weight.abs().amax(1) / 448
        weight /= scales[:, None]
    return {
        "x": random(case.rows, case.width, device=device).bfloat16(),
        "weight": weight.to(torch.float8_e4m3fn if case.fp8 else torch.bfloat16),
        "residual": random(case.rows, case.size, device=device).bfloat16() if case.residual else None,
        "scales": scales,
    }


def wrong(case: Case, device: str) -> str:
    """What is wrong with a case; empty if nothing is."""
    from toolkit.infer.kernels.triton.skinny_product import Tile, skinny_product

    given = tensors(case, device)
    x, weight, residual, scales = (given[name] for name in ("x", "weight", "residual", "scales"))
    assert x is not None and weight is not None
    named = {"gated": case.gated, "pdl": case.pdl, "tile": None if case.tile is None else Tile(*case.tile)}

    def own(first: int, end: int) -> Tensor:
        part = None if residual is None else residual[first:end]
        return skinny_product(x[first:end], weight, residual=part, scales=scales, **named)

    to_bf16 = truncated if device == "cpu" else Tensor.bfloat16
    wanted = to_bf16(linear(x.float(), weight.float() if scales is None else weight.float() * scales[:, None]))
    if case.gated:
        gate, up = wanted.float().chunk(2, -1)
        wanted = to_bf16(to_bf16(gate / (1 + torch.exp(-gate)) if device == "cpu" else silu(gate)).float() * up)
    if residual is not None:
        wanted = to_bf16(wanted.float() + residual.float())
    got = own(0, case.rows)
    near, differ = (
        (got.float() - wanted.float()).abs().max() / wanted.float().abs().max(),
        (got != wanted).float().mean(),
    )
    if not (near < 0.01 and differ < 0.03):  # sums in another order round to another number now and then
        return f"{near:.3g} of the largest away, {differ:.2%} differ"
    if not torch.equal(got, own(0, case.rows)):
        return "a second launch differs"
    alone = torch.cat([own(row, row + 1) for row in range(min(3, case.rows))])
    return "" if torch.equal(got[:3], alone) else "a row has other bits alone"


def compiled() -> dict[str, str]:
    from tests.infer.kernels.compiled import Launch, catch_launches, compile_variant, variant

    launches: list[Launch] = []
    catch_launches(launches)
    from toolkit.infer.kernels.triton.skinny_product import skinny_product

    found = {}
    for case in LARGE:
        x, weight, residual, scales = tensors(case, "meta").values()
        skinny_product(x, weight, residual=residual, scales=scales, gated=case.gated, pdl=case.pdl)
        made = compile_variant(variant(launches.pop(), 90), 90)
        found[str(case)] = "" if not made.spilled and made.shared <= SHARED else str(made)
    return found


def test_equals_linear_and_a_row_does_not_depend_on_others() -> None:
    assert not {case: found for case, found in said_by(PROGRAM, "cpu", interpreted=True).items() if found}


@pytest.mark.compile
def test_compiles_for_a_hopper_without_spills() -> None:
    assert not {case: found for case, found in said_by(PROGRAM, "compile").items() if found}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_equals_linear_on_a_gpu() -> None:
    assert not {case: found for case, found in said_by(PROGRAM, "cuda").items() if found}


if __name__ == "__main__":
    torch.manual_seed(0)
    what = sys.argv[1]
    cases = SMALL if what == "cpu" else LARGE
    print(json.dumps(compiled() if what == "compile" else {str(case): wrong(case, what) for case in cases}))
