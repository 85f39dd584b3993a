"""A head's attention as one opaque operator for torch.compile. It calls the attention stored in this module.

Shapes: T tokens of all rows, Hq/Hkv heads, D head dim.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from toolkit.heads.decoder_layer import Attend, AttendingLayer


class _Drafting(threading.local):
    """The attention of the head's layer that runs in this thread."""

    attend: Attend


drafting = _Drafting()


def drafting_layers(head: nn.Module) -> list[AttendingLayer]:
    """The layers of the head that take their attention as an argument."""
    return [one for one in head.modules() if isinstance(one, AttendingLayer)]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D] -> [T, Hq, D]."""
    return drafting.attend(q, k, v).contiguous()


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define("attend_drafting(Tensor q, Tensor k, Tensor v) -> Tensor")
_library.impl("attend_drafting", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit::attend_drafting", lambda q, _k, _v: q.new_empty(q.shape))
