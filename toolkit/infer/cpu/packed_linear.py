"""Linear layers whose weight has the memory order that this CPU's matrix products read.

A product of few rows (a decoding step, the nodes of a draft tree) spends much of its time on reordering the weight.
Packing reorders it once. bfloat16 weights get the blocks of our native product if this machine has it
(blocked_product.py). oneDNN packs all others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit.infer.cpu.blocked_product import BlockedLinear, from_blocks, join_products, takes, to_blocks

DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear(BlockedLinear):
    """`nn.Linear` for inference on a CPU; `weight` is unpacked at every call.

    dense: the unpacked weight, kept only if it is tied to the embedding.
    """

    def __init__(self, linear: nn.Linear, *, keep_dense: bool = False) -> None:
        super().__init__(linear)
        self.dense = linear.weight if keep_dense else None
        self.blocked = takes(linear.weight)
        self.register_buffer("packed", _pack(linear.weight, blocked=self.blocked), persistent=False)
        self.register_buffer("scale", None)

    @property
    def weight(self) -> Tensor:
        if self.dense is not None:
            return self.dense
        return from_blocks(self.packed, self.out_features) if self.blocked else self.packed.to_dense()

    def nbytes(self) -> int:
        held = self.in_features * self.out_features * self.packed.element_size()
        return held if self.dense is None else 0

    def product(self, inputs: Tensor) -> Tensor:
        if self.blocked:
            return self.blocked_product(inputs)
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")

    def set_weight(self, weight: Tensor) -> None:
        packed = _pack(weight.to(self.packed.dtype), blocked=self.blocked)
        if self.blocked:
            self.packed.copy_(packed)
        else:  # tensors in oneDNN's order cannot be copied into
            self.packed = packed

    def like(self, linear: nn.Linear) -> nn.Module:
        return PackedLinear(linear)


@torch.no_grad()
def pack_linears(model: nn.Module, tied: Tensor | None = None) -> int:
    """Replaces linear layers of `model` by packed ones, if they are on a CPU and PyTorch can pack them.

    Returns how many. `tied`: a weight that stays in memory in any case (the token embedding's).
    """
    count = 0
    for path, module in list(model.named_modules()):
        # Subclasses may do more than multiply. A head's OutputMatrix receives the product as an argument: it can be
        # packed.
        plain = type(module) is nn.Linear or getattr(module, "takes_product", False)
        if not plain or not isinstance(module, nn.Linear) or not _packs(module.weight):
            continue
        parent, _, own = path.rpartition(".")
        is_tied = tied is not None and module.weight.data_ptr() == tied.data_ptr()
        setattr(model.get_submodule(parent), own, PackedLinear(module, keep_dense=is_tied))
        count += 1
    join_products(model)
    return count


def _packs(weight: Tensor) -> bool:
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not available or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return False
    return weight.dtype == torch.float32 or takes(weight) or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(weight: Tensor, *, blocked: bool) -> Tensor:
    if blocked:
        return to_blocks(weight)
    # No batch size is given: packing for one row is slow for more rows.
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
