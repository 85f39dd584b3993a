"""How Inductor compiles products with packed weights: as the call that the eager layer makes, without Python.

Inductor knows oneDNN's product for weights it packed itself, as constants of one program. Here a weight is an input, so
that one program serves all layers; a packed tensor goes through a program as an opaque handle. Our own product is a
function of C, which a program calls by its name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import toolkit.infer.cpu.packed_linear  # noqa: F401  (defines the operators)
from toolkit.infer.attention import opaque_attention
from toolkit.infer.cpu.blocked_product import OPERATOR

# As Inductor makes it of the operator: tensors by handle, an optional one by the address of one, the result behind.
C_FUNCTIONS = {
    torch.ops.toolkit.blocked_product.default: [
        f"AOTITorchError {OPERATOR}(AtenTensorHandle x, AtenTensorHandle blocks, AtenTensorHandle* scale, "
        "AtenTensorHandle* bias, int64_t outputs, AtenTensorHandle* result)"
    ],
    torch.ops.toolkit.attend.default: [opaque_attention.C_FUNCTION],
}


def stand_in(tensor: Tensor) -> Tensor:
    """What a weight is traced with: an empty plain tensor [out, in] for a packed one, others as they are."""
    return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_mkldnn else tensor


def merge_products(module: GraphModule) -> None:
    """Makes one product of those that read the same input and the same weight (see `JoinedLinear`), and one of each
    operation on the way to it."""
    first: dict[str, Node] = {}
    for node in list(module.graph.nodes):
        if not _may_be_one(node):
            continue
        own = first.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if own is not node:
            node.replace_all_uses_with(own)
            module.graph.erase_node(node)
    module.recompile()


def _may_be_one(node: Node) -> bool:
    """Whether equal arguments give an equal result: nothing is drawn, and nobody writes to input or output."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if _writes(node) or torch.Tag.nondeterministic_seeded in node.target.tags or not node.all_input_nodes:
        return False
    return not any(_writes(user) for one in (node, *node.all_input_nodes) for user in one.users)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@cache
def teach_inductor() -> None:
    """Registers the lowering of `toolkit::packed_product`, once in a process."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.mkldnn_ir import LinearUnary

    def lower(x: Any, packed: Any, bias: Any) -> Any:
        return TensorBox.create(LinearUnary.create(x, packed, bias, "none", [], ""))

    register_lowering(torch.ops.toolkit.packed_product, type_promotion_kind=None)(lower)
