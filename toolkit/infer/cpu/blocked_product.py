"""Weights in blocks, bfloat16 or int8, and our native product of bfloat16 rows with them (blocked_product.cpp).

Speed against oneDNN with packed weights, on two cores of an Intel Xeon, over all bfloat16 weights of the demo target:
without AMX 1.5 to 1.8 times at 1 to 512 rows; with AMX 1.4 times at 1 to 16 rows, equal at 64 to 1024. With few rows,
reading the weights from memory dominates: with AMX, 16 rows take 1.1 times as long as one. Without AVX-512 (AMD EPYC),
arithmetic dominates from four rows on: 4 rows take 1.2 times as long as one, 6 take 1.4 times, 16 take 3.5 times. On a
CPU with AVX512-BF16 and no AMX (AMD EPYC, one core), its instructions for pairs take about half the time of AVX-512's
for float32 from 16 rows on.

Shapes: M rows, N outputs, K inputs, W outputs per block (WIDTH of blocked_product.cpp).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.infer.cpu.compile_cpp import load_vectorised
from toolkit.log import get_logger

log = get_logger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """None if the CPU lacks AVX2 or FMA, or if the library cannot be compiled."""
    library = load_vectorised(SOURCE)
    if library is not None:
        library.toolkit_blocked_product.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3
        library.toolkit_blocked_product.restype = None
        library.toolkit_together.argtypes = [ctypes.c_int64]
        for function in (library.toolkit_block_width, library.toolkit_uses_tiles, library.toolkit_together):
            function.restype = ctypes.c_int64
        log.debug("native product of bfloat16 rows%s", ", in AMX tiles" if library.toolkit_uses_tiles() else "")
    return library


def available() -> bool:
    """Whether this machine has the native product. The first call may compile the library."""
    return load_library() is not None


def takes(weight: Tensor) -> bool:
    """Whether the native product supports this weight [N, K] or its int8 version."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 4 == 0 and available()


def to_blocks(weight: Tensor) -> Tensor:
    """[N, K] bfloat16 -> [blocks, K/2, W, 2]. int8 -> the same if tiles support it, else [blocks, K, W, 1].

    Rows of zeros fill the last block.
    """
    library = load_library()
    assert library is not None, "takes() was not asked"
    width = library.toolkit_block_width()
    full = F.pad(weight.detach().contiguous(), (0, 0, 0, -weight.shape[0] % width))
    # A pair of bfloat16 inputs is one word of 32 bits.
    together = 2 if weight.dtype == torch.bfloat16 else library.toolkit_together(weight.shape[1])
    return full.view(-1, width, weight.shape[1] // together, together).transpose(1, 2).contiguous()


def from_blocks(blocks: Tensor, outputs: int) -> Tensor:
    """Blocks of `to_blocks` -> [N, K]; N is `outputs`."""
    return blocks.transpose(1, 2).reshape(-1, inputs_of(blocks))[:outputs]


def inputs_of(blocks: Tensor) -> int:
    """The number of inputs, K."""
    return blocks.shape[1] * blocks.shape[3]


def blocked_product(x: Tensor, blocks: Tensor, scale: Tensor | None, bias: Tensor | None, outputs: int) -> Tensor:
    """x [..., K] bfloat16, blocks of `to_blocks`, scale [N] float32 (int8 blocks only), bias [N] bfloat16 -> [..., N].

    N is `outputs`. Sums are float32 and are rounded once. Their order depends on K alone, so a row's result does not
    depend on the other rows. Raises ValueError if a dtype or K does not fit.
    """
    library, inputs, x = load_library(), x.shape[-1], x.contiguous()
    if x.dtype != torch.bfloat16 or inputs != inputs_of(blocks) or (scale is not None and scale.dtype != torch.float32):
        raise ValueError(
            f"the rows are of {inputs} {x.dtype}, the scales of {None if scale is None else scale.dtype}; these "
            f"weights take {inputs_of(blocks)} of bfloat16, and scales of float32"
        )
    out = x.new_empty(*x.shape[:-1], outputs)
    if out.numel():
        assert library is not None, "only this library makes blocks"
        scales, biases = (None if one is None else one.data_ptr() for one in (scale, bias))
        library.toolkit_blocked_product(
            x.data_ptr(), blocks.data_ptr(), scales, biases, out.data_ptr(), x.numel() // inputs, outputs, inputs
        )
    return out


_definitions = torch.library.Library("toolkit", "FRAGMENT")
_definitions.define(
    "blocked_product(Tensor x, Tensor blocks, Tensor? scale, Tensor? bias, int outputs) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),  # the product reads contiguous rows
)
_definitions.impl("blocked_product", blocked_product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit::blocked_product", lambda x, _blocks, _scale, _bias, outputs: x.new_empty(*x.shape[:-1], outputs)
)


def traceable_product(x: Tensor, blocks: Tensor, scale: Tensor | None, bias: Tensor | None, outputs: int) -> Tensor:
    """`blocked_product`; while torch.compile traces, it is one operator."""
    if torch.compiler.is_compiling():
        return torch.ops.toolkit.blocked_product(x.contiguous(), blocks, scale, bias, outputs)
    return blocked_product(x, blocks, scale, bias, outputs)
