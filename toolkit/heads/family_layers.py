"""Decoder layers of the target's own family, as transformers defines them, which attend by a head's `Attend`.

A draft head in the form of its target (an MTP module with latent attention, experts, gates, ...) takes its layers from
here, so that no family's layer is written a second time.

Shapes: T tokens, H hidden size, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from toolkit.heads.decoder_layer import Attend, KVSizes
from toolkit.heads.head_config import HeadError

ATTENTION = "toolkit-draft-head"  # its name in transformers' AttentionInterface
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Keys that do not describe layers, besides those that every configuration has.
LEFT_OUT = (
    "architectures", "dtype", "transformers_version", "_name_or_path", "quantization_config",
    "num_nextn_predict_layers", "mtp_num_hidden_layers",
)  # fmt: skip


def layer_config(config: PretrainedConfig, layers: int, **settings: Any) -> dict[str, Any]:
    """The configuration, as JSON values, of `layers` full-attention layers of a family; `settings` override it.

    config: the target's. The vocabulary has one token, for a head reads the target's embedding and output matrix.
    """
    own = copy.deepcopy(config.get_text_config(decoder=True))
    own.num_hidden_layers, own.vocab_size = layers, 1
    for name in TOKENS:
        setattr(own, name, None)
    if getattr(own, "layer_types", None) is not None:
        own.layer_types = ["full_attention"] * layers
    everyone = PretrainedConfig().to_dict()
    kept = {
        name: value
        for name, value in own.to_dict().items()
        if name not in LEFT_OUT and not (name in everyone and everyone[name] == value)
    }
    return json.loads(json.dumps(kept | settings))  # as config.json will have it


def family_model(stored: dict[str, Any]) -> PreTrainedModel:
    """A model of these layers, with random weights: its decoder holds `layers`, the class of `norm` and `rotary_emb`.

    stored: of `layer_config`. Raises HeadError for a family that transformers does not have.
    """
    settings = dict(stored)
    try:
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    except (KeyError, ValueError) as error:
        raise HeadError(f"the head's layers are of a family that this transformers cannot build: {error}") from error


def run_layer(layer: nn.Module, x: Tensor, turn: tuple[Tensor, Tensor], positions: Tensor, attend: Attend) -> Tensor:
    """One layer over x [T, H] at positions [T]; turn: cos and sin of `FamilyRope`. Returns [T, H]."""
    out = layer(
        x[None], position_embeddings=turn, position_ids=positions[None], attention_mask=None, use_cache=False,
        attend=attend,
    )  # fmt: skip
    return (out if isinstance(out, Tensor) else out[0])[0]


class FamilyRope:
    """The family's rotary embedding. Not a module: a cast of the head to bfloat16 must not round the frequencies."""

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary.float()

    def __call__(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, T, ...] for `positions` [T] on `like`'s device, in its dtype."""
        if next(self._rotary.buffers()).device != like.device:
            self._rotary.to(device=like.device)
        at = positions[None]
        if hasattr(self._rotary, "mrope_section"):  # of text, height and width; text has one position
            at = at.expand(3, *at.shape)
        return self._rotary(like[None], at)


class _Attended(Exception):
    """Ends the run of `kv_sizes`: what follows the attention (experts on the meta device) need not run."""


def kv_sizes(layer: nn.Module, rope: FamilyRope, hidden_size: int) -> KVSizes:
    """Sizes of a layer's keys and values, by a run of its attention over one token.

    Raises HeadError for an attention that `Attend` cannot compute."""
    weight = next(layer.parameters())
    found: list[KVSizes] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found.append(KVSizes(k.shape[1], k.shape[2], v.shape[2]))
        raise _Attended

    x = torch.zeros(1, hidden_size, dtype=weight.dtype, device=weight.device)
    at = torch.zeros(1, dtype=torch.long, device=weight.device)
    with torch.no_grad(), suppress(_Attended):
        run_layer(layer, x, rope(at, x), at, attend)
    if not found:
        raise HeadError(f"{type(layer).__name__} has no attention that transformers' interface reaches")
    return found[0]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    *,
    attend: Attend,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """transformers' call: query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv].

    `Attend` scales by 1/sqrt(D); another scaling is put into the queries.
    """
    unsupported = {"sliding_window": sliding_window, "softcap": softcap, "s_aux (sinks)": s_aux}
    for name, setting in unsupported.items():
        if setting is not None:
            raise HeadError(f"{type(module).__name__} attends with {name}, which draft heads do not support")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    usual = q.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        q = q * (scaling / usual)
    return attend(q, k, v)[None], None


AttentionInterface.register(ATTENTION, _attend)
