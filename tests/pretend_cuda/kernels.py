"""The package's GPU kernels on a pretended device: launched for the count, computed by their reference.

A Triton kernel's wrapper runs as on a GPU, with its allocations and copies. The launch itself is noted, and does
nothing. The reference then gives the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction

from tests.pretend_cuda.containers import mapped, tensors_in
from tests.pretend_cuda.device import CudaTensor, numbers_of, record
from tests.pretend_cuda.seen import MixedDevicesError, caller, seen
from toolkit.infer.kernels import dispatch
from toolkit.train import causal_attention, triton_attention, triton_loss, ttt
from toolkit.train.causal_attention import gpu_kernels
from toolkit.train.loss import ROW_LOSSES


def stand_in(reference: Callable[..., Any], kernel: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that launches `kernel` and returns what `reference` computes; kernel None: one kernel of torch."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        # Autograd knows the backward of torch's own functions only as it runs them.
        differentiable = kernel is None and torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        if differentiable or not any(isinstance(one, CudaTensor) for one in tensors):
            return reference(*args, **kwargs)
        if kernel is not None:
            kernel(*args, **kwargs)
        else:
            _check_arguments(reference.__name__, tensors)
            seen.launch(reference.__name__)
        return on_numbers(reference, args, kwargs)

    return run


def on_numbers(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function of tensors as one operation of the device."""
    args, kwargs = mapped((args, kwargs), numbers_of)

    def run() -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return function(*args, **kwargs)

    out = run()
    record(lambda: list(tensors_in(run())), list(tensors_in(out)))
    return mapped(out, lambda one: CudaTensor(one) if isinstance(one, Tensor) else one)


def _check_arguments(name: str, tensors: Iterable[Tensor]) -> None:
    if any(not isinstance(one, CudaTensor) for one in tensors):
        raise MixedDevicesError(f"{name} was given a tensor of the host at {caller()}")


def _launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of JITFunction.run: note the launch."""
    _check_arguments(kernel.__name__, tensors_in((args, kwargs)))
    if not warmup:
        seen.launch(kernel.__name__)
        seen.move(*tensors_in((args, kwargs)))


def _ops() -> dispatch.Ops:
    """Every op of the GPU, by its reference."""
    real, chosen = dispatch.triton_ops(), {}
    for name in (one.name for one in dataclasses.fields(real)):
        reference, kernel = getattr(dispatch.REFERENCE, name), getattr(real, name)
        chosen[name] = stand_in(reference, kernel) if callable(reference) else kernel
    return dispatch.Ops(**chosen)


@contextmanager
def standing_in() -> Iterator[None]:
    """Replace kernels of the package, and functions of torch that are one kernel on CUDA and several elsewhere."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", _launch))
        stack.enter_context(patch.dict(dispatch._chosen, {"cuda": _ops()}))
        for name in ("scaled_dot_product_attention", "rms_norm"):
            stack.enter_context(patch.object(F, name, stand_in(getattr(F, name))))
        yield


# -- training ----------------------------------------------------------------------------------------------------------


def _scored_rows(
    name: str, scores: Tensor, probs: Tensor, offsets: Tensor, choice: Tensor, weight: Tensor, _eta: float
) -> tuple[Tensor, Tensor]:
    """`score_rows` of triton_loss.py in plain torch: the scores are overwritten with their gradients."""
    top = scores.float().max(-1)
    shifted = scores.float() - top.values[:, None]
    losses = ROW_LOSSES[name](shifted, probs[offsets].float(), choice, weight.float())
    scores.copy_(shifted)
    return losses, top.indices


@contextmanager
def training_on_references() -> Iterator[None]:
    """The same for the kernels of training."""
    references = {
        (triton_attention, "attend"): causal_attention.tiled_forward,
        (triton_attention, "attend_backward"): causal_attention.tiled_backward,
        (triton_loss, "score_rows"): _scored_rows,
        (triton_attention, "merge"): ttt.plain_merge,
        (triton_attention, "merge_backward"): ttt.plain_merge_backward,
    }
    with ExitStack() as stack:
        for (module, name), reference in references.items():
            stack.enter_context(patch.object(module, name, stand_in(reference, getattr(module, name))))
        stack.callback(gpu_kernels.cache_clear)  # it keeps what it chose
        gpu_kernels.cache_clear()
        yield
