"""Makes a target's modules batch-invariant: a token's row has the same bits whatever rows are computed beside it.

Modules get a subclass of their own class, in place, so that a copy of a model is one of its class:

    linear layers     unless their product is batch-invariant already, blocks of a fixed number of rows
    activations       vectors that no two rows share
    rotary positions  a table, computed in blocks of positions that are counted from 0
    soft cap          of the logits, as activations

Norms, additions and products of two numbers are computed by row, or are exact to the bit anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.infer.kernels.batch_invariant import in_lanes, in_row_blocks
from toolkit.infer.request.errors import UnsupportedTargetError
from toolkit.targets.fixed_linear import FixedLinear
from toolkit.targets.target import Target

ACTIVATIONS = "transformers.activations"  # all are elementwise
ELEMENTWISE = (nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Mish)  # of torch; ReLU computes nothing that is rounded
POSITIONS = 64  # positions whose angles are computed at once


def make_batch_invariant(target: Target, positions: int) -> None:
    """Change the modules of `target`. positions: those that the engine uses.

    Raises UnsupportedTargetError for a matrix outside of linear layers and embeddings, as mixtures of experts have.
    """
    for path, module in target.model.named_modules():
        kind = type(module)
        if getattr(kind, "changed_by", None) in (_product, _activation):  # an earlier engine's
            continue
        if isinstance(module, (nn.Linear, FixedLinear)) or kind.__name__ == "Conv1D":
            if not getattr(module, "batch_invariant", False):
                module.__class__ = _changed(kind, _product)
        elif isinstance(module, ELEMENTWISE) or kind.__module__ == ACTIVATIONS:
            module.__class__ = _changed(kind, _activation)
        elif kind.__name__.endswith("RotaryEmbedding"):
            module.__class__ = _changed(kind, _angles)
            module.positions, module.tables = positions, {}
        elif not isinstance(module, nn.Embedding) and any(own.dim() > 1 for own in module.parameters(recurse=False)):
            raise UnsupportedTargetError(
                f"`deterministic` is set, and {path} ({kind.__name__}) has a matrix that is no linear layer's, as "
                "mixtures of experts and convolutions have; its products may depend on the number of rows: leave "
                "`deterministic` out, or use a target of another family"
            )
    target.tanh = partial(in_lanes, torch.tanh)


def depends_on_threads(target: Target) -> bool:
    """Whether products of a batch-invariant target come from a library, whose sums may depend on the threads."""
    return any(getattr(type(module), "changed_by", None) is _product for module in target.model.modules())


@functools.cache
def _subclass(kind: type, forward: Callable[..., Any]) -> type:
    own = getattr(kind, "forward")  # noqa: B009 (mypy knows no forward of a type)
    return type(f"BatchInvariant{kind.__name__}", (kind,), {"forward": forward(own), "changed_by": forward})


def _changed(kind: type, forward: Callable[..., Any]) -> type:
    """`kind` with this forward; itself if it has that already."""
    return kind if hasattr(kind, "changed_by") else _subclass(kind, forward)


def _product(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(module: Any, inputs: Tensor, *more: Any) -> Tensor:
        return own(module, inputs, *more) if more else in_row_blocks(partial(own, module), inputs)

    return forward


def _activation(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(module: Any, inputs: Tensor) -> Tensor:
        return in_lanes(partial(own, module), inputs)

    return forward


def _angles(own: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    def forward(module: Any, x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> tuple[Tensor, ...]:
        if position_ids.dim() != 2:
            raise UnsupportedTargetError(
                f"`deterministic` is set, and {type(module).__name__} takes positions {tuple(position_ids.shape)}; "
                "[rows, tokens] is needed: leave `deterministic` out, or use a target of another family"
            )
        key = x.dtype, more, tuple(sorted(named.items()))
        if key not in module.tables:
            at = torch.arange(module.positions + -module.positions % POSITIONS).clamp(max=module.positions - 1)
            with torch.inference_mode(False), torch.no_grad():  # a training may use the target too
                like = torch.empty(0, dtype=x.dtype)
                parts = [own(module, like, block[None], *more, **named) for block in at.split(POSITIONS)]
                module.tables[key] = tuple(torch.cat(some, dim=1)[0] for some in zip(*parts, strict=True))
        return tuple(table[position_ids] for table in module.tables[key])

    return forward
