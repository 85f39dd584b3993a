"""A draft head from anywhere: our own draft directory, another project's, a GGUF file, or a hub id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from toolkit.checkpoint.draft_dir import DraftCheckpoint, dtype_of, load_draft
from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.files import CheckpointFiles, locate, read_checkpoint, read_config
from toolkit.checkpoint.formats import FORMATS
from toolkit.checkpoint.gguf_head import gguf_file
from toolkit.checkpoint.recognise import Recognised, recognise
from toolkit.checkpoint.resolution import Resolver, log_resolutions
from toolkit.errors import TargetError
from toolkit.heads.draft_head import DraftHead, empty_head
from toolkit.heads.head_config import HeadConfig
from toolkit.log import get_logger
from toolkit.targets.facts import TargetFacts, target_facts
from toolkit.targets.load import full_name
from toolkit.tokenmap.token_map import TokenMap, TokenMapError
from toolkit.weights import WeightsError, load_strict

log = get_logger(__name__)


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
    log_resolutions(draft.resolutions)
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
        found = recognise(files.config, files.tensors)
        config, tensors, token_map, embedding = _read(found, files, resolver, facts)
        resolver.check_all_used()
        _check_dtypes(tensors, resolver)
        head = _empty(config)
        load_strict(head, tensors, "the checkpoint")
    except (DraftDirError, WeightsError, TokenMapError) as error:
        raise type(error)(f"{files.directory}: {error}") from error
    head = head.to(dtype=dtype_of(tensors)).eval().requires_grad_(False)
    meta: dict[str, Any] = {"format": found.format, "writer": found.writer, "head": config.kind}
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


def _read(
    found: Recognised, files: CheckpointFiles, resolver: Resolver, facts: TargetFacts | None
) -> tuple[HeadConfig, dict[str, torch.Tensor], TokenMap, torch.Tensor | None]:
    resolver.note("format", found.format, f"by its contents; in the form of {found.writer}")
    read = FORMATS[found.head].read
    assert read is not None, f"{found.head} checkpoints of other projects are not recognised"
    return read(files.config, files.tensors, resolver, facts)


def _empty(config: HeadConfig) -> DraftHead:
    try:
        return empty_head(config)
    except ValueError as error:  # a rope that changes with the length of the sequence
        raise DraftDirError(str(error)) from error


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
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
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
