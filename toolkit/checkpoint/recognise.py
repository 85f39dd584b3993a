"""Recognises a checkpoint by its config keys and tensor names, never by its file name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toolkit.checkpoint.errors import DraftDirError

# Prefixes of trainers and engines that wrap the head in a module of their own.
WRAPPERS = ("draft_model.", "eagle_module.", "model.")
OUR_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "draft_id_to_target_id": "d2t",
}
OTHER_HEADS = {
    "dflash2": "DFlash2 (grouped convolutions and a selector of candidates)",
    "dflash": "a DFlash drafter of another architecture than Qwen3's",
    "dspark": "a DSpark drafter of another architecture than Qwen3's",
    "peagle": "P-EAGLE (a parallel drafter)",
    "medusa": "Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "mtp": "MTP layers in speculators' form",
    "eagle": "EAGLE-1 in speculators' first form",
}
# Kinds of speculators -> ours.
SPECULATORS = {"eagle3": "eagle3", "dflash": "dspark", "dspark": "dspark"}
# Block drafters with Qwen3's layers -> what wrote them.
BLOCK_DRAFTERS = {
    "DFlashDraftModel": "z-lab, SGLang or vLLM",
    "DSparkDraftModel": "SGLang or vLLM",
    "Qwen3DSparkModel": "DeepSpec, SGLang or vLLM",
    "LingDSparkModel": "DeepSpec",
}


@dataclass(frozen=True)
class Recognised:
    """format: toolkit, speculators, eagle3, dspark or eagle. head: a kind of head_kinds.py. writer: what wrote it."""

    format: str
    head: str
    writer: str


def recognise(config: dict[str, Any], names: Iterable[str]) -> Recognised:
    """Raises `DraftDirError` for a checkpoint that is no draft head, or of a kind that the engine cannot draft with."""
    names = {plain_name(name) for name in names}
    if "toolkit" in config:
        return Recognised("toolkit", str(config["toolkit"].get("head")), "toolkit")
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in SPECULATORS:
            raise _unknown(OTHER_HEADS.get(str(kind), f"speculators_model_type {kind!r}"))
        return Recognised("speculators", SPECULATORS[kind], "speculators")
    for architecture in config.get("architectures") or []:
        if architecture in BLOCK_DRAFTERS:
            return Recognised("dspark", "dspark", BLOCK_DRAFTERS[architecture])
    _refuse_others(config, names)
    if any(name.startswith(("midlayer.", "layers.0.")) and "hidden_norm" in name for name in names):
        return Recognised("eagle3", "eagle3", _eagle3_writer(config, names))
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return Recognised("eagle", "eagle2", "SafeAILab EAGLE-1/2")
    shown = ", ".join(sorted(names)[:6]) or "no tensors"
    raise _unknown(f"of an unknown kind: architectures {config.get('architectures')}, tensors such as {shown}")


def _refuse_others(config: dict[str, Any], names: set[str]) -> None:
    architecture = " ".join(config.get("architectures") or [])
    for word, what in OTHER_HEADS.items():
        if word != "eagle" and (word in str(config.get("model_type", "")).lower() or word in architecture.lower()):
            raise _unknown(what)
    if config.get("parallel_drafting") or "mask_hidden" in names or "ptd_token_id" in config:
        raise _unknown(OTHER_HEADS["peagle"])
    if is_whole_model(names):
        named = architecture or "unnamed"
        raise DraftDirError(f"it is a whole language model ({named}), no draft head; use it as `target`")


def is_whole_model(names: Iterable[str]) -> bool:
    """Whether tensors are those of a language model of two layers or more: heads join what they read by an `fc`."""
    plain = {plain_name(name) for name in names}
    layers = {found[1] for name in plain if (found := re.match(r"layers\.(\d+)\.", name))}
    has_rows = not plain.isdisjoint({"lm_head.weight", "embed_tokens.weight"})
    return has_rows and len(layers) > 1 and "fc.weight" not in plain


def _eagle3_writer(config: dict[str, Any], names: set[str]) -> str:
    """For display; no rule depends on it."""
    eagle_config = config.get("eagle_config") or {}
    architecture = (config.get("architectures") or [""])[0]
    if architecture == "eagle3":
        return "llama.cpp"
    if "use_last_layernorm" in eagle_config or "use_mtp_layernorm" in eagle_config:
        return "NVIDIA ModelOpt"
    if architecture == "LlamaForCausalLM":
        return "SafeAILab EAGLE-3"
    if architecture == "Eagle3LlamaForCausalLM":
        return "AngelSlim or vLLM"
    return "SpecForge or SGLang" if "t2d" in names else "SGLang"


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes of modules around the head."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def eagle3_name(name: str) -> str:
    """A tensor's name in an EAGLE-3 checkpoint -> the name in our head."""
    name = plain_name(name)
    for theirs, ours in OUR_NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _unknown(what: str) -> DraftDirError:
    return DraftDirError(
        f"it is {what}; only EAGLE-1/2, EAGLE-3, DFlash and DSpark heads and our own draft directories can be read"
    )
