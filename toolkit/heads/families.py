"""Families of targets: the decoder layers that transformers defines for them, and the MTP modules that they ship.

A draft head in the form of its target (an MTP module with latent attention, experts, gates, ...) takes its layers from
transformers, which attend by a head's `Attend`, so that no family's layer is written a second time.

FAMILIES has a row for each family whose models ship MTP modules, with the names of the module's parts and its
arithmetic. The names are those of the published checkpoints, as SGLang 0.5.23 and vLLM 0.33 read them.

Shapes: T tokens, H hidden size, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class NativeFamily:
    """How a family names the MTP module of level k (from 0), and its arithmetic.

    In names {k} is the number of the module and {n} the target's number of layers plus k. root: what the names of all
    tensors of a module begin with. block: what those of its decoder layer begin with. norm None: the module has no last
    norm. embedding, output: repeat the target's embedding and output matrix. count_key: the key of config.json that
    counts the modules. variants: fields of MtpConfig. layer: settings of the decoder layer's configuration. most:
    modules that are read. refused: why none is, so that the other parts are not named.
    """

    title: str
    model_types: tuple[str, ...]
    root: str
    block: str
    enorm: str = ""
    hnorm: str = ""
    eh_proj: str = ""
    norm: str | None = None
    embedding: str | None = None
    output: str | None = None
    count_key: str | None = "num_nextn_predict_layers"
    variants: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    most: int | None = None
    refused: str | None = None

    def parts(self, k: int, n_layers: int) -> dict[str, str]:
        """The module's own parts: name in the checkpoint -> name in `MtpHead`."""
        named = {self.enorm: "enorm", self.hnorm: "hnorm", self.eh_proj: "eh_proj", self.norm: "shared_head.norm"}
        return {
            f"{at(name, k, n_layers)}.weight": f"layers.{k}.{own}.weight"
            for name, own in named.items()
            if name is not None
        }


def at(name: str, k: int, n_layers: int) -> str:
    """A name of module k of a target with `n_layers` layers."""
    return name.format(k=k, n=n_layers + k)


def _in_place(title: str, *model_types: str, **other: Any) -> NativeFamily:
    """A module in DeepSeek's form, stored as decoder layer `num_hidden_layers`."""
    layer = "model.layers.{n}"
    return NativeFamily(
        title,
        model_types,
        root=f"{layer}.",
        enorm=f"{layer}.enorm",
        hnorm=f"{layer}.hnorm",
        eh_proj=f"{layer}.eh_proj",
        norm=f"{layer}.shared_head.norm",
        block=f"{layer}.",
        embedding=f"{layer}.embed_tokens.weight",
        output=f"{layer}.shared_head.head.weight",
        **other,
    )


def _qwen(title: str, *model_types: str, count_key: str | None = None) -> NativeFamily:
    return NativeFamily(
        title,
        model_types,
        root="mtp.",
        enorm="mtp.pre_fc_norm_embedding",
        hnorm="mtp.pre_fc_norm_hidden",
        eh_proj="mtp.fc",
        norm="mtp.norm",
        block="mtp.layers.{k}.",
        count_key=count_key,
        most=1,  # several would share fc and the norms
    )


MOE = {"first_k_dense_replace": 0}  # the module's layer has experts, also where the target's first layers have none
FAMILIES = (
    _in_place("DeepSeek-V3", "deepseek_v3", layer=MOE),
    _in_place("GLM-4.5", "glm4_moe", layer=MOE),
    NativeFamily(
        "MiMo-7B",
        ("mimo",),
        root="model.mtp_layers.",
        enorm="model.mtp_layers.{k}.token_layernorm",
        hnorm="model.mtp_layers.{k}.hidden_layernorm",
        eh_proj="model.mtp_layers.{k}.input_proj",
        norm="model.mtp_layers.{k}.final_layernorm",
        block="model.mtp_layers.{k}.",
        # vLLM's MiMo hands its module the state before the final norm.
        variants={"embedding_first": False, "target_hidden": "pre_norm", "zero_first_embedding": True},
        layer={"model_type": "qwen2"},
    ),
    _qwen("Qwen3-Next", "qwen3_next"),
    _qwen("Qwen3.5", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", count_key="mtp_num_hidden_layers"),
    NativeFamily(
        "ERNIE-4.5",
        ("ernie4_5_moe",),
        root="model.mtp_",
        enorm="model.mtp_emb_norm.{k}",
        hnorm="model.mtp_hidden_norm.{k}",
        eh_proj="model.mtp_linear_proj.{k}",
        norm=None,
        block="model.mtp_block.{k}.",
        variants={"final_norm": False, "zero_first_embedding": True},
        layer={"moe_layer_start_index": 1 << 20, "moe_layer_end_index": 1 << 20},  # a dense layer
    ),
    NativeFamily(
        "MiMo-V2",
        ("mimo_v2", "mimo_v2_flash"),
        root="model.mtp.",
        block="model.mtp.layers.{k}.",
        refused="its layers differ in the shape of keys and values, and the engine keeps one shape for a model",
    ),
    NativeFamily(
        "LongCat-Flash",
        ("longcat_flash",),
        root="model.mtp.",
        block="model.mtp.layers.{k}.",
        refused="its layers attend twice, and the engine keeps keys and values of one attention for a layer",
    ),
    NativeFamily(
        "Step-3.5",
        ("step3p5", "step3p7", "step3p7_text"),
        root="model.layers.{n}.",
        block="model.layers.{n}.transformer.",
        refused="transformers has no causal language model of this family",
    ),
)
# Other families in DeepSeek's form, such as a module that `toolkit export --to native` wrote.
OTHERS = _in_place("DeepSeek's form")


def family_of(model_type: str) -> NativeFamily:
    """The row of a target's model type; DeepSeek's names for a family without a row."""
    return next((row for row in FAMILIES if model_type in row.model_types), OTHERS)
