"""Makes a target's modules batch-invariant: a token's row has the same bits whatever rows are computed beside it.

Modules get a subclass of their own class, in place, so that a copy of a model is one of its class:

    linear layers     on a CPU, unless their product is batch-invariant already, blocks of a fixed number of rows; on a
                      GPU our kernel
    activations       on a CPU vectors that no two rows share; on a GPU torch computes each number by itself
    rotary positions  a table, computed in blocks of positions that are counted from 0
    soft cap          of the logits, as activations

Additions and products of two numbers are exact to the bit anywhere, and norms are computed by row: on a GPU only those
that have a kernel, and torch's LayerNorm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.infer.attention.fused_layer import is_fused
from toolkit.infer.kernels.batch_invariant import in_lanes, in_row_blocks
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.request.params import UnsupportedTargetError
from toolkit.targets.fixed_linear import FixedLinear
from toolkit.targets.target import Target

ACTIVATIONS = "transformers.activations"  # all are elementwise
ELEMENTWISE = (nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Mish)  # of torch; ReLU computes nothing that is rounded
POSITIONS = 64  # positions whose angles are computed at once
ALIGNED = 4  # torch's softmax of a row on a GPU adds by the row's address, unless rows are multiples of 16 bytes


def make_batch_invariant(target: Target, positions: int) -> None:
    """Change the modules of `target`. positions: those that the engine uses.

    Raises UnsupportedTargetError for a matrix outside of linear layers and embeddings, as mixtures of experts have. On
    a GPU also for norms and vocabularies that have no kernel, and without kernels.
    """
    on_gpu = target.device.type != "cpu"
    if on_gpu:
        _check_gpu(target)
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
    target.tanh = torch.tanh if on_gpu else partial(in_lanes, torch.tanh)


def _check_gpu(target: Target) -> None:
    wrong = next(filter(None, (_of_library(*one) for one in target.model.named_modules())), None)
    if not ops_for(target.device.type).has_kernels:
        wrong = "this GPU runs no Triton kernels (one of compute capability 8.0 or later is needed, and triton)"
    elif target.vocab_size % ALIGNED:
        wrong = f"the vocabulary has {target.vocab_size} tokens, and a multiple of {ALIGNED} is needed"
    if wrong is not None:
        raise UnsupportedTargetError(
            f"`deterministic` is set, and {wrong}; bits may then depend on the number of rows: leave `deterministic` "
            "out, or run on a CPU"
        )


def _of_library(path: str, module: nn.Module) -> str | None:
    """What is wrong with a module that a GPU would compute by a program that a library chooses; None: nothing."""
    kind = type(module)
    if isinstance(module, nn.Linear) and getattr(kind, "changed_by", _product) is _product:
        own = next(one for one in kind.__mro__ if not hasattr(one, "changed_by"))
        known = getattr(own, "forward") is nn.Linear.forward  # noqa: B009 (mypy knows no forward of a type)
        return None if known else f"{path} ({own.__name__}) has a product of its own"
    if kind.__name__.endswith("Norm") and not isinstance(module, nn.LayerNorm) and not is_fused(module):
        return f"{path} ({kind.__name__}) is a norm without a kernel"
    return None


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
        if more:
            return own(module, inputs, *more)
        ops = ops_for(inputs.device.type)
        if not ops.has_kernels:
            return in_row_blocks(partial(own, module), inputs)
        weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()  # Conv1D's is [K, N]
        return ops.product(inputs, weight, module.bias)

    return forward


def _activation(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(module: Any, inputs: Tensor) -> Tensor:
        return in_lanes(partial(own, module), inputs) if inputs.device.type == "cpu" else own(module, inputs)

    return forward


def _angles(own: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    def forward(module: Any, x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> tuple[Tensor, ...]:
        if position_ids.dim() != 2:
            raise UnsupportedTargetError(
                f"`deterministic` is set, and {type(module).__name__} takes positions {tuple(position_ids.shape)}; "
                "[rows, tokens] is needed: leave `deterministic` out, or use a target of another family"
            )
        key = x.dtype, x.device, more, tuple(sorted(named.items()))
        if key not in module.tables:
            padded = module.positions + -module.positions % POSITIONS
            with torch.inference_mode(False), torch.no_grad():  # a training may use the target too
                at = torch.arange(padded, device=x.device).clamp(max=module.positions - 1)
                like = torch.empty(0, dtype=x.dtype, device=x.device)
                parts = [own(module, like, block[None], *more, **named) for block in at.split(POSITIONS)]
                module.tables[key] = tuple(torch.cat(some, dim=1)[0] for some in zip(*parts, strict=True))
        return tuple(table[position_ids] for table in module.tables[key])

    return forward
