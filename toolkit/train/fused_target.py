"""A frozen target's layers in the engine's fused form (`fused_layer.py`), around transformers' own attention.

transformers' norms, rotation and gate read and write memory some thirty times a layer: a fifth of the forward's time on
a GPU. Masks are those that transformers made, of a causal, a windowed or a packed row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.infer.attention.fused_layer import FusedLayers, fuse_norms
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.targets.target import Target


class FusedTarget(FusedLayers):
    """Layers that run fused inside `running`: none without the GPU's kernels, and none of a target that is sharded or
    in training, whose weights must stay where they are."""

    def __init__(self, target: Target) -> None:
        moving = any(one.requires_grad for one in target.model.parameters())
        fits = not moving and not isinstance(target.body, FSDPModule) and target.config._attn_implementation == "sdpa"
        if fits:
            fuse_norms(target.body, target.device)
        scaling = {
            at: getattr(getattr(one, "self_attn", None), "scaling", None) for at, one in enumerate(target.layers)
        }
        scorings = {at: Scoring(factor) for at, factor in scaling.items() if fits and isinstance(factor, float)}
        super().__init__(target, scorings, {at: at for at in scaling})
        self._calls = {layer: partial(_run, call, layer.self_attn) for layer, call in self._calls.items()}


@dataclass(frozen=True)
class _OwnAttention:
    """Attention metadata of a layer: its attention in transformers, with the mask of this forward."""

    attention: Any
    mask: Tensor | None

    def attend(self, _layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return sdpa_attention_forward(self.attention, q, k, v, self.mask, scaling=scoring.scaling)[0]


def _run(call: Callable[..., Tensor], attention: Any, states: Tensor, attention_mask: Any, **more: Any) -> Tensor:
    return call(states, attention_metadata=_OwnAttention(attention, attention_mask), **more)
