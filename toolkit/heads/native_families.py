"""The families whose models ship MTP modules: a row for each, with the names of the module's parts and its arithmetic.

The names are those of the published checkpoints, as SGLang 0.5.23 and vLLM 0.33 read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NativeFamily:
    """How a family names the MTP module of level k (from 0), and its arithmetic.

    In names {k} is the number of the module and {n} the target's number of layers plus k. root: what the names of all
    tensors of a module begin with. block: what those of its decoder layer begin with. norm None: the module has no last
    norm. embedding, output: repeat the target's embedding and output matrix. count_key: the key of config.json that
    counts the modules. variants: fields of MtpConfig. layer: settings of the decoder layer's configuration. most:
    modules that are read. refused: why none is.
    """

    title: str
    model_types: tuple[str, ...]
    root: str
    enorm: str
    hnorm: str
    eh_proj: str
    norm: str | None
    block: str
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
        enorm="model.mtp.layers.{k}.enorm",
        hnorm="model.mtp.layers.{k}.hnorm",
        eh_proj="model.mtp.layers.{k}.eh_proj",
        norm="model.mtp.layers.{k}.final_layernorm",
        block="model.mtp.layers.{k}.",
        refused="its layers differ in the shape of keys and values, and the engine keeps one shape for a model",
    ),
    NativeFamily(
        "LongCat-Flash",
        ("longcat_flash",),
        root="model.mtp.",
        enorm="model.mtp.layers.{k}.enorm.m",
        hnorm="model.mtp.layers.{k}.hnorm.m",
        eh_proj="model.mtp.layers.{k}.eh_proj",
        norm="model.mtp.norm",
        block="model.mtp.layers.{k}.",
        embedding="model.mtp.embed_tokens.weight",
        refused="its layers attend twice, and the engine keeps keys and values of one attention for a layer",
    ),
    NativeFamily(
        "Step-3.5",
        ("step3p5", "step3p7", "step3p7_text"),
        root="model.layers.{n}.",
        enorm="model.layers.{n}.enorm",
        hnorm="model.layers.{n}.hnorm",
        eh_proj="model.layers.{n}.eh_proj",
        norm="model.layers.{n}.shared_head.norm",
        block="model.layers.{n}.transformer.",
        output="model.layers.{n}.shared_head.output.weight",
        refused="transformers has no causal language model of this family",
    ),
)
# Other families in DeepSeek's form, such as a module that `toolkit export --to native` wrote.
OTHERS = _in_place("DeepSeek's form")


def family_of(model_type: str) -> NativeFamily:
    """The row of a target's model type; DeepSeek's names for a family without a row."""
    return next((row for row in FAMILIES if model_type in row.model_types), OTHERS)
