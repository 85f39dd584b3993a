"""The MTP modules that models ship in their own checkpoints, read as draft heads of kind "mtp".

`FAMILIES` has a row for each family: the names of the module's parts and the variant of its arithmetic. The decoder
layer is the family's own class in transformers (`heads/family_layers.py`). Every tensor under the module's names is
used, or must equal the target's (embedding, output matrix); others are errors.

The names are those of the published checkpoints, as SGLang 0.5.23 and vLLM 0.33 read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint, embedding_distance, embeddings_differ
from toolkit.checkpoint.errors import DraftDirError
from toolkit.heads.family_layers import family_model, layer_config
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.log import get_logger
from toolkit.targets.facts import NATIVE_MTP_KEYS, TargetFacts, read_tensors, stated_config, tensor_names
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError, load_strict

log = get_logger(__name__)

# Tensors that only quantised checkpoints have.
QUANTISED = re.compile(r"\.(weight_scale(_inv)?|weight_scale_2|weight_packed|qweight|qzeros|scales|input_scale)$")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class NativeFamily:
    """How a family names the MTP module of level k (from 0), and its arithmetic.

    In names {k} is the number of the module and {n} the target's number of layers plus k. root: what the names of all
    tensors of a module begin with. block: what those of its decoder layer begin with. norm None: the module has no last
    norm. embedding, output: repeat the target's embedding and output matrix. variants: fields of MtpConfig. layer:
    settings of the decoder layer's configuration. most: modules that are read. refused: why none is.
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


