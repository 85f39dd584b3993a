"""The only file that imports infer/cpu/: what its native code replaces in an engine, a target and a draft head.

Without infer/cpu/ this file would load targets as `targets.load` does, refuse quantisations, and pack nothing.
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
from toolkit.infer.cpu import blocked_product
from toolkit.infer.cpu.attention import row_attention
from toolkit.infer.cpu.packed_linear import pack_linears
from toolkit.infer.cpu.quantize import QUANTIZATIONS, quantize_head, quantize_model
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.kernels.dispatch import REFERENCE, install
from toolkit.log import get_logger
from toolkit.targets import load
from toolkit.targets.cpu_dtype import fastest_cpu_dtype
from toolkit.targets.errors import TargetError
from toolkit.targets.target import Target

__all__ = ["QUANTIZATIONS", "Use", "install_native_ops", "load_target", "pack"]

logger = get_logger(__name__)

Use = Literal["serving", "rollouts", "training"]


def install_native_ops(device: torch.device) -> None:
    """Attention of few new nodes on a CPU is one call of C++ from now on."""
    if device.type == "cpu":
        install("cpu", replace(REFERENCE, row_attention=row_attention))


def load_target(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    quantization: str | None = None,
    use: Use = "serving",
) -> Target:
    """`targets.load.load_target`, quantised, and in the dtype that is fastest for its use.

    quantization: "int8" or "int4" rounds the linear layers to one byte or half a byte a weight (CPU); the model that
    results is the target.

    dtype "auto" is bfloat16 where the config says so, else float32. On a CPU it also depends on the products that
    `use` makes. "serving" multiplies few rows and keeps the config's dtype. "training" multiplies many rows by torch's
    products, in float32 where this CPU multiplies it faster. "rollouts" does so too where our own products of bfloat16
    are missing; with them, which a packed target multiplies by, it keeps the config's dtype.

    Raises TargetError.
    """
    if use not in get_args(Use):
        raise TargetError(f"`use` is {use!r}; one of {', '.join(get_args(Use))} is needed")
    on_cpu = torch.device(device).type == "cpu"
    auto = partial(_auto_dtype, use=use if on_cpu else "serving", quantization=quantization)
    target = load.load_target(name, dtype=dtype, device=device, revision=revision, auto_dtype=auto)
    if quantization is None:
        return target
    assert target.dtype is not None, "a loaded target has a dtype"
    quantize_model(target.model, quantization, target.dtype, str(name))
    return replace(target, quantization=quantization)


def _auto_dtype(config: PretrainedConfig, use: Use, quantization: str | None) -> torch.dtype:
    if quantization == "int4":  # its products in float32 are slow
        return torch.bfloat16
    if load.stated_dtype(config) == torch.float32:
        return torch.float32
    if use == "serving" or quantization is not None or (use == "rollouts" and blocked_product.available()):
        return torch.bfloat16
    return fastest_cpu_dtype()


def pack(target: Target, draft: Draft | None = None, draft_quantization: str = "auto") -> None:
    """For decoding on a CPU: linear layers keep their weights in the order that products of few rows read fastest.

    The models then only compute: they can no longer be trained, copied, saved, or brought to another dtype. The draft
    has the target's dtype and device. draft_quantization: "int8" for one byte a weight of a head, "none", or "auto":
    int8 if the target is quantised or our own products multiply the head. (They multiply int8 weights as exactly as
    others, and a draft step mostly reads weights: the demo's head drafts as well, in four fifths of the time.)

    Raises TargetError for a head that cannot be quantised.
    """
    on_cpu = target.device.type == "cpu"
    if on_cpu and target.quantization is None:
        pack_linears(target.model, tied=target.embed_tokens.weight)
    if not isinstance(draft, DraftCheckpoint):
        return
    auto_int8 = target.quantization is not None or _multiplied_by_ours(draft.head)
    if draft_quantization == "int8" or (draft_quantization == "auto" and auto_int8):
        quantize_head(draft.head)
        logger.info("the draft head has int8 weights; `draft_quantization` none keeps it whole")
    elif on_cpu:
        pack_linears(draft.head)


def _multiplied_by_ours(head: nn.Module) -> bool:
    linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
    return all(one.weight.device.type == "cpu" and blocked_product.takes(one.weight) for one in linears)
