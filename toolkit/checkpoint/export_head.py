"""Exports a head: written into a temporary folder, read back, compared, and only then renamed to the wanted folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import (
    MEASUREMENTS,
    DraftCheckpoint,
    load_draft,
    problems,
    rope_difference,
    save_draft,
)
from toolkit.checkpoint.files import PICKLE, new_folder, read_checkpoint
from toolkit.checkpoint.formats import Exported
from toolkit.checkpoint.gguf_head import MODEL_FILE, vocabulary_of, write_gguf
from toolkit.checkpoint.launch_lines import Shape, launch_line
from toolkit.checkpoint.model_card import model_card
from toolkit.checkpoint.native_mtp import stitch
from toolkit.checkpoint.open_head import exported, import_head, open_head
from toolkit.errors import ExportError
from toolkit.head_kinds import SHAPE_PRESETS
from toolkit.heads.head_config import HeadConfig
from toolkit.targets.facts import TargetFacts, target_facts
from toolkit.targets.load import full_name, split_revision
from toolkit.tokenmap.files import save_freq_list
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import atomic_write, save_tensors, write_json

DEFAULT_SHAPE = "3,1,4"
NATIVE = "native"  # in place of an engine: the target's own checkpoint
PLACEHOLDER = "MODEL"  # for a local target's path


def export_path(
    path: str,
    to: str,
    out: Path,
    *,
    target: str | None = None,
    shape: str | None = None,
    settings: Mapping[str, Any],
    hub_name: str | None = None,
) -> tuple[str, str, list[str]]:
    """Write the head at `path` for the engine `to` into the new folder `out`; "native": into a copy of its target.

    target: org/name@revision, where the head names none or another. shape: levels, branches, nodes for the launch line;
    None: the best measured one, else 3,1,4. settings: how ambiguous settings of a foreign checkpoint are read.
    hub_name: the hub id that `out` will be pushed to. Returns the head's kind, the launch line, and notes for the user.
    Raises `ExportError`, `DraftDirError`, `TargetError`.
    """
    draft = open_head(path, target=target, overrides=dict(settings))
    facts = _facts(draft, path, target)
    if to == NATIVE:
        launch, notes = stitch(draft, facts, out, _shape(shape, draft))
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


def export_head(
    draft: DraftCheckpoint, to: str, out: str | Path, facts: TargetFacts, shape: Shape, name: str | None = None
) -> tuple[str, list[str]]:
    """Writes `draft` for `to` into the new folder `out`. Returns the launch line and notes for the user.

    name: the head's hub id, when it is to be sent there: the model card's launch line has it (default: the folder's
    name), and no file names a folder of this machine.
    Raises `ExportError` when the head cannot be written so or does not fit the target, when `out` exists, or when what
    was written does not read back as the same head; then nothing is left behind.
    """
    out = Path(out)
    with new_folder(out) as temporary:
        refused, warnings = problems(draft, facts)
        if refused:
            raise ExportError(f"the head is not written for {facts.name}: {'; '.join(refused)}")
        # Paths of the target on this machine, longest first; none for a hub's target.
        paths = sorted({one for one in (facts.source, facts.name) if one.startswith("/")}, key=len, reverse=True)
        hidden = paths if name is not None else []
        here, there = str(out.resolve()), name or out.name
        launch, in_card = (launch_line(to, draft.head.config, facts, where, shape) for where in (here, there))
        if to == "toolkit":
            notes = [one.line for one in draft.resolutions]
            in_card += f" --target {PLACEHOLDER}" if facts.name in hidden else ""
            _write_own(draft, temporary, facts, hidden)
            _check_same(draft, load_draft(temporary), draft.head.config, draft.head.state_dict())
        else:
            draft, notes = _without_map(draft, to, temporary, here)
            result = exported(draft, to, facts, shape.num_steps)
            notes = result.notes + notes + [one.line for one in draft.resolutions if one.warning]
            result.config = _without_paths(result.config, hidden)
            _write(result, temporary, facts)
            own = {key: value for key, value in draft.head.state_dict().items() if key not in result.left_out}
            back = import_head(read_checkpoint(temporary), facts=facts)
            _check_same(draft, back, result.config_of_head, own | result.added)
        notes += warnings
        if paths:
            where = "the model card and config.json" if hidden else "the model card"
            notes.append(f"the target is a local folder; in {where} replace {PLACEHOLDER} by a path or hub id")
        with atomic_write(temporary / "README.md") as card:
            card.write_text(_without_paths(model_card(draft, to, facts, in_card, notes), paths), encoding="utf-8")
    return launch, notes


def _without_paths(value: Any, paths: list[str]) -> Any:
    """A text, or a config, with `MODEL` where it has one of the paths."""
    text = json.dumps(value, ensure_ascii=False)
    for path in paths:
        text = text.replace(json.dumps(path, ensure_ascii=False)[1:-1], PLACEHOLDER)
    return json.loads(text)


def _without_map(draft: DraftCheckpoint, to: str, directory: Path, out: str) -> tuple[DraftCheckpoint, list[str]]:
    """A head with the target's output matrix, without its token map, which is written as freq_N.pt; and notes."""
    kept = draft.token_map
    if draft.head.config.own_vocabulary or kept.size == kept.vocab_size:
        return draft, []
    note = f"the head was trained on {kept.size} ids; {to} drafts all {kept.vocab_size}"
    if to == "sglang" and not draft.head.config.drafts_at_once:
        save_freq_list(directory / f"freq_{kept.size}.pt", kept)
        note = f"SGLang drafts the {kept.size} ids of the head with --speculative-token-map {out}/freq_{kept.size}.pt"
    return replace(draft, token_map=TokenMap.identity(kept.vocab_size)), [note]


