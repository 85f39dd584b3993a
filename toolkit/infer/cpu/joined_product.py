"""One product for linear layers that read the same input: q, k and v; gate and up.

One large product takes less time than several small ones. Only weights in blocks are joined (blocked_product.py).
torch.compile traces the layers one by one: each has its own blocks, a view of the joined ones.

Shapes: K inputs, N outputs of a layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from toolkit.infer.cpu.blocked_product import blocked_product, traceable_product
from toolkit.targets.fixed_linear import FixedLinear

# Layers of one module that its forward calls with the same tensor, the first one first.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class BlockedLinear(FixedLinear):
    """A linear layer whose weight lies in blocks if `blocked` is true.

    joined: the product that this layer is part of, if any; rows: the layer's outputs in it.
    """

    blocked: bool
    joined: JoinedProduct | None = None
    rows = slice(0)

    @abstractmethod
    def blocks(self) -> tuple[Tensor, Tensor | None]:
        """The weight as of `to_blocks`, and the scale [N] float32 of int8 weights."""

    def blocked_product(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N]; of a layer whose weight lies in blocks."""
        if self.joined is None or torch.compiler.is_compiling():
            return traceable_product(inputs, *self.blocks(), self.bias, self.out_features)
        product = self.joined.product(inputs, self.rows)
        if product is None:
            return blocked_product(inputs, *self.blocks(), self.bias, self.out_features)
        return product[..., self.rows]


class JoinedProduct:
    """The product of all `layers` with one input. The first layer computes it, the others take their outputs from it.

    The input is recognised by its identity. A layer with another input computes its own product. So two threads that
    share a model may compute a product twice, but never take each other's.
    """

    def __init__(self, layers: Sequence[BlockedLinear]) -> None:
        own = [layer.blocks() for layer in layers]
        self._blocks = torch.cat([blocks for blocks, _ in own])
        scales = [scale for _, scale in own if scale is not None]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self._scale = torch.cat(scales) if scales else None
        self._bias = torch.cat(biases) if biases else None
        self._outputs = sum(layer.out_features for layer in layers)
        self._known: tuple[Tensor, Tensor] | None = None  # an input and its product
        block = row = 0
        for layer, (blocks, _) in zip(layers, own, strict=True):
            blocks.data = self._blocks[block : block + len(blocks)]
            layer.joined, layer.rows = self, slice(row, row + layer.out_features)
            block, row = block + len(blocks), row + layer.out_features

    def product(self, inputs: Tensor, rows: slice) -> Tensor | None:
        """inputs [..., K] -> [..., N of all layers], for the layer of these `rows`; None if it must multiply itself."""
        known = self._known  # read once: another thread may replace it
        if rows.start == 0:
            product = blocked_product(inputs, self._blocks, self._scale, self._bias, self._outputs)
            self._known = (inputs, product)
            return product
        if known is None or known[0] is not inputs:
            return None
        if rows.stop == self._outputs:
            self._known = None  # of a long prompt it is megabytes
        return known[1]


def join_products(model: nn.Module) -> None:
    """Join the layers of SAME_INPUT in every module of `model` that has them with blocks of one kind."""
    for parent in model.modules():
        for names in SAME_INPUT:
            layers = [getattr(parent, name, None) for name in names]
            joinable = [layer for layer in layers if isinstance(layer, BlockedLinear) and _fills_blocks(layer)]
            kinds = {(type(layer), layer.in_features, layer.bias is None) for layer in joinable}
            if len(joinable) == len(names) and len(kinds) == 1:
                JoinedProduct(joinable)


def _fills_blocks(layer: BlockedLinear) -> bool:
    """Whether the weight lies in whole blocks, without rows of padding at the end."""
    return layer.blocked and layer.joined is None and layer.out_features % layer.blocks()[0].shape[2] == 0
