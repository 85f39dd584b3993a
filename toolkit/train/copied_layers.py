"""A head's decoder layers and norms as copies of the target's, as far as their parts fit.

Shapes: H hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from toolkit.models.decoder_layer import DecoderLayer
from toolkit.models.eagle3 import DraftLayer
from toolkit.target.int4_linear import Int4Linear
from toolkit.target.int8_linear import Int8Linear
from toolkit.target.sharding import whole


@torch.no_grad()
def copy_decoder_layer(layer: DecoderLayer, theirs: nn.Module, width: int) -> list[str]:
    """A layer of the target's of width H, as far as its parts fit; names of the parts that do not."""
    with whole(theirs):
        return _copy_decoder_layer(layer, theirs, width)


def _copy_decoder_layer(layer: DecoderLayer, theirs: nn.Module, width: int) -> list[str]:
    source, left = _tensors(theirs), []
    for name, parameter in layer.named_parameters():
        if not name.startswith(("self_attn.", "mlp.")):
            continue
        value = source.get(name)
        if value is not None and value.shape == parameter.shape:
            parameter.copy_(value)
        else:
            left.append(name)
    for name in ("input_layernorm", "post_attention_layernorm"):
        mine, other = getattr(layer, name, None), getattr(theirs, name, None)
        if mine is not None and (other is None or not copy_norm(mine, other, width)):
            left.append(f"{name}.weight")
    return left


@torch.no_grad()
def copy_first_layer(layer: DraftLayer, theirs: nn.Module, width: int) -> list[str]:
    """As `copy_decoder_layer`, for the layer that reads the embedding beside the hidden state."""
    with whole(theirs):
        return _copy_first_layer(layer, theirs, width)


def _copy_first_layer(layer: DraftLayer, theirs: nn.Module, width: int) -> list[str]:
    source, left = _tensors(theirs), []
    for name, parameter in layer.named_parameters():
        value = source.get(name)
        if name in ("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"):
            continue
        if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            half = parameter.shape[1] // 2
            if value is not None and value.shape == (parameter.shape[0], half):
                # Embedding half first: small and random; the hidden half is the target's own projection.
                parameter[:, half:].copy_(value)
                continue
        elif value is not None and value.shape == parameter.shape:
            parameter.copy_(value)
            continue
        left.append(name)
    pairs = {"input_layernorm": "hidden_norm", "post_attention_layernorm": "post_attention_layernorm"}
    for name, own in pairs.items():
        norm = getattr(theirs, name, None)
        if norm is None or not copy_norm(getattr(layer, own), norm, width):
            left.append(f"{own}.weight")
    return left


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Its parameters, quantised weights in full."""
    quantised = {
        f"{path}.weight": part.weight
        for path, part in layer.named_modules()
        if isinstance(part, (Int4Linear, Int8Linear))
    }
    return {**dict(layer.named_parameters()), **quantised}


@torch.no_grad()
def copy_norm(mine: nn.RMSNorm, theirs: nn.Module, width: int) -> bool:
    """Take the scale that the target's norm really applies (some families store w, others 1 + w).

    The probe of alternating signs has mean 0 and mean square 1, so a LayerNorm leaves it whole; the difference of two
    opposite ones is free of a bias, which the head's norms have no place for.
    """
    like = next(theirs.parameters(), mine.weight)
    probe = torch.ones(1, width, device=like.device, dtype=like.dtype)
    probe[:, 1::2] = -1
    scale = probe.float() * (theirs(probe).float() - theirs(-probe).float()) / 2
    scale = scale.squeeze(0) * math.sqrt(1.0 + (mine.eps or 0.0))
    if scale.shape != mine.weight.shape or not torch.isfinite(scale).all() or bool((scale == 0).all()):
        return False
    mine.weight.copy_(scale)
    return True
