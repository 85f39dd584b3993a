"""Copies decoder layers and norms of the target into a head, as far as their parts match.

Shapes: H hidden size.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.heads.decoder_layer import AttendingLayer
from toolkit.log import get_logger
from toolkit.targets.fixed_linear import FixedLinear
from toolkit.targets.sharding import unsharded

log = get_logger(__name__)

# In EAGLE-3's first layer the input of these is the embedding and the hidden state, concatenated.
CONCATENATED_INPUT = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


@dataclass
class CopyReport:
    """not_copied: names of the head's parameters that stay random. dropped: the target's parts that the head lacks."""

    not_copied: list[str]
    dropped: list[str]

    def warn(self) -> None:
        """Log both lists, with one name for all experts of a layer."""
        not_copied, dropped = (
            ", ".join(dict.fromkeys(re.sub(r"\.experts\..*", ".experts", name) for name in names))
            for names in (self.not_copied, self.dropped)
        )
        if not_copied:
            log.warning("these parameters stay random, because the target has no matching part: %s", not_copied)
        if dropped:
            log.warning("the head lacks these parts of the target's layers: %s", dropped)


@torch.no_grad()
def copy_decoder_layer(layer: nn.Module, theirs: nn.Module, width: int) -> CopyReport:
    """Copy the parts of `theirs`, a layer of the target of width H, that match in shape and meaning.

    If the head's layer reads the embedding and the hidden state, the target's projections go into the half for the
    hidden state; the first half, for the embedding, stays random with small values.
    """
    with unsharded(theirs):
        return _copy(layer, theirs, width)


def _copy(layer: nn.Module, theirs: nn.Module, width: int) -> CopyReport:
    if isinstance(theirs, type(layer)):  # a sharded layer is of a subclass
        return _copy_alike(layer, theirs)
    assert isinstance(layer, AttendingLayer), "a layer of another family is of our own class"
    source, report = _tensors(theirs), CopyReport([], [])
    copied: set[str] = set()
    for name, parameter in layer.named_parameters():
        if not name.startswith(("self_attn.", "mlp.")):
            continue
        value = None if _used_differently(name, theirs, source, layer, copied) else source.get(name)
        value = None if value is None else value * _factor(name, theirs)
        half = (len(parameter), parameter.shape[-1] // 2)
        if value is not None and value.shape == parameter.shape:
            parameter.copy_(value)
        elif value is not None and value.shape == half and name in CONCATENATED_INPUT:
            parameter[:, half[1] :].copy_(value)
        else:
            report.not_copied.append(name)
            continue
        copied.add(name)
    norms = {layer.norm_before_attention: "input_layernorm", "post_attention_layernorm": _norm_before_mlp(theirs)}
    for mine, other in norms.items():
        own, norm = getattr(layer, mine, None), getattr(theirs, other, None)
        copied |= {f"{other}.weight", f"{other}.bias"}
        if own is not None and (norm is None or not copy_norm(own, norm, width)):
            report.not_copied.append(f"{mine}.weight")
    report.dropped += [name for name in source if name not in copied and name not in report.not_copied]
    report.dropped += [] if _is_silu(theirs) else ["mlp.act_fn"]
    if getattr(getattr(theirs, "self_attn", None), "attn_logit_softcapping", None) is not None:
        report.dropped.append("self_attn.attn_logit_softcapping")
    return report


def _copy_alike(layer: nn.Module, theirs: nn.Module) -> CopyReport:
    """Copy a layer of the target's own class, with its buffers."""
    report = CopyReport([], [])
    source = {**_tensors(theirs), **dict(theirs.named_buffers())}
    own = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for name, value in source.items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)
        else:
            report.dropped.append(name)
    report.not_copied += [name for name in own if name.startswith(("self_attn.", "mlp.")) and name not in source]
    return report


def _factor(name: str, theirs: nn.Module) -> float:
    """The target's extra factor of the attention scores, or of the outputs added to the residual stream (Granite).
    The head has neither factor, so the copied weights contain it."""
    if name.startswith("self_attn.q_proj."):
        attention = getattr(theirs, "self_attn", None)
        scaling, width = getattr(attention, "scaling", None), getattr(attention, "head_dim", None)
        return 1.0 if scaling is None or width is None else scaling * math.sqrt(width)
    added = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    return float(getattr(theirs, "residual_multiplier", 1.0)) if added else 1.0


def _is_silu(theirs: nn.Module) -> bool:
    """Whether the MLP's activation is SiLU; True if it is not an attribute that can be checked."""
    activation = getattr(getattr(theirs, "mlp", None), "act_fn", None)
    probe = torch.linspace(-4, 4, 9, device=next(theirs.parameters()).device)  # Apertus's activation has weights
    return activation is None or torch.allclose(activation(probe), F.silu(probe), atol=1e-5)


