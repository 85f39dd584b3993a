"""The only file that imports infer/cpu/: installs its native code in an engine, a target and a draft head.

Without infer/cpu/ this file would call `targets.load`, refuse quantisation, and pack nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn
from transformers import PretrainedConfig

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.errors import TargetError
from toolkit.infer.cpu import attention, blocked_product, decoder_layer, sampling
from toolkit.infer.cpu.int8_linear import QUANTIZATIONS, quantize_head, quantize_model
from toolkit.infer.cpu.packed_linear import pack_linears
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.kernels import float8_linear
from toolkit.infer.kernels.dispatch import REFERENCE, install
from toolkit.log import get_logger
from toolkit.targets import load
from toolkit.targets.cache import fastest_cpu_dtype
from toolkit.targets.target import Target

__all__ = ["QUANTIZATIONS", "Use", "install_native_ops", "load_target", "pack"]

logger = get_logger(__name__)

Use = Literal["serving", "rollouts", "training"]


def install_native_ops(device: torch.device) -> None:
    """Install the C++ attention for few new nodes, decoder layers and cuts of a distribution if the device is a CPU."""
    if device.type == "cpu":
        layers = {name: getattr(decoder_layer, name) for name in ("decoder_layer", "head_layer", "head_norm")}
        native = {"row_attention": attention.row_attention, "least_kept": sampling.least_kept, **layers}
        install("cpu", replace(REFERENCE, **native))


def load_target(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    quantization: str | None = None,
    use: Use = "serving",
    runs_on: str | torch.device | None = None,
    chat_template: str | None = None,
) -> Target:
    """Load a target with `targets.load.read_target`, quantise it, and choose the fastest dtype for its use.

    quantization: "int8" stores the linear layers in one byte per weight (CPU). The quantised model is the target.
    chat_template: see `choose_template`. runs_on: the device that the target will be moved to, for which the dtype is
    chosen; None: `device`.

    dtype "auto" is bfloat16 if the config says so, on a GPU also if it says float16, else float32. On a CPU it also
    depends on `use`. "serving" has matmuls of few rows and keeps the config's dtype. "training" has matmuls of many
    rows in torch, and uses float32 if this CPU computes it faster. "rollouts" does the same if our bfloat16 kernels are
    not available. With these kernels, which a packed target uses, it keeps the config's dtype.

    Raises TargetError.
    """
    if use not in get_args(Use):
        raise TargetError(f"`use` is {use!r}; one of {', '.join(get_args(Use))} is needed")
    kind = torch.device(device if runs_on is None else runs_on).type
    if dtype == "float16" and kind == "cpu":
        raise TargetError(
            "dtype is float16 and the device is cpu, where float16 is slow; give float32, which holds every float16 "
            "number, bfloat16, or a GPU"
        )
    auto = partial(_auto_dtype, kind, use, quantization)
    options = {"dtype": dtype, "device": device, "revision": revision, "chat_template": chat_template}
    target = load.read_target(name, auto_dtype=auto, **options)  # type: ignore[arg-type]
    if quantization is None:
        return target
    quantize_model(target.model, quantization, target.dtype, str(name))
    return replace(target, quantization=quantization)


def _auto_dtype(device_type: str, use: Use, quantization: str | None, config: PretrainedConfig) -> torch.dtype:
    stated = load.stated_dtype(config, device_type)
    if stated == torch.float32 or device_type != "cpu":
        return stated
    if use == "serving" or quantization is not None or (use == "rollouts" and blocked_product.available()):
        return torch.bfloat16
    return fastest_cpu_dtype()


def pack(target: Target, draft: Draft | None = None, draft_quantization: str = "auto") -> None:
    """Pack the weights of linear layers for decoding; on a CPU in the order that matmuls of few rows read fastest.

    Packed models are for inference only: they cannot be trained, copied, saved or cast. The draft has the target's
    dtype and device. draft_quantization: "int8" (CPU) or "fp8" (GPU) for one byte per weight of a head, "none", or
    "auto": fp8 on a GPU that has it, int8 if the target is quantised or our kernels run the head. Our kernels are as
    exact with such weights as with others, and reading weights dominates a draft step: on a CPU the demo's head keeps
    its acceptance and takes four fifths of the time.

    Raises TargetError for a head that cannot be quantised.
    """
    on_cpu = target.device.type == "cpu"
    if on_cpu and target.quantization is None:
        pack_linears(target.model, tied=target.embed_tokens.weight)
    if not isinstance(draft, DraftCheckpoint):
        return
    float8, bf16 = float8_linear.takes(target.device), target.dtype == torch.bfloat16
    if draft_quantization == "fp8" and not float8:
        raise TargetError(
            f"`draft_quantization` is fp8, and {target.device} has no kernels for it (compute capability 8.9 and "
            "Triton are needed); leave it out, or give none"
        )
    if draft_quantization == "fp8" or (draft_quantization == "auto" and float8 and bf16):
        float8_linear.to_float8(draft.head)
        logger.debug("the weights of the draft head are float8 (draft quantization 'none' keeps its dtype)")
        return
    auto_int8 = target.quantization is not None or _multiplied_by_ours(draft.head)
    if draft_quantization == "int8" or (draft_quantization == "auto" and auto_int8):
        quantize_head(draft.head)
        logger.debug("the weights of the draft head are int8 (draft quantization 'none' keeps its dtype)")
    elif on_cpu:
        pack_linears(draft.head)


def _multiplied_by_ours(head: nn.Module) -> bool:
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    return all(one.weight.device.type == "cpu" and blocked_product.takes(one.weight) for one in linears)
