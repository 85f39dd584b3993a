"""What layers are called with, give and ask of attention in a forward by their own code.

Shapes: B rows, N tokens a row, Hq/Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.kernels.reference import attend_causal
from toolkit.infer.request.errors import CompileError
from toolkit.targets.load import Target

Forward = Callable[[str, Tensor, Tensor, Any], Tensor]  # attention's name, input_ids, positions, plan -> hidden


@dataclass
class Noted:
    """One layer's call in a forward of the target's own code: what went in and came out, and what it asked for."""

    hidden: Tensor
    keywords: dict[str, Any]
    out: Tensor
    asked: tuple[Any, ...]


class NotedForward(NamedTuple):
    """ids and positions [B, N], what each layer was called with, what entered the norm behind them, and what the body
    gave [B, N, H]."""

    ids: Tensor
    positions: Tensor
    calls: list[Noted]
    into_norm: Tensor
    last: Tensor


class NotedMetadata:
    """Stands in for a plan: each query sees the tokens before it, and each layer's settings are written down."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [B, Hq, N, D], k and v [B, Hkv, N, D] -> [B, N, Hq, D]."""
        *numbers, sinks = scoring
        self.asked.append((layer, *numbers, None if sinks is None else sinks.tolist()))
        return attend_causal(q, k, v, scaling=scoring.scaling)


def noted_forward(target: Target, run: Forward, rows: int, tokens: int) -> NotedForward:
    """One forward by the layers' own code."""
    layers = list(target.layers)
    calls: list[tuple[Tensor, dict[str, Any], Tensor]] = []

    def noting(layer: nn.Module) -> Callable[..., Tensor]:
        def forward(hidden: Tensor, *others: Any, **keywords: Any) -> Tensor:
            out = type(layer).forward(layer, hidden, *others, **keywords)
            if others or not isinstance(out, Tensor):
                raise CompileError(
                    f"torch_compile: {type(layer).__name__} takes unnamed arguments or gives more than its output, "
                    "which is not known here; leave --torch-compile out for this target"
                )
            calls.append((hidden, {name: value for name, value in keywords.items() if name != "plan"}, out))
            return out

        return forward

    plan = NotedMetadata()
    at = torch.arange(1, tokens + 1, device=target.device).clamp(max=target.max_context - 1).expand(rows, tokens)
    ids = (at + tokens * torch.arange(rows, device=target.device)[:, None]) * 7919 % target.vocab_size
    entered: list[Tensor] = []
    handle = target.final_norm.register_forward_pre_hook(lambda _norm, given: entered.append(given[0]))
    try:
        with forwards(layers, [noting(layer) for layer in layers]):
            last = run("toolkit", ids, at, plan)
    finally:
        handle.remove()
    noted = [Noted(*call, asked) for call, asked in zip(calls, plan.asked, strict=True)]
    return NotedForward(ids, at, noted, entered[-1], last)


@contextmanager
def forwards(layers: list[nn.Module], calls: list[Callable[..., Tensor]]) -> Iterator[None]:
    """The layers run these in place of their own forward."""
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer, call in zip(layers, calls, strict=True):
        layer.__dict__["forward"] = call
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = own
