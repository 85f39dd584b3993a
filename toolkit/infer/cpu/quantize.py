"""Quantises linear layers of a loaded model or of a draft head to int8.

The quantised model is then the target: speculative decoding must reproduce its tokens. The token embedding is not
rounded, even if the model ties it to the output matrix: a step reads only a few of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import TargetError
from toolkit.infer.cpu.int8_linear import DTYPES, Int8Linear
from toolkit.infer.cpu.joined_product import join_products

QUANTIZATIONS = ("int8",)
# The least share of linear layers in the weights that a step reads (all but the token embedding). With less,
# quantisation would save little memory.
LEAST_SHARE = 0.5


def quantize_model(model: PreTrainedModel, quantization: str, dtype: torch.dtype, name: str) -> None:
    """Replaces every `nn.Linear` of `model`, which is on the CPU and in `dtype`, by an `Int8Linear`.

    Raises `TargetError` for an unknown quantization, another device or dtype, a family with most of its weights outside
    linear layers (GPT-2, mixtures of experts), and a CPU whose products with int8 weights are wrong.
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
    check_int8_products(next(iter(linears.values())).weight.dtype)
    small = {module: Int8Linear(module) for module in linears.values()}
    for path, module in linears.items():
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, small[module])
    join_products(model)


def check_int8_products(dtype: torch.dtype) -> None:
    """Raises `TargetError` if products with int8 weights are wrong on this CPU with this PyTorch."""
    layer = nn.Linear(96, 48, bias=False, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(torch.linspace(-1, 1, 48 * 96).sin().view(48, 96))
    quantised = Int8Linear(layer)
    rows = torch.linspace(0.5, -1, 5 * 96).view(5, 96).to(dtype)
    exact = rows.double() @ (quantised.levels.double() * quantised.scale.double()[:, None]).T
    allowed = 1e-4 if dtype == torch.float32 else 1e-2
    if not bool((quantised(rows).double() - exact).norm() <= allowed * exact.norm()):
        raise TargetError(
            f"products with int8 weights are wrong on this CPU with PyTorch {torch.__version__}; leave the "
            "quantization out"
        )
