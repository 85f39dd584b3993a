"""Exporting the head that a path or a hub id names: its target and its draft shape are looked up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.export_head import export_head
from toolkit.checkpoint.launch_lines import Shape
from toolkit.checkpoint.open_head import open_head
from toolkit.checkpoint.stitch_native import stitch
from toolkit.head_kinds import SHAPE_PRESETS
from toolkit.targets.facts import TargetFacts, target_facts
from toolkit.targets.load import full_name, split_revision

DEFAULT_SHAPE = "3,1,4"
NATIVE = "native"  # in place of an engine: the target's own checkpoint


def export_path(
    path: str,
    to: str,
    out: Path,
    *,
    target: str | None = None,
    shape: str | None = None,
    settings: Mapping[str, Any],
    hub_name: str | None = None,
    token_map: str | Path | None = None,
) -> tuple[str, str, list[str]]:
    """Write the head at `path` for the engine `to` into the new folder `out`; "native": into a copy of its target.

    target: org/name@revision, where the head names none or another. shape: levels, branches, nodes for the launch line;
    None: the best measured one, else 3,1,4. settings: how ambiguous settings of a foreign checkpoint are read.
    hub_name: the hub id that `out` will be pushed to. token_map: a file of the ids that a "native" copy drafts.
    Returns the head's kind, the launch line, and notes for the user. Raises `ExportError`, `DraftDirError`,
    `TargetError`.
    """
    draft = open_head(path, target=target, overrides=dict(settings))
    facts = _facts(draft, path, target)
    if to == NATIVE:
        launch, notes = stitch(draft, facts, out, _shape(shape, draft), token_map)
    elif token_map is not None:
        raise ExportError(f"`token_map` is {token_map}, which only an export to native has beside it; leave it out")
    else:
        launch, notes = export_head(draft, to, out, facts, _shape(shape, draft), hub_name)
    if not (draft.meta.get("measured") or {}).get("recommended", True):
        notes.append("where it was measured, no shape was faster than plain decoding; measure it where it will serve")
    return draft.kind, launch, notes


def _facts(draft: DraftCheckpoint, path: str, target: str | None) -> TargetFacts:
    stated = draft.meta.get("target") or {}
    named = target or stated.get("name")
    if named is None:
        raise ExportError(f"{path} does not name its target; name it with `target`")
    name, revision = split_revision(named)
    if revision is None and stated.get("name") and full_name(name) == full_name(stated["name"]):
        revision = stated.get("revision")
    return target_facts(name, revision)


def _shape(text: str | None, draft: DraftCheckpoint) -> Shape:
    """The shape asked for, else the best measured one, else the default; of a block drafter its whole block."""
    measured: Any = draft.meta.get("measured") or {}
    block = draft.head.config.drafts_at_once
    named = text or measured.get("best_shape") or (f"{block},1,{block + 1}" if block else DEFAULT_SHAPE)
    words = SHAPE_PRESETS.get(named, named).split(",")
    if len(words) != 3 or not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise ExportError(
            f"`shape` is {','.join(words)}; three whole numbers from 1 are needed, such as 3,1,4, or "
            f"{' or '.join(SHAPE_PRESETS)}"
        )
    return Shape(*(int(word) for word in words))
