"""Linear layers whose weight has the memory order that this CPU's matrix products read.

A product of few rows (a decoding step, the nodes of a draft tree) spends much of its time on reordering the weight.
Packing reorders it once. bfloat16 weights get the blocks of our native product if this machine has it
(blocked_product.py). oneDNN packs all others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.infer.cpu.blocked_product import BlockedLinear, from_blocks, join_products, takes, to_blocks
from toolkit.log import get_logger

log = get_logger(__name__)

# Rounding error of a sum of a few thousand terms, relative to the largest result.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class PackedLinear(BlockedLinear):
    """`nn.Linear` for inference on a CPU; `weight` is unpacked at every call.

    packed: the weight that the product reads. dense: the unpacked weight, kept only if it is tied to the embedding.
    """

    packed: Tensor

    def __init__(self, linear: nn.Linear, *, keep_dense: bool = False) -> None:
        super().__init__(linear)
        self.dense = linear.weight if keep_dense else None
        self.blocked = takes(linear.weight)
        self.register_buffer("packed", _pack(linear.weight, blocked=self.blocked), persistent=False)

    @property
    def weight(self) -> Tensor:
        if self.dense is not None:
            return self.dense
        return from_blocks(self.own_blocks(), self.out_features) if self.blocked else self.packed.to_dense()

    @property
    def blocks(self) -> Tensor:
        return self.packed

    def hold(self, blocks: Tensor) -> None:
        self.packed = blocks

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
            self.set_blocks(packed)
        else:  # tensors in oneDNN's order cannot be copied into
            self.packed = packed

    def like(self, linear: nn.Linear) -> nn.Module:
        return _packed_or_own(linear)


@torch.no_grad()
def pack_linears(model: nn.Module, tied: Tensor | None = None) -> int:
    """Replaces linear layers of `model` by packed ones, if they are on a CPU and have a dtype of TOLERANCE.

    Returns how many. `tied`: a weight that stays in memory in any case (the token embedding's). A layer is not replaced
    if PyTorch cannot pack it, or if its packed product is wrong.
    """
    count = 0
    for path, module in list(model.named_modules()):
        # Subclasses may do more than multiply. A head's OutputMatrix receives the product as an argument: it can be
        # packed.
        plain = type(module) is nn.Linear or getattr(module, "takes_product", False)
        if not plain or not isinstance(module, nn.Linear):
            continue
        packed = _packed_or_own(module, tied is not None and module.weight.data_ptr() == tied.data_ptr())
        if packed is module:
            continue
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, packed)
        count += 1
    join_products(model)
    return count


def _packed_or_own(linear: nn.Linear, keep_dense: bool = False) -> nn.Module:
    """The packed layer; `linear` itself if it cannot be packed, or if its packed product is wrong."""
    if not _packs(linear.weight):
        return linear
    packed = PackedLinear(linear, keep_dense=keep_dense)
    x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight.dtype)
    expected, got = F.linear(x, linear.weight, linear.bias).float(), packed(x).float()
    allowed = TOLERANCE[linear.weight.dtype] * float(expected.abs().max())
    if not bool(((expected - got).abs() <= allowed).all()):
        log.warning("a linear layer (%s) is not packed: its packed product is wrong", packed.extra_repr())
        return linear
    return packed


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _packs(weight: Tensor) -> bool:
    if not _available() or weight.device.type != "cpu" or weight.dtype not in TOLERANCE:
        return False
    return weight.dtype == torch.float32 or takes(weight) or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(weight: Tensor, *, blocked: bool) -> Tensor:
    if blocked:
        return to_blocks(weight)
    # No batch size is given: packing for one row is slow for more rows.
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
