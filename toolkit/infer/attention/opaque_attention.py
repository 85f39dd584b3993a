"""The engine's attention as compilers see it: one opaque operator, which finds the forward's plan in this module.

So what is compiled depends on the sizes of a layer's input alone, never on context, pages or mask.

Shapes: B rows, N tokens a row, T = B * N, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.attention.layer_attention import LayerCall, register_attention
from toolkit.infer.attention.metadata import AttentionMetadata, TreeMetadata
from toolkit.infer.kernels.paged_reference import Scoring

COMPILED = "toolkit-compiled"  # the name under which transformers finds it


class AttentionCall(ctypes.Structure):
    """What a forward's layers share where C++ attends (layer_runner.cpp, which says what each field is)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attend", "keys", "values", "lengths", "mask")),
        *((name, ctypes.c_int64) for name in ("rows", "new", "nodes", "span", "row_numbers", "bfloat16", "layer")),
    )


class Now(threading.local):
    """The layer that runs in this thread: what the operator cannot be handed through compiled code.

    rows: how many lie side by side in the one row that the layer is handed; 1: they come as they are. call.layer: its
    number, which C++ sets too; where a program has several layers, each call of attention counts on.
    """

    plan: AttentionMetadata
    rows = 1

    def __init__(self) -> None:
        self.call = AttentionCall()
        self._error: BaseException | None = None

    def start(self, plan: AttentionMetadata, rows: int = 1) -> None:
        """A forward begins. Where the plan has one, attention is C++'s, unless a layer asks for more than it does."""
        self.plan, self.rows, self._error = plan, rows, None
        self.call.attend = None
        for name, value in (plan.for_cpp() if isinstance(plan, TreeMetadata) else {}).items():
            setattr(self.call, name, value)

    def stop(self) -> None:
        """No forward runs any more."""
        del self.plan
        self.rows, self.call.attend = 1, None

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Attention that a program calls: C++ hands on no more of an error than its words."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    def take_error(self) -> BaseException | None:
        """What attention raised since it was last asked."""
        error, self._error = self._error, None
        return error


now = Now()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, N, Hq, Dv]; of rows that lie side by side [1, Hq, T,
    D] -> [1, T, Hq, Dv]."""
    rows = now.rows
    if rows > 1:
        q, k, v = (x.view(x.shape[1], rows, -1, x.shape[3]).transpose(0, 1) for x in (q, k, v))
    with now.keeping_errors():
        out = now.plan.attend(now.call.layer, q, k, v, Scoring(scaling, window, softcap, sinks)).contiguous()
    now.call.layer += 1
    return out.view(1, -1, *out.shape[2:]) if rows > 1 else out


def _shape(q: Tensor, k: Tensor, v: Tensor, *_scoring: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


# Programs kept on disk call it by this name and signature.
_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, float scaling, int? window, float? softcap, Tensor? sinks) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit::attend", _shape)
# And as a function of C (layer_runner.cpp), which needs no Python where a forward's attention is C++'s.
C_FUNCTION = (
    "AOTITorchError aoti_torch_cpu_attend(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, double "
    "scaling, int64_t* window, double* softcap, AtenTensorHandle* sinks, AtenTensorHandle* result)"
)


def _opaque(_module: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, _call: LayerCall) -> Tensor:
    return torch.ops.toolkit.attend(q, k, v, *scoring)


register_attention(COMPILED, _opaque)
