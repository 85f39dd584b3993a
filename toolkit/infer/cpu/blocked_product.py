"""Weights in blocks, bfloat16 or int8, our native product of bfloat16 rows with them (blocked_product.cpp), and the
linear layers that have such weights.

Speed against oneDNN with packed weights, on two cores of an Intel Xeon, over all bfloat16 weights of the demo target:
without AMX 1.5 to 1.8 times at 1 to 512 rows; with AMX 1.4 times at 1 to 16 rows, equal at 64 to 1024. With few rows,
reading the weights from memory dominates: with AMX, 16 rows take 1.1 times as long as one. Without AVX-512 (AMD EPYC),
arithmetic dominates from four rows on: 4 rows take 1.2 times as long as one, 6 take 1.4 times, 16 take 3.5 times. On a
CPU with AVX512-BF16 and no AMX (AMD EPYC, one core), its instructions for pairs take about half the time of AVX-512's
for float32 from 16 rows on.

Shapes: M rows, N outputs of a layer, K inputs, W outputs per block (WIDTH of blocked_product.cpp).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.infer.cpu.compile_cpp import load_cpp
from toolkit.log import get_logger
from toolkit.targets.fixed_linear import FixedLinear

log = get_logger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """None if the CPU lacks AVX2 or FMA, or if the library cannot be compiled."""
    library = load_cpp(SOURCE)
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


class BlockedLinear(FixedLinear):
    """A linear layer whose weight is in blocks if `blocked` is true.

    packed: the weight as the product reads it. scale: of each output, [N] float32, of int8 blocks. joined: the product
    that this layer is part of, if any; then packed, scale and bias are views of its tensors.
    """

    blocked: bool
    packed: Tensor
    scale: Tensor | None
    joined: Joined | None = None

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        return self.blocked

    def blocked_product(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N]; only if the weight is in blocks."""
        return blocked_product(inputs, self.packed, self.scale, self.bias, self.out_features)


@dataclass(frozen=True)
class Joined:
    """The blocks of layers with the same input, one after another: one product has the outputs of all."""

    blocks: Tensor
    scale: Tensor | None
    bias: Tensor | None
    outputs: int

    def blocked_product(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., outputs]."""
        return blocked_product(inputs, self.blocks, self.scale, self.bias, self.outputs)


# Layers of one module that its forward calls with the same tensor.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join_products(model: nn.Module) -> None:
    """Lay the weights of SAME_INPUT side by side in every module of `model`, if their blocks are of one kind: a native
    layer (decoder_layer.py) then has one product for all of them."""
    for parent in model.modules():
        for names in SAME_INPUT:
            layers = [getattr(parent, name, None) for name in names]
            joinable = [layer for layer in layers if isinstance(layer, BlockedLinear) and _fills_blocks(layer)]
            kinds = {(type(layer), layer.in_features, layer.bias is None) for layer in joinable}
            if len(joinable) == len(names) and len(kinds) == 1:
                _join(joinable)


def _fills_blocks(layer: BlockedLinear) -> bool:
    """Whether the weight fills its blocks, without rows of padding at the end."""
    return layer.blocked and layer.joined is None and layer.out_features % layer.packed.shape[2] == 0


def _join(layers: Sequence[BlockedLinear]) -> None:
    blocks = torch.cat([layer.packed for layer in layers])
    scales = [layer.scale for layer in layers if layer.scale is not None]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    scale, bias = (torch.cat(parts) if parts else None for parts in (scales, biases))
    joined = Joined(blocks, scale, bias, sum(layer.out_features for layer in layers))
    first = 0
    for layer in layers:
        rows, width = slice(first, first + layer.out_features), blocks.shape[2]
        layer.joined, layer.packed = joined, blocks[rows.start // width : rows.stop // width]
        if scale is not None:
            layer.scale = scale[rows]
        if bias is not None:
            layer.bias = nn.Parameter(bias[rows], requires_grad=False)
        first = rows.stop