def _same_rope(theirs: nn.Module) -> bool:
    """Whether the rotary embedding covers whole heads and pairs element i with element i + hd/2, as in the head.

    GLM rotates half of each head, in pairs of neighbours. Some layers of SmolLM 3 and Llama 4 do not rotate. Llama 4
    rotates complex numbers, which this check does not cover.
    """
    attention = getattr(theirs, "self_attn", None)
    config, module = getattr(attention, "config", None), sys.modules[type(attention).__module__]
    part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    if not getattr(attention, "use_rope", True) or part not in (None, 1.0):
        return False
    probe, half = torch.arange(8.0), torch.ones(4)
    turned = torch.cat((-probe[4:], probe[:4]))
    if hasattr(module, "rotate_half"):
        return torch.equal(module.rotate_half(probe), turned)
    # GPT-OSS: cosines of zero and sines of one.
    turn = getattr(module, "_apply_rotary_emb", None)
    return turn is not None and torch.equal(turn(probe, 0 * half, half), turned)


def _normed_inside(theirs: nn.Module, layer: nn.Module) -> set[str]:
    """Projections beside a norm inside the target's attention or MLP that the head lacks: those of queries and keys
    (Qwen 3), or the last projection, whose input is normed (BitNet)."""
    found: set[str] = set()
    own = {path for path, _ in layer.named_modules()}
    for path, part in theirs.named_modules():
        if path in own or "norm" not in type(part).__name__.lower():
            continue
        if path.startswith("self_attn."):
            of_queries = path.removeprefix("self_attn.").startswith(("q", "k"))
            found |= {"self_attn.q_proj", "self_attn.k_proj"} if of_queries else {"self_attn.o_proj"}
        elif path.startswith("mlp."):
            found.add("mlp.down_proj")
    return found


def _used_differently(
    name: str, theirs: nn.Module, source: Mapping[str, Tensor], layer: nn.Module, copied: set[str]
) -> bool:
    """Whether the target uses this projection in another way than the head would.

    If the target norms the projection's output (queries of Qwen 3, outputs of Gemma 2, OLMo 2 and GLM 4), the head
    would read it at a scale that it was not trained for. A projection of another part's output is useless without that
    part.
    """
    path = name.rpartition(".")[0]
    if path in ("self_attn.q_proj", "self_attn.k_proj") and not _same_rope(theirs):
        return True
    if path in _normed_inside(theirs, layer):
        return True
    if path.startswith("mlp.") and not {f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")} <= source.keys():
        return True
    if path == "self_attn.o_proj" and "self_attn.v_proj.weight" not in copied:
        return True
    output_norms = {
        "self_attn.o_proj": {"post_self_attn_layernorm", "post_attention_layernorm"} - {_norm_before_mlp(theirs)},
        "mlp.down_proj": {"post_mlp_layernorm", "post_feedforward_layernorm"},
    }
    return any(hasattr(theirs, norm) for norm in output_norms.get(path, ()))


def _norm_before_mlp(theirs: nn.Module) -> str:
    """The target's name for the norm before the MLP. In families that also norm the MLP's output (Gemma 2, OLMo 2),
    `post_attention_layernorm` is the norm of the attention's output."""
    sandwich = hasattr(theirs, "post_feedforward_layernorm") or hasattr(theirs, "pre_feedforward_layernorm")
    return "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's parameters and its dequantised weights, by name."""
    quantised = {f"{path}.weight": part.weight for path, part in layer.named_modules() if isinstance(part, FixedLinear)}
    return {**dict(layer.named_parameters()), **quantised}


@torch.no_grad()
def copy_norm(mine: nn.Module, theirs: nn.Module, width: int) -> bool:
    """Copy the scale that the target's norm applies, measured with a probe: some families store w, others w - 1.

    The probe has alternating signs, so mean 0 and mean square 1, and a LayerNorm does not change it. The difference of
    the results of two opposite probes cancels a bias, which the head's norms do not have. Returns False if the norm has
    no such scale.
    """
    if isinstance(theirs, type(mine)):
        mine.load_state_dict(theirs.state_dict())
        return True
    assert isinstance(mine, nn.RMSNorm), "a norm of another family is torch's"
    like = next(theirs.parameters(), mine.weight)
    probe = torch.ones(1, width, device=like.device, dtype=like.dtype)
    probe[:, 1::2] = -1
    scale = probe.float() * (theirs(probe).float() - theirs(-probe).float()) / 2
    scale = scale.squeeze(0) * math.sqrt(1.0 + (mine.eps or 0.0))
    if scale.shape != mine.weight.shape or not torch.isfinite(scale).all() or bool((scale == 0).all()):
        return False
    mine.weight.copy_(scale)
    return True
