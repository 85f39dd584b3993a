"""Linear layers whose weight lies as this CPU's matrix products read it.

A product of few rows (a decoding step, the nodes of a draft tree) spends much of its time bringing the weight into that
order, every time anew. It can be kept so: bfloat16 in the blocks of our own product where this machine can have that
(blocked_product.py), all else as oneDNN packs it, which torch multiplies with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.infer.cpu.blocked_product import from_blocks, is_blocked, takes, to_blocks, traceable_product
from toolkit.infer.cpu.joined_linear import JoinedLinear, biases_of, join, same_input_layers
from toolkit.log import get_logger

log = get_logger(__name__)

# Rounding of a sum over a few thousand products, relative to the largest result.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class PackedLinear(JoinedLinear):
    """`nn.Linear` for inference on a CPU; `weight` is unpacked when somebody asks for it.

    `packed`: what the product reads, maybe the weights of several layers, of `outputs` rows together. `dense`: the
    weight as it was, where it takes no memory of its own (an output matrix tied to the embedding).
    """

    packed: torch.Tensor
    joint_bias: torch.Tensor | None  # of all that lies in `packed`

    def __init__(self, linear: nn.Linear, *, keep_dense: bool = False) -> None:
        super().__init__(linear)
        self.dense = linear.weight if keep_dense else None
        self.hold(_pack(linear.weight), self.bias, self.out_features)

    def hold(self, packed: torch.Tensor, joint_bias: torch.Tensor | None, outputs: int) -> None:
        """Multiply by this weight from now on, of which some rows are its own."""
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("joint_bias", joint_bias, persistent=False)
        self.outputs = outputs

    @property
    def weight(self) -> torch.Tensor:
        """[N, K], in the order of rows that everybody else knows."""
        return _unpack(self.packed, self.outputs)[self.rows] if self.dense is None else self.dense

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        return packed_product(inputs, self.packed, self.joint_bias, self.outputs)

    def forward(self, x: torch.Tensor, project: Callable[[torch.Tensor, torch.Tensor], Any] = F.linear) -> Any:
        """[..., K] -> [..., N]; a product that is handed in gets the plain weight (see `OutputMatrix`)."""
        return super().forward(x) if project is F.linear else project(x, self.weight)


def pack_together(layers: Sequence[PackedLinear]) -> None:
    """Layers that read the same input, in one packed weight; they stay as they are where its product differs."""
    weight, bias = torch.cat([layer.weight for layer in layers]), biases_of(layers)
    packed, outputs = _pack(weight), len(weight)
    x = _probe(weight)
    if not _near(torch.cat([layer(x) for layer in layers], dim=-1), packed_product(x, packed, bias, outputs)):
        log.warning("packed products of %d layers differ from their joint one; they stay apart", len(layers))
        return
    for layer in layers:
        layer.hold(packed, bias, outputs)
    join(layers)


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """x [..., in], packed of `outputs` rows [out, in], bias [out] -> [..., out]."""
    if is_blocked(packed):
        return traceable_product(x, packed, None, bias, outputs)
    # Traced under a name of ours, see `infer/compiled/packed_products.py`.
    product = torch.ops.toolkit.packed_product if torch.compiler.is_exporting() else onednn_product
    return product(x, packed, bias)


def onednn_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in], packed [out, in] in oneDNN's own order, bias [out] -> [..., out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define("packed_product(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.impl("packed_product", onednn_product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit::packed_product", lambda x, packed, _bias: x.new_empty(*x.shape[:-1], packed.shape[0])
)


@torch.no_grad()
def pack_linears(model: nn.Module, tied: torch.Tensor | None = None) -> int:
    """Replaces the linear layers of `model`, on a CPU and in one of TOLERANCE's dtypes, by packed ones.

    Returns how many. `tied`: a weight that stays in memory whatever happens (the token embedding's). A layer whose
    packed product is not what its own was stays as it is, as does all of a model where torch has no such products.
    """
    if not _available():
        return 0
    count = 0
    for path, module in list(model.named_modules()):
        # Subclasses may do more than multiply; a head's output matrix says that it takes its product from outside.
        plain = type(module) is nn.Linear or getattr(module, "takes_product", False)
        if not plain or not isinstance(module, nn.Linear) or not _packs(module.weight):
            continue
        packed = PackedLinear(module, keep_dense=tied is not None and module.weight.data_ptr() == tied.data_ptr())
        if not _same_product(module, packed):
            log.warning("%s: its packed product differs from its own; it stays as it was", path)
            continue
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, packed)
        count += 1
    for parent_module in model.modules():
        for layers in same_input_layers(parent_module, PackedLinear):
            pack_together(layers)
    return count


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in TOLERANCE:
        return False
    return weight.dtype == torch.float32 or takes(weight) or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(weight: torch.Tensor) -> torch.Tensor:
    if takes(weight):
        return to_blocks(weight)
    # No number of rows is named: what is best for one row is slow for the others.
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)


def _unpack(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    return from_blocks(packed, outputs) if is_blocked(packed) else packed.to_dense()


def _same_product(linear: nn.Linear, packed: PackedLinear) -> bool:
    x = _probe(linear.weight)
    return _near(F.linear(x, linear.weight, linear.bias), packed(x))


def _probe(weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)


def _near(expected: torch.Tensor, got: torch.Tensor) -> bool:
    allowed = TOLERANCE[got.dtype] * float(expected.float().abs().max())
    return bool(((expected.float() - got.float()).abs() <= allowed).all())
