"""Exports a head: written into a temporary folder, read back, compared, and only then renamed to the wanted folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from toolkit.checkpoint.draft_dir import MEASUREMENTS, DraftCheckpoint, load_draft, rope_difference, save_draft
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.export_checks import PLACEHOLDER, checked, local_paths, without_paths
from toolkit.checkpoint.exported import Exported
from toolkit.checkpoint.files import PICKLE, read_checkpoint
from toolkit.checkpoint.formats import exported
from toolkit.checkpoint.gguf_head import MODEL_FILE, write_gguf
from toolkit.checkpoint.launch_lines import Shape, launch_line
from toolkit.checkpoint.model_card import model_card
from toolkit.checkpoint.open_head import import_head
from toolkit.heads.head_config import HeadConfig
from toolkit.log import get_logger
from toolkit.targets.facts import TargetFacts
from toolkit.targets.gguf_vocabulary import vocabulary_of
from toolkit.tokenmap.files import save_freq_list
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import atomic_write, save_tensors, write_json

log = get_logger(__name__)


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
    if out.exists():
        raise ExportError(f"{out} exists; give a new folder, or move this one away")
    warnings = checked(draft, facts)
    for warning in warnings:
        log.warning("%s", warning)
    paths = local_paths(facts)
    hidden = paths if name is not None else []
    here, there = str(out.resolve()), name or out.name
    launch, in_card = (launch_line(to, draft.head.config, facts, where, shape) for where in (here, there))
    if to == "toolkit" and facts.name in hidden:
        in_card += f" --target {PLACEHOLDER}"
    wanted: HeadConfig
    left_out: tuple[str, ...]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.part-"))
    try:
        if to == "toolkit":
            notes = [one.line for one in draft.resolutions]
            _write_own(draft, temporary, facts, hidden)
            back, wanted, added, left_out = load_draft(temporary), draft.head.config, {}, ()
        else:
            draft, map_notes = _without_map(draft, to, temporary, here)
            result = exported(draft, to, facts, shape.chain)
            notes = result.notes + map_notes + [one.line for one in draft.resolutions if one.warning]
            result.config = without_paths(result.config, hidden)
            _write(result, temporary, facts)
            back = import_head(read_checkpoint(temporary), facts=facts)
            wanted, added, left_out = result.config_of_head, result.added, result.left_out
        state = {name: value for name, value in draft.head.state_dict().items() if name not in left_out}
        _check_same(draft, back, wanted, {**state, **added})
        notes += warnings
        if paths:
            where = "the model card and config.json" if hidden else "the model card"
            notes.append(
                f"the exporter's target is a local folder; in {where} replace {PLACEHOLDER} by a path or hub id"
            )
        with atomic_write(temporary / "README.md") as card:
            card.write_text(without_paths(model_card(draft, to, facts, in_card, notes), paths), encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp makes private folders
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return launch, notes


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
    meta = without_paths(meta, hidden)
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
