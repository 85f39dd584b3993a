"""Fewer bytes per weight: the linear layers of a loaded model, its output matrix too, become int8.

The quantised model is then the target: what it says is what speculative decoding must reproduce. The token embedding
stays as it is, also where the model ties it to the output matrix: a step reads one row of it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.target.errors import TargetError
from toolkit.target.int8_linear import LARGEST, PLANES, Int8Linear, integer_product, planes_of
from toolkit.target.packed_linear import PackedLinear
from toolkit.target.shared_input import SharedInput, same_input_layers

QUANTIZATIONS = ("int8",)
# Of the weights a step reads (all but the token embedding); below that the bytes would hardly change.
LEAST_SHARE = 0.5


def quantize_model(model: PreTrainedModel, quantization: str, dtype: torch.dtype, name: str) -> None:
    """Replaces every `nn.Linear` of `model`, which is on the CPU and in `dtype`, by an `Int8Linear`.

    Raises `TargetError` for an unknown quantization, another device or dtype, a family that keeps most of its weights
    outside of linear layers (GPT-2, mixtures of experts), and a CPU whose integer products are not exact.
    """
    if quantization not in QUANTIZATIONS:
        raise TargetError(f"quantization {quantization!r} came; one of {', '.join(QUANTIZATIONS)} is needed")
    if model.device.type != "cpu" or dtype not in PLANES:
        raise TargetError(
            f"quantization {quantization} is for bfloat16 or float32 on the CPU; {dtype} on {model.device} came. Give "
            "--device cpu, or leave the quantization out"
        )
    embedding = model.get_input_embeddings()
    linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    covered = sum(module.weight.numel() for module in linears.values())
    others = {id(weight): weight for weight in model.parameters()}
    for module in (embedding, *linears.values()):
        others.pop(id(module.weight), None)
    total = covered + sum(weight.numel() for weight in others.values() if weight.dim() > 1)
    if covered < LEAST_SHARE * total:
        raise TargetError(
            f"quantization {quantization} changes linear layers, and they hold only {covered / total:.0%} of the "
            f"weights of {type(model).__name__} ({name}); leave the quantization out for this family"
        )
    check_integer_products()
    for path, module in linears.items():
        parent, _, own = path.rpartition(".")
        setattr(model.get_submodule(parent), own, Int8Linear(module))
    for parent_module in model.modules():
        for layers in same_input_layers(parent_module, Int8Linear):
            shared = SharedInput(len(layers), planes_of)
            for layer in layers:
                layer.shared = shared


def weight_bits(model: PreTrainedModel) -> float:
    """Bits per weight as the model holds them, over the weights of the published model (tied ones counted once).

    An output matrix that was tied before it was quantised takes memory of its own, and counts.
    """
    held, weights = 0, 0
    for weight in model.parameters():
        held, weights = held + weight.nbytes, weights + weight.numel()
    for module in model.modules():
        if isinstance(module, Int8Linear):
            held, weights = held + module.qweight.nbytes + module.scale.nbytes, weights + module.qweight.numel()
        elif isinstance(module, PackedLinear) and module.dense is None:
            count = module.in_features * module.out_features  # its packed weight may be that of others too
            held, weights = held + count * module.packed.element_size(), weights + count
    head = model.get_output_embeddings()
    if isinstance(head, Int8Linear) and getattr(model.config, "tie_word_embeddings", False):
        weights -= head.qweight.numel()
    return 8 * held / weights


def check_integer_products() -> None:
    """Raises `TargetError` where products of int8 matrices are wrong: some kernels add in 16 bits and saturate."""
    width, outputs = 576, 48
    qweight = torch.full((outputs, width), LARGEST, dtype=torch.int8)
    qweight[1::2] = -LARGEST
    for count in (1, 5, 17, 64):
        rows = torch.ones(count, width)
        rows[:, ::7] = -0.25
        exact = rows.double() @ qweight.double().T
        ours = integer_product(rows, qweight, torch.ones(outputs)).double()
        if not torch.allclose(ours, exact, rtol=1e-5):
            raise TargetError(
                "products of int8 matrices are not exact on this CPU with this PyTorch (no VNNI instructions?); leave "
                "the quantization out"
            )
