"""Linear layers with one byte per weight, int8 with a scale per output row and inputs in full precision, and targets
and draft heads that are quantised to such layers.

The result of a layer is that of a float layer whose weight is `levels * scale`. bfloat16 layers use our native product
if this machine has it (blocked_product.py), others PyTorch's int8 product, which torchao calls too. That one takes
milliseconds a row in float32, so float32 layers multiply by the levels in float32, a part of them at a time. With all
three, a row's result does not depend on the number of rows.

The quantised model is then the target: speculative decoding must reproduce its tokens. The token embedding is not
rounded, even if the model ties it to the output matrix: a step reads only a few of its rows.

Shapes: M rows, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from toolkit.errors import TargetError
from toolkit.infer.cpu.blocked_product import BlockedLinear, from_blocks, join_products, takes, to_blocks
from toolkit.infer.kernels.batch_invariant import product

DTYPES = (torch.bfloat16, torch.float32)
LARGEST = 127
SMALLEST = 1e-30
BFLOAT16_MULTIPLE = 16  # PyTorch's bfloat16 kernel reads past the row's end if K is not a multiple
PART = 2**18  # levels that are in float32 at once: they stay in the CPU's cache


class Int8Linear(BlockedLinear):
    """Replaces an `nn.Linear` of bfloat16 or float32 on the CPU: weight is rounded to levels [N, K] * scale [N].

    blocked: the levels are in blocks, and scale is float32, with values that are exact in the layer's dtype. Raises
    ValueError for other dtypes.
    """

    quantization = "int8"
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        if weight.dtype not in DTYPES:
            raise ValueError(f"a linear layer of {weight.dtype} was given; bfloat16 or float32 is needed")
        self.blocked, self._dtype = takes(weight), weight.dtype
        packed, scale = self._rounded(weight)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def _rounded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """packed and scale of a weight [N, K] of the layer's dtype."""
        full = weight.float()
        # Round the scale to the dtype first, so that both kernels use the same scale.
        scale = (full.abs().amax(dim=1) / LARGEST).clamp_min(SMALLEST).to(self._dtype)
        levels = (full / scale.float()[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        return (to_blocks(levels), scale.float()) if self.blocked else (levels, scale)

    @property
    def levels(self) -> Tensor:
        """The int8 weight [N, K], out of blocks."""
        return from_blocks(self.packed, self.out_features) if self.blocked else self.packed

    @property
    def weight(self) -> Tensor:
        return self.levels.to(self._dtype) * self.scale.to(self._dtype)[:, None]

    def nbytes(self) -> int:
        return self.out_features * (self.in_features + self.scale.element_size())

    def product(self, inputs: Tensor) -> Tensor:
        if self.blocked:
            return self.blocked_product(inputs)
        out = int8_product(inputs.reshape(-1, self.in_features), self.packed, self.scale)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*inputs.shape[:-1], self.out_features)

    def set_weight(self, weight: Tensor) -> None:
        packed, scale = self._rounded(weight.to(self._dtype))
        self.scale.copy_(scale)
        self.packed.copy_(packed)

    def like(self, linear: nn.Linear) -> nn.Module:
        return Int8Linear(linear)


def int8_product(rows: Tensor, levels: Tensor, scale: Tensor) -> Tensor:
    """rows [M, K] of a dtype of DTYPES, levels [N, K] int8, scale [N] -> rows @ (levels * scale).T [M, N]."""
    if rows.dtype == torch.bfloat16 and rows.shape[1] % BFLOAT16_MULTIPLE:
        return F.linear(rows, levels.to(rows.dtype) * scale[:, None])
    if rows.dtype == torch.float32:
        parts = levels.split(max(1, PART // rows.shape[1]))
        return torch.cat([product(rows, part.float(), None) for part in parts], dim=1) * scale
    return torch._weight_int8pack_mm(rows.contiguous(), levels, scale)


QUANTIZATIONS = ("int8",)
# The least share of linear layers in the weights that a step reads (all but the token embedding). With less,
# quantisation would save little memory.
LEAST_SHARE = 0.5


def quantize_model(model: PreTrainedModel, quantization: str, dtype: torch.dtype, name: str) -> None:
    """Replaces every `nn.Linear` of `model`, which is on the CPU and in `dtype`, by an `Int8Linear`.

    Raises `TargetError` for an unknown quantization, another device or dtype, a family with most of its weights outside
    linear layers (GPT-2, mixtures of experts).
    """
    if quantization not in QUANTIZATIONS:
        raise TargetError(f"`quantization` is {quantization!r}; one of {', '.join(QUANTIZATIONS)} is needed")
    if model.device.type != "cpu" or dtype not in DTYPES:
        raise TargetError(
            f"`quantization` {quantization} is for bfloat16 or float32 on the CPU, and the target is {dtype} on "
            f"{model.device}; set `device` to cpu, or leave the quantization out"
        )
    embedding = model.get_input_embeddings()
    # Subclasses may do more than multiply. A layer with two paths stays one layer.
    linears = {
        path: module for path, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear
    }
    covered = sum(module.weight.numel() for module in set(linears.values()))
    others = {id(weight): weight for weight in model.parameters()}
    for module in (embedding, *linears.values()):
        others.pop(id(module.weight), None)
    total = covered + sum(weight.numel() for weight in others.values() if weight.dim() > 1)
    if covered < LEAST_SHARE * total:
        raise TargetError(
            f"quantization {quantization} changes linear layers, and they hold only {covered / total:.0%} of the "
            f"weights of {type(model).__name__} ({name}); leave the quantization out for this family"
        )
    _replace(model, linears)


def quantize_head(head: nn.Module) -> None:
    """Replaces every linear layer of a draft head, which is on the CPU, by an `Int8Linear`.

    The drafts change a little; the answers do not. Raises `TargetError` for another device or dtype.
    """
    weight = next(head.parameters())
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        raise TargetError(
            f"int8 draft heads are for bfloat16 or float32 on the CPU, and the head is {weight.dtype} on "
            f"{weight.device}; set `device` to cpu, or `draft_quantization` to none"
        )
    _replace(head, {path: module for path, module in head.named_modules() if isinstance(module, nn.Linear)})


def _replace(model: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
    """Replaces the layers at these paths by int8 layers."""
    small = {module: Int8Linear(module) for module in linears.values()}
    for path, module in linears.items():
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, small[module])
    join_products(model)
