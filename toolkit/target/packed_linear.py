"""Linear layers whose weight lies as this CPU's matrix products read it.

A product of few rows (a decoding step, the nodes of a draft tree) spends much of its time bringing the weight into that
order, every time anew. oneDNN, which torch multiplies with, can keep it so.

A product of many rows (a prompt, the trees of a batch) of a bfloat16 model is made in float32 where this CPU multiplies
that faster and has memory for a second copy of the weights. It is the same function: products of two bfloat16 numbers
are exact in float32, both kinds add them up in float32, and both round a sum to bfloat16 once. So it differs from the
bfloat16 product as one batch size does from another: by the order of the additions, which near-ties may show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.log import get_logger
from toolkit.memory import usable_memory
from toolkit.target.cpu_dtype import float32_speedup
from toolkit.target.shared_input import JoinedLinear, biases_of, join, same_input_layers

log = get_logger(__name__)

# Rounding of a sum over a few thousand products, relative to the largest result.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# From so many rows on float32 products pay (measured where they are 1.55 times as fast: the two cross at 32 to 64 rows,
# with the conversions of input and result), from such a speedup on, and up to such a share of the memory in each model.
MANY_ROWS = 64
LEAST_SPEEDUP = 1.25
MOST_MEMORY = 1 / 8


class PackedLinear(JoinedLinear):
    """`nn.Linear` for inference on a CPU; `weight` is unpacked when somebody asks for it.

    `packed`: [N, K] in oneDNN's own order. `dense`: the weight as it was, where it takes no memory of its own (an
    output matrix tied to the embedding). `packed_float32`: the same again for products of MANY_ROWS rows, if at all.
    """

    packed: torch.Tensor
    joint_bias: torch.Tensor | None  # of all that lies in `packed`
    packed_float32: torch.Tensor | None

    def __init__(self, linear: nn.Linear, *, keep_dense: bool = False) -> None:
        super().__init__(linear)
        self.dense = linear.weight if keep_dense else None
        self.hold(_pack(linear.weight), self.bias)

    def hold(self, packed: torch.Tensor, joint_bias: torch.Tensor | None) -> None:
        """Multiply by this weight from now on, of which some rows are its own."""
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("joint_bias", joint_bias, persistent=False)
        self.register_buffer("packed_float32", None, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """[N, K], in the order of rows that everybody else knows."""
        return self.packed.to_dense()[self.rows] if self.dense is None else self.dense

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        # Traced under a name of ours, see `infer/compiled/packed_products.py`.
        product = torch.ops.toolkit.packed_product if torch.compiler.is_exporting() else packed_product
        if self.packed_float32 is None or not _many(math.prod(inputs.shape[:-1])):
            return product(inputs, self.packed, self.joint_bias)
        bias = None if self.joint_bias is None else self.joint_bias.float()
        return product(inputs.float(), self.packed_float32, bias).to(inputs.dtype)

    def forward(self, x: torch.Tensor, project: Callable[[torch.Tensor, torch.Tensor], Any] = F.linear) -> Any:
        """[..., K] -> [..., N]; a product that is handed in gets the plain weight (see `OutputMatrix`)."""
        return super().forward(x) if project is F.linear else project(x, self.weight)


def pack_together(layers: Sequence[PackedLinear]) -> None:
    """Layers that read the same input, in one packed weight; they stay as they are where its product differs."""
    packed, bias = _pack(torch.cat([layer.weight for layer in layers])), biases_of(layers)
    x = _probe(layers[0].in_features, packed.dtype)
    if not _near(torch.cat([layer(x) for layer in layers], dim=-1), packed_product(x, packed, bias)):
        log.warning("packed products of %d layers differ from their joint one; they stay apart", len(layers))
        return
    for layer in layers:
        layer.hold(packed, bias)
    join(layers)


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in], packed [out, in], bias [out] -> [..., out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define("packed_product(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.impl("packed_product", packed_product, "CompositeExplicitAutograd")
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
    hold_float32([module for module in model.modules() if isinstance(module, PackedLinear)])
    return count


def hold_float32(layers: Sequence[PackedLinear]) -> None:
    """Products of many rows in float32 from now on, where that pays here and all of these bfloat16 layers have room:
    one model's, of which each (target, head) may take MOST_MEMORY for itself."""
    layers = [layer for layer in layers if layer.packed.dtype == torch.bfloat16]
    needed = 4 * sum({id(layer.packed): layer.packed.numel() for layer in layers}.values())
    if not layers or (speedup := float32_speedup()) < LEAST_SPEEDUP:
        return
    if needed > MOST_MEMORY * usable_memory():
        log.info("no float32 products for prompts: a second copy of the weights would take %.1f GB", needed / 1e9)
        return
    made: dict[int, torch.Tensor | None] = {}
    for layer in layers:
        if id(layer.packed) not in made:
            made[id(layer.packed)] = _float32_of(layer)
        layer.packed_float32 = made[id(layer.packed)]
    taken = 4 * sum(wide.numel() for wide in made.values() if wide is not None)
    if taken:
        log.info(
            "products of %d rows and more in float32, %.1f times as fast here; that takes %.0f MB", MANY_ROWS, speedup,
            taken / 1e6,
        )  # fmt: skip


def _float32_of(layer: PackedLinear) -> torch.Tensor | None:
    """None where its product is another one."""
    wide = _pack(layer.packed.to_dense(torch.float32))
    x = _probe(layer.in_features, torch.bfloat16)
    if _near(packed_product(x, layer.packed, None), packed_product(x.float(), wide, None).bfloat16()):
        return wide
    log.warning("a float32 product of %d features differs from its bfloat16 one; it is not taken", layer.in_features)
    return None


def _many(rows: int) -> bool:
    """Traced for a range of rows: whether all of it is many."""
    if not torch.compiler.is_exporting():
        return rows >= MANY_ROWS
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy, which only tracing needs

    return statically_known_true(rows >= MANY_ROWS)


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in TOLERANCE:
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(weight: torch.Tensor) -> torch.Tensor:
    # No number of rows is named: what is best for one row is slow for the others.
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)


def _same_product(linear: nn.Linear, packed: PackedLinear) -> bool:
    x = _probe(linear.in_features, linear.weight.dtype)
    return _near(F.linear(x, linear.weight, linear.bias), packed(x))


def _probe(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def _near(expected: torch.Tensor, got: torch.Tensor) -> bool:
    allowed = TOLERANCE[got.dtype] * float(expected.float().abs().max())
    return bool(((expected.float() - got.float()).abs() <= allowed).all())
