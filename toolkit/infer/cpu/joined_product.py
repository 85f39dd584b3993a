"""One product for linear layers that read the same input: q, k and v; gate and up.

One large product takes less time than several small ones. Only weights in blocks can be joined (blocked_product.py).

Shapes: K inputs, N outputs of a layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from toolkit.infer.cpu.blocked_product import blocked_product, traceable_product
from toolkit.targets.fixed_linear import FixedLinear

# Layers of one module that its forward calls with the same tensor, in the order of the calls.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class BlockedLinear(FixedLinear):
    """A linear layer whose weight is in blocks if `blocked` is true.

    joined: the product that this layer is part of, if any; rows: the layer's outputs in it.
    """

    blocked: bool
    joined: JoinedProduct | None = None
    rows = slice(0)

    @property
    @abstractmethod
    def blocks(self) -> Tensor:
        """The blocks of `to_blocks` that hold the weight; with those of the other joined layers, if any."""

    @property
    def block_scale(self) -> Tensor | None:
        """The scale [N] float32 of int8 blocks."""
        return None

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        return self.blocked

    @abstractmethod
    def hold(self, blocks: Tensor) -> None:
        """Take `blocks` as the blocks that hold the weight."""

    def set_blocks(self, blocks: Tensor) -> None:
        """Copy `blocks` into the layer's own blocks, and its scale and bias into the product that it is part of."""
        self.own_blocks().copy_(blocks)
        for joined, own in () if self.joined is None else self.joined.copies(self):
            joined[self.rows] = own

    def own_blocks(self) -> Tensor:
        """The blocks of this layer alone."""
        if self.joined is None:
            return self.blocks
        width = self.blocks.shape[2]
        return self.blocks[self.rows.start // width : self.rows.stop // width]

    def blocked_product(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N]; only if the weight is in blocks."""
        if self.joined is None:
            return traceable_product(inputs, self.blocks, self.block_scale, self.bias, self.out_features)
        product = self.joined(inputs, self.rows)
        if product is None:
            return blocked_product(inputs, self.own_blocks(), self.block_scale, self.bias, self.out_features)
        return product[..., self.rows]


class JoinedProduct:
    """The product of all `layers` with one input. The first layer computes it, the others take their outputs from it.

    The input is recognised by its identity. A layer with another input computes its own product. So two threads that
    share a model may compute a product twice, but never take each other's.
    """

    def __init__(self, layers: Sequence[BlockedLinear]) -> None:
        self.blocks = torch.cat([layer.blocks for layer in layers])
        scales = [layer.block_scale for layer in layers if layer.block_scale is not None]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.scale, self.bias = (torch.cat(parts) if parts else None for parts in (scales, biases))
        self.outputs = 0
        self._known: tuple[Tensor, Tensor] | None = None  # an input and its product
        for layer in layers:
            layer.hold(self.blocks)
            layer.joined, layer.rows = self, slice(self.outputs, self.outputs + layer.out_features)
            self.outputs += layer.out_features

    def copies(self, layer: BlockedLinear) -> list[tuple[Tensor, Tensor]]:
        """The product's scale and bias, each with that of the layer, of which it holds a copy."""
        pairs = ((self.scale, layer.block_scale), (self.bias, layer.bias))
        return [(joined, own) for joined, own in pairs if joined is not None and own is not None]

    def __call__(self, inputs: Tensor, rows: slice) -> Tensor | None:
        """inputs [..., K] -> [..., sum of N], for the layer with these `rows`.

        None: the layer must compute its own product.
        """
        if torch.compiler.is_compiling():  # the compiler merges equal products of the layers
            return traceable_product(inputs, self.blocks, self.scale, self.bias, self.outputs)
        if rows.start == 0:
            product = blocked_product(inputs, self.blocks, self.scale, self.bias, self.outputs)
            self._known = (inputs, product)
            return product
        known = self._known  # read once: another thread may replace it
        if known is None or known[0] is not inputs:
            return None
        if rows.stop == self.outputs:
            self._known = None  # for a long prompt it takes megabytes
        return known[1]


def join_products(model: nn.Module) -> None:
    """Join the layers of SAME_INPUT in every module of `model`, if their blocks are of one kind."""
    for parent in model.modules():
        for names in SAME_INPUT:
            layers = [getattr(parent, name, None) for name in names]
            joinable = [layer for layer in layers if isinstance(layer, BlockedLinear) and _fills_blocks(layer)]
            kinds = {(type(layer), layer.in_features, layer.bias is None) for layer in joinable}
            if len(joinable) == len(names) and len(kinds) == 1:
                JoinedProduct(joinable)


def _fills_blocks(layer: BlockedLinear) -> bool:
    """Whether the weight fills its blocks, without rows of padding at the end."""
    return layer.blocked and layer.joined is None and layer.out_features % layer.blocks.shape[2] == 0


def merge_equal_products(graph: fx.Graph) -> None:
    """Merge equal calls of the operator `toolkit::blocked_product`: layers that share a product each call it."""
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is torch.ops.toolkit.blocked_product.default:
            kept = first.setdefault(node.args, node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
