"""The small operations between the products of a head's layers. The functions here define them.

Training, and serving on a CPU, run these functions. Serving on a GPU hands in kernels by `using`.

Shapes: T tokens, hd head dim, I intermediate size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding to q [T, heads, hd] and k [T, kv_heads, hd]; cos and sin [T, 1, hd]."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The product of SwiGLU (arXiv 2002.05202): silu(gate) * up, [T, I] each."""
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467) of x [..., H] by weight [H]."""
    return F.rms_norm(x, weight.shape, weight, eps)


class LayerOps(NamedTuple):
    """The functions of this module, or kernels that compute the same without gradients."""

    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    gated: Callable[[Tensor, Tensor], Tensor] = gated
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm


PLAIN = LayerOps()


class RMSNorm(nn.RMSNorm):
    """torch's norm, by the operations that layers use now."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None, "a head states the epsilon of its norms"
        return layer_ops().rms_norm(x, self.weight, self.eps)


class _Current(threading.local):
    """The operations of this thread."""

    ops: LayerOps = PLAIN


_current = _Current()


def layer_ops() -> LayerOps:
    """The operations that layers use now. A compiled layer uses the plain ones, which the compiler fuses."""
    return PLAIN if torch.compiler.is_compiling() else _current.ops


@contextmanager
def using(ops: LayerOps) -> Iterator[None]:
    """Context manager: the layers of this thread use `ops`."""
    before, _current.ops = _current.ops, ops
    try:
        yield
    finally:
        _current.ops = before
