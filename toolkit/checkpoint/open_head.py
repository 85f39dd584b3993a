"""A draft head from anywhere: our own draft directory, another project's, a GGUF file, or a hub id.

Foreign checkpoints are recognised by their config keys and tensor names, never by their file names. `FORMATS` says how
other projects write each kind of head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from toolkit.checkpoint import dspark_format, eagle2_format, eagle3_format
from toolkit.checkpoint.draft_dir import SETTINGS_ERRORS, DraftCheckpoint, dtype_of, load_draft
from toolkit.checkpoint.files import (
    CheckpointFiles,
    is_whole_model,
    locate,
    plain_name,
    read_checkpoint,
    read_config,
)
from toolkit.checkpoint.formats import Exported, Resolver, read_foreign, write_foreign
from toolkit.checkpoint.gguf_head import gguf_file
from toolkit.errors import DraftDirError, ExportError, TargetError, TokenMapError
from toolkit.heads.draft_head import empty_head
from toolkit.log import get_logger
from toolkit.targets.facts import TargetFacts, target_facts
from toolkit.targets.load import full_name
from toolkit.weights import WeightsError, load_strict

log = get_logger(__name__)

# By the kind of head, see head_kinds.py. No other project writes MTP layers apart from their target.
FORMATS = {"eagle3": eagle3_format.FORMAT, "eagle2": eagle2_format.FORMAT, "dspark": dspark_format.FORMAT}


def exported(draft: DraftCheckpoint, to: str, facts: TargetFacts, draft_tokens: int) -> Exported:
    """`draft` for `to`: sglang, vllm, speculators, eagle or gguf. draft_tokens: a chain's length, where the format
    holds one.

    Raises `ExportError` for a head that would not be the same there.
    """
    why = why_not_written(draft, to)
    if why is not None:
        raise ExportError(f"a {draft.kind} head cannot be written for {to}: {why}")
    return write_foreign(FORMATS[draft.kind], draft, to, facts, draft_tokens)


def why_not_written(draft: DraftCheckpoint, to: str) -> str | None:
    """Why heads of this kind cannot be written for an engine; None: they can."""
    if draft.head.config.in_target:
        return "other engines read MTP layers from the target's own checkpoint; --to native writes it"
    form = FORMATS.get(draft.kind)
    if form is None:
        return "no such loader"
    return None if to in form.writers else form.why_not


OURS = "toolkit"
# In the names of architectures and model types of drafters that are not read.
OTHER_HEADS = ("dflash", "dspark", "peagle", "medusa", "mlp_speculator", "mtp")
# Kinds of speculators -> ours.
SPECULATORS = {"eagle3": "eagle3", "dflash": "dspark", "dspark": "dspark"}
# Block drafters with Qwen3's layers -> what wrote them.
BLOCK_DRAFTERS = {
    "DFlashDraftModel": "z-lab, SGLang or vLLM",
    "Qwen3DFlashDraftModel": "NeMo AutoModel",
    "JetSpecDraftModel": "a fork of SpecForge",
    "DSparkDraftModel": "SGLang or vLLM",
    "Qwen3DSparkModel": "DeepSpec, SGLang or vLLM",
    "LingDSparkModel": "DeepSpec",
}
# EAGLE-3 architectures -> what wrote them, for display; no rule depends on it.
EAGLE3_WRITERS = {
    "eagle3": "llama.cpp",
    "LlamaForCausalLM": "SafeAILab EAGLE-3",
    "Eagle3LlamaForCausalLM": "AngelSlim or vLLM",
}


def recognise(config: dict[str, Any], names: Iterable[str]) -> tuple[str, str]:
    """The kind of head, and what wrote it (toolkit: our own draft directory).

    Raises `DraftDirError` for a checkpoint that is no draft head, or of a kind that the engine cannot draft with."""
    names = {plain_name(name) for name in names}
    stated = config.get("architectures") or []
    architectures = list(map(str, stated if isinstance(stated, list) else [stated]))
    if "toolkit" in config:
        block = config["toolkit"]
        return str(block.get("head") if isinstance(block, dict) else None), OURS
    kind = config.get("speculators_model_type")
    if kind is not None:
        if str(kind) not in SPECULATORS:
            raise _unknown(f"of speculators_model_type {kind!r}")
        return SPECULATORS[kind], "speculators"
    for architecture in architectures:
        if architecture in BLOCK_DRAFTERS:
            return "dspark", BLOCK_DRAFTERS[architecture]
    if any(word in " ".join([str(config.get("model_type")), *architectures]).lower() for word in OTHER_HEADS):
        raise _unknown(f"a drafter of another kind: architectures {architectures}, not Qwen3's layers")
    if config.get("parallel_drafting") or "mask_hidden" in names or "ptd_token_id" in config:
        raise _unknown("P-EAGLE (a parallel drafter)")
    if is_whole_model(names):
        raise DraftDirError(f"it is a whole language model ({architectures}), no draft head; use it as `target`")
    if any(name.startswith(("midlayer.", "layers.0.")) and "hidden_norm" in name for name in names):
        writer = EAGLE3_WRITERS.get(next(iter(architectures), ""), "SpecForge or SGLang")
        if "use_last_layernorm" in as_mapping(config.get("eagle_config")):
            writer = "NVIDIA ModelOpt"
        return "eagle3", writer
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return "eagle2", "SafeAILab EAGLE-1/2"
    shown = ", ".join(sorted(names)[:6]) or "no tensors"
    raise _unknown(f"of an unknown kind: architectures {config.get('architectures')}, tensors such as {shown}")


def as_mapping(value: Any) -> Mapping[str, Any]:
    """What a config.json holds where a mapping belongs; empty for anything else."""
    return value if isinstance(value, dict) else {}


def _unknown(what: str) -> DraftDirError:
    return DraftDirError(
        f"it is {what}; only EAGLE-1/2, EAGLE-3, DFlash and DSpark heads and our own draft directories can be read"
    )


# -- any head ----------------------------------------------------------------------------------------------------------


def open_head(
    name: str | Path,
    *,
    target: str | None = None,
    revision: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> DraftCheckpoint:
    """A head by directory, GGUF file or hub id, recognised by its contents, on the CPU in its stored dtype.

    target, revision: the target it will serve; of a foreign checkpoint that does not state its auxiliary layers the
    target's depth decides them. overrides: what the user says against the rules. How a foreign checkpoint was read is
    logged, and kept in `resolutions`. Raises `DraftDirError`, `WeightsError`, `TokenMapError`, `TargetError`.
    """
    directory = locate(name)
    if gguf_file(directory) is None and "toolkit" in read_config(directory):
        if overrides:
            raise DraftDirError(
                f"--set {next(iter(overrides))}: {name} is our own draft directory, which states it all"
            )
        return load_draft(directory)
    files = read_checkpoint(directory)
    draft = import_head(files, facts=facts_for(files, target, revision), overrides=overrides)
    if not Path(name).expanduser().exists():
        # Of a hub's files the cache keeps each commit in a folder of its name.
        draft.meta["source"] = {"name": str(name).partition("@")[0], "revision": directory.name}
    for one in draft.resolutions:
        (log.warning if one.warning else log.info)("%s", one.line)
    return draft


def facts_for(files: CheckpointFiles, target: str | None, revision: str | None = None) -> TargetFacts | None:
    """Facts of the target at hand, else of the one the checkpoint names; None where that cannot be had.

    Raises `TargetError` for a target that was asked for.
    """
    if target is not None:
        return target_facts(target, revision)
    stated = named_target(files)
    try:
        return None if stated is None else target_facts(stated[0])
    except TargetError as error:
        log.info("the target it names is not at hand: %s", error)
        return None


def import_head(
    files: CheckpointFiles, *, facts: TargetFacts | None = None, overrides: Mapping[str, Any] | None = None
) -> DraftCheckpoint:
    """The head of a foreign checkpoint, strictly: every tensor is taken, named as left out, or an error."""
    resolver = Resolver(overrides)
    try:
        kind, writer = recognise(files.config, files.tensors)
        resolver.note("kind", kind, f"by its contents; in the form of {writer}")
        form = FORMATS[kind]
        config, tensors, token_map, embedding = read_foreign(form, files.config, files.tensors, resolver, facts)
        resolver.check_all_used()
        _check_dtypes(tensors, resolver)
        head = empty_head(config)
        load_strict(head, tensors, "the checkpoint")
    except (WeightsError, TokenMapError) as error:
        raise type(error)(f"{files.directory}: {error}") from error
    except SETTINGS_ERRORS as error:
        raise DraftDirError(f"{files.directory}: {error}") from error
    head = head.to(dtype=dtype_of(tensors)).eval().requires_grad_(False)
    meta: dict[str, Any] = {"writer": writer, "head": config.kind}
    meta |= config.features.to_dict()
    stated = named_target(files)
    if stated is not None:
        resolver.note("target", *stated)
        same = facts is not None and facts.name == full_name(stated[0])
        meta["target"] = {"name": stated[0], "revision": facts.revision if same and facts is not None else None}
    return DraftCheckpoint(
        head=head,
        token_map=token_map,
        meta=meta,
        path=files.directory,
        weights=files.weights,
        resolutions=resolver.lines,
        own_embedding=embedding,
    )


def _check_dtypes(tensors: Mapping[str, torch.Tensor], resolver: Resolver) -> None:
    whole = sorted(name for name, value in tensors.items() if not value.is_floating_point())
    if whole:
        raise WeightsError(f"{', '.join(whole[:5])} hold whole numbers; a quantised head cannot be read")
    kinds = {value.dtype for value in tensors.values()}
    if len(kinds) > 1:
        mixed = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        own = str(dtype_of(tensors)).removeprefix("torch.")
        resolver.note("dtype", own, f"the checkpoint mixes {mixed}; its layer's", warning=True)


def named_target(files: CheckpointFiles) -> tuple[str, str] | None:
    """The target a checkpoint names, and where: speculators' verifier, else base_model of its model card."""
    verifier = as_mapping(as_mapping(files.config.get("speculators_config")).get("verifier"))
    if verifier.get("name_or_path"):
        return str(verifier["name_or_path"]), "speculators_config.verifier"
    card = files.directory / "README.md"
    if not card.is_file():
        return None
    parts = card.read_text(encoding="utf-8", errors="replace").split("---", 2)
    try:
        header = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        return None
    base = header.get("base_model") if isinstance(header, dict) else None
    base = base[0] if isinstance(base, list) and len(base) == 1 else base
    return (base, "base_model of its model card (README.md)") if isinstance(base, str) else None
