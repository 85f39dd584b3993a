"""The RMS norms of a target as one kernel each: transformers computes them in six operations, in bf16 in eight.

A class of norms is recognised by what it computes: `reference.rms_norm` in one of its forms, to the bit, on random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.infer.kernels import reference
from toolkit.infer.kernels.dispatch import ops_for

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
FORMS = ((0.0, True), (1.0, False), (0.0, False))  # offset and rounded of `reference.rms_norm`: Llama, Gemma, others
SAMPLES = 64
Form = tuple[str, float, bool]  # name of the epsilon, offset, rounded
_looked_at: dict[type, Form | None] = {}  # None: the class was not changed


def fuse_norms(body: nn.Module, device: torch.device) -> None:
    """Let the norms of the body's classes run by the device's kernel, if it has one, where no gradients are recorded.

    The classes are changed, not each norm, so that a copy of a model is one of its class.
    """
    if ops_for(device.type).rms_norm is reference.rms_norm:
        return
    for module in body.modules():
        kind = type(module)
        if kind not in _looked_at and kind.__name__.endswith("RMSNorm") and kind is not nn.RMSNorm:
            form = _looked_at[kind] = _form_of(module)
            if form is not None:
                setattr(kind, "forward", _fused(kind.forward, *form))  # noqa: B010 (mypy refuses the assignment)


def is_fused(norm: nn.Module) -> bool:
    """Whether this norm runs by the device's kernel, which computes each row by itself."""
    return fused_form(norm) is not None


def fused_form(norm: nn.Module) -> Form | None:
    """The form of a norm that runs by the device's kernel; None for others."""
    return None if norm._parameters.get("weight") is None else _looked_at.get(type(norm))


def _form_of(module: nn.Module) -> Form | None:
    """Return the name of the norm's epsilon, and the form that it computes; None if it computes something else."""
    eps = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    own = dict(module.named_parameters())
    if eps is None or list(own) != ["weight"] or own["weight"].dim() != 1:
        return None
    weight, generator = own["weight"], torch.Generator().manual_seed(0)
    trial, x = (
        torch.randn(*shape, generator=generator).to(weight.device, weight.dtype)
        for shape in (weight.shape, (SAMPLES, len(weight)))
    )
    with torch.no_grad():
        out = torch.func.functional_call(module, {"weight": trial}, (x,))
        for offset, rounded in FORMS:
            if torch.equal(out, reference.rms_norm(x, trial, getattr(module, eps), offset, rounded)):
                return eps, offset, rounded
    return None


def _fused(own: Callable[..., Tensor], eps: str, offset: float, rounded: bool) -> Callable[..., Tensor]:
    def forward(module: Any, *given: Any, **named: Any) -> Tensor:
        weight = module._parameters.get("weight")  # None: of another form than the norm that was looked at
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or weight is None or named or len(given) > 1:
            return own(module, *given, **named)
        x, norm = given[0], ops_for(weight.device.type).rms_norm
        if norm is reference.rms_norm or x.dtype != weight.dtype:
            return own(module, x)
        return norm(x, weight, getattr(module, eps), offset, rounded)

    return forward
