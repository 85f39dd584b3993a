"""How Inductor compiles products with packed weights: as the call of oneDNN that the eager layer makes.

Inductor knows that product for weights it packed itself, as constants of one program. Here a weight is an input, so
that one program serves all layers; a packed tensor goes through a program as an opaque handle.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import toolkit.target.packed_linear  # noqa: F401  (defines the operator)


def stand_in(tensor: Tensor) -> Tensor:
    """What a weight is traced with: an empty plain tensor [out, in] for a packed one, others as they are."""
    return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_mkldnn else tensor


def merge_products(module: GraphModule) -> None:
    """Makes one product of those that read the same input and the same weight (see `JoinedLinear`), and one of each
    operation on the way to it."""
    first: dict[str, Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not _is_pure(node.target):
            continue
        own = first.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if own is not node:
            node.replace_all_uses_with(own)
            module.graph.erase_node(node)
    module.recompile()


def _is_pure(target: Any) -> bool:
    """Whether equal arguments give an equal result that nobody writes to."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


@cache
def teach_inductor() -> None:
    """Registers the lowering of `toolkit::packed_product`, once in a process."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.mkldnn_ir import LinearUnary

    def lower(x: Any, packed: Any, bias: Any) -> Any:
        return TensorBox.create(LinearUnary.create(x, packed, bias, "none", [], ""))

    register_lowering(torch.ops.toolkit.packed_product, type_promotion_kind=None)(lower)