def _write(result: Exported, directory: Path, facts: TargetFacts) -> None:
    if result.weights == MODEL_FILE:
        write_gguf(directory / MODEL_FILE, result.config, result.tensors, vocabulary_of(facts))
        return
    if result.weights == PICKLE:
        with atomic_write(directory / PICKLE) as temporary:
            torch.save({name: value.detach().cpu().contiguous() for name, value in result.tensors.items()}, temporary)
    else:
        save_tensors(directory / result.weights, result.tensors)
    write_json(directory / "config.json", result.config)


def _write_own(draft: DraftCheckpoint, directory: Path, facts: TargetFacts, hidden: list[str]) -> None:
    """Write a draft directory. It states every setting that was resolved by a rule when a foreign checkpoint was read.
    The paths `hidden` are left out."""
    meta = {key: value for key, value in draft.meta.items() if key not in ("format", *MEASUREMENTS)}
    known = meta.get("target") or {}
    if known.get("name") != facts.name:
        # Facts about another target do not hold for this one. A target has no name if an earlier push removed it.
        known = {} if known.get("name") else known
        meta["target"] = {**known, "name": facts.name, "revision": facts.revision}
    if draft.resolutions:
        meta["imported"] = [one.line for one in draft.resolutions]
    if meta["target"]["name"] in hidden:
        # The path exists on this machine alone; a directory that names no target asks for --target.
        meta["target"] = {key: value for key, value in meta["target"].items() if key != "name"}
    if (init := meta.get("init")) is not None and init["revision"] is None:
        meta["init"] = {key: value for key, value in init.items() if key != "name"}
        meta["training"] = {**meta["training"], "init": None}
    meta = _without_paths(meta, hidden)
    cut = draft.head.config.own_vocabulary or draft.token_map.size < draft.token_map.vocab_size
    token_map = draft.token_map if cut else None
    save_draft(directory, draft.head.state_dict(), draft.head.config, token_map, meta)
    if "measured" in draft.meta:
        write_json(directory / "measured.json", draft.meta["measured"])


def _check_same(
    draft: DraftCheckpoint, back: DraftCheckpoint, wanted: HeadConfig, state: dict[str, torch.Tensor]
) -> None:
    """Raises `ExportError` that lists every difference between the head and the export that was read back."""
    found: list[str] = []
    read, config = back.head.state_dict(), back.head.config
    state = {name: value for name, value in state.items() if name != "embed_tokens.weight"}
    found += sorted(state.keys() ^ read.keys())
    found += [
        name
        for name in sorted(state.keys() & read.keys())
        if state[name].dtype != read[name].dtype or not torch.equal(state[name].cpu(), read[name])
    ]
    if type(config) is not type(wanted):
        found.append(f"the kind of head ({back.kind})")
    elif replace(config, rope_parameters={}) != replace(wanted, rope_parameters={}):
        differing = [key for key, value in wanted.to_dict().items() if config.to_dict()[key] != value]
        found += [key for key in differing if key != "rope_parameters"]
    if rope_difference(config, wanted.rope_parameters):
        found.append("rope_parameters")
    if back.token_map != draft.token_map:
        found.append("the token map")
    if found:
        raise ExportError(
            f"the export does not read back as the same head: {', '.join(found)} differ. The export was deleted. This "
            "is a bug in the exporter; please report it"
        )