def _qwen(title: str, *model_types: str) -> NativeFamily:
    return NativeFamily(
        title,
        model_types,
        root="mtp.",
        enorm="mtp.pre_fc_norm_embedding",
        hnorm="mtp.pre_fc_norm_hidden",
        eh_proj="mtp.fc",
        norm="mtp.norm",
        block="mtp.layers.{k}.",
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
    _qwen("Qwen3.5", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
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


@dataclass(frozen=True)
class NativeModules:
    """The MTP modules in a target's files: their number, and the names of their tensors."""

    family: NativeFamily
    count: int
    names: tuple[str, ...]


def find_native(facts: TargetFacts) -> NativeModules | None:
    """The MTP modules of a target, by the names of its tensors; None if it has none. Reads no tensor.

    Raises TargetError if the target has no safetensors weights, DraftDirError if some modules are missing.
    """
    family, names = family_of(facts.model_type), tuple(tensor_names(facts))
    count = 0
    while any(name.startswith(at(family.block, count, facts.n_layers)) for name in names):
        count += 1
    if f"{at(family.eh_proj, 0, facts.n_layers)}.weight" not in names:
        return None
    own = stated_config(facts.source, facts.revision)
    stated = next((own[key] for key in NATIVE_MTP_KEYS if own.get(key)), count)
    if stated != count:
        raise DraftDirError(
            f"the config of target {facts.name} states {stated} MTP modules, and its weights hold {count}; download "
            "it again, or decode without the modules (`draft` none)"
        )
    roots = tuple({at(family.root, k, facts.n_layers) for k in range(count)})
    return NativeModules(family, count, tuple(name for name in names if name.startswith(roots)))


@torch.no_grad()
def load_native(target: Target, facts: TargetFacts, found: NativeModules) -> DraftCheckpoint:
    """The modules as a head of kind "mtp", on the CPU, in the dtype of the checkpoint.

    Raises DraftDirError for a family, quantisation or number of modules that is not read, and for an embedding or
    output matrix that is not the target's; WeightsError for tensors that are missing, unexpected or of a wrong shape.
    """
    family, count, n_layers = found.family, found.count, facts.n_layers
    what = f"the MTP module of {facts.name} ({family.title})"
    if family.refused is not None:
        raise DraftDirError(f"{what} is not read: {family.refused}; decode without it (`draft` none)")
    if family.most is not None and count > family.most:
        raise DraftDirError(f"{what}: {count} modules are found, {family.most} is read; decode without (`draft` none)")
    tensors = read_tensors(facts, found.names)
    quantised = sorted(name for name, one in tensors.items() if QUANTISED.search(name) or one.dtype not in FLOATS)
    if quantised:
        raise DraftDirError(
            f"{what} is quantised ({', '.join(quantised[:3])}, ...), which is not read; use a checkpoint whose module "
            "is in bfloat16, float16 or float32, or decode without it (`draft` none)"
        )
    head_tensors: dict[str, Tensor] = {}
    layer_tensors: dict[str, Tensor] = {}
    for k in range(count):
        for name, own in family.parts(k, n_layers).items():
            if name in tensors:
                head_tensors[own] = tensors.pop(name)
        _check_repeated(family, tensors, k, target, what)
        block = at(family.block, k, n_layers)
        for name in [name for name in tensors if name.startswith(block)]:
            layer_tensors[f"layers.{k}.{name.removeprefix(block)}"] = tensors.pop(name)
    if tensors:
        raise WeightsError(f"{what} has tensors that are unknown: {', '.join(sorted(tensors))}")
    config = MtpConfig.from_target_config(
        target.config,
        vocab_size=target.vocab_size,
        num_mtp_layers=count,
        layer_config=layer_config(target.config, count, **family.layer),
        **family.variants,
    )
    head = MtpHead(config)
    load_strict(head, {**head_tensors, **_layer_state(config, layer_tensors, what)}, what)
    head.cast("cpu", next(iter(head_tensors.values())).dtype).eval().requires_grad_(False)
    meta = {
        "target": {"name": facts.name, "revision": facts.revision, "fingerprint": target.fingerprint},
        "native": {"family": family.title, "modules": count},
    }
    return DraftCheckpoint(head=head, token_map=TokenMap.identity(target.vocab_size), meta=meta)


def _check_repeated(family: NativeFamily, tensors: dict[str, Tensor], k: int, target: Target, what: str) -> None:
    """Take the module's copies of the target's embedding and output matrix out of `tensors`.

    Raises DraftDirError if they are not copies."""
    for name, mine in ((family.embedding, target.embed_tokens), (family.output, target.lm_head)):
        if name is None:
            continue
        copied = tensors.pop(at(name, k, target.n_layers), None)
        if copied is None:
            log.info("%s has no %s of its own: the target's is used", what, at(name, k, target.n_layers))
        elif embeddings_differ(embedding_distance(copied, mine.weight.detach().cpu())):
            raise DraftDirError(
                f"{what} has a {at(name, k, target.n_layers)} that is not the target's, which the engine would use in "
                "its place; decode without the module (`draft` none)"
            )


def _layer_state(config: MtpConfig, tensors: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """The decoder layers' tensors under the names of the family's class. transformers converts them (it joins experts).

    tensors: by names of the published checkpoints, "layers.0.mlp.experts.0.up_proj.weight".
    """
    model = family_model(config.layer_config or {})
    body = model.base_model_prefix
    # from_pretrained wants a whole model: what is not a layer is filled.
    whole = {name: value for name, value in model.state_dict().items() if not name.startswith(f"{body}.layers.")}
    whole |= {f"{body}.{name}": value for name, value in tensors.items()}
    try:
        # Any: output_loading_info makes the result a pair, which the declared type lacks.
        pair: Any = type(model).from_pretrained(
            None, config=model.config, state_dict=whole, output_loading_info=True, dtype="auto"
        )
    except RuntimeError as error:  # some of a layer's experts are missing
        raise WeightsError(f"{what} does not fit {type(model).__name__}: {' '.join(str(error).split())}") from error
    loaded, info = pair
    wrong = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "wrong shape": sorted(str(key) for key in info["mismatched_keys"]),
    }
    if any(wrong.values()):
        said = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        raise WeightsError(f"{what} does not fit {type(loaded.get_decoder().layers[0]).__name__}: {said}")
    return {f"layers.{name}": value for name, value in loaded.get_decoder().layers.state_dict().items()}
