"""A report on a draft checkpoint: what it is, what it needs and what looks wrong. The target is not loaded."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from toolkit.checkpoint.draft_dir import (
    DraftCheckpoint,
    dtype_of,
    embedding_distance,
    embeddings_differ,
    load_draft,
    other_target,
    rope_difference,
)
from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.files import read_checkpoint
from toolkit.checkpoint.open_head import facts_for, import_head
from toolkit.checkpoint.recognise import recognise
from toolkit.errors import TargetError
from toolkit.heads.head_config import full_attention_rope
from toolkit.targets.facts import TargetFacts, target_embedding, target_facts
from toolkit.tokenmap.token_map import TokenMapError
from toolkit.weights import WeightsError


@dataclass
class Report:
    """Rows of (what, value); `read`: how ambiguous settings were read; `wrong`: what looks wrong, with its cause.

    usable: it can be served or loaded at all. compared: with a target, where it is a head.
    """

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    usable: bool = True
    compared: bool = True

    def refuse(self, cause: str) -> None:
        """Note a cause that makes it unusable."""
        self.wrong.append(cause)
        self.usable = False

    def text(self) -> str:
        """The text that is printed."""
        width = max((len(name) for name, _ in self.rows), default=0)
        lines = [self.title, *(f"  {name:<{width}}  {value}" for name, value in self.rows)]
        for head, entries in (("how it was read", self.read), ("looks wrong", self.wrong)):
            if entries:
                lines += ["", f"{head}:", *(f"  {entry}" for entry in entries)]
        if not self.wrong:
            alone = "" if self.compared else ", but it was not compared with a target (--target MODEL)"
            lines += ["", f"nothing looks wrong{alone}"]
        return "\n".join(lines)


def inspect_head(directory: Path, target: str | None = None) -> Report:
    """A report of the checkpoint in `directory`; with a `target`, checked against its configuration and embedding.

    Damage and misfits are lines of the report, not errors; a target that cannot be found is. Raises `DraftDirError`
    for what is no draft head, `TargetError`.
    """
    files = read_checkpoint(directory)
    found = recognise(files.config, files.tensors)
    report = Report(f"{directory}: {found.head} draft head, in the form of {found.writer}")
    settings = () if files.weights[0].endswith(".gguf") else ("config.json",)
    report.rows = [("format", found.format), ("files", ", ".join((*settings, *files.weights)))]
    facts = facts_for(files, target)
    try:
        draft = load_draft(directory) if found.format == "toolkit" else import_head(files, facts=facts)
    except (DraftDirError, WeightsError, TokenMapError) as error:
        report.refuse(str(error))
        report.rows.append(("tensors", f"{len(files.tensors)}: {', '.join(sorted(files.tensors))}"))
        return report
    if facts is None and found.format == "toolkit":
        facts = _own_target(draft)
    _describe(report, draft)
    report.read = [one.line for one in draft.resolutions if not one.warning]
    report.wrong += [one.line for one in draft.resolutions if one.warning]
    report.compared = facts is not None
    if facts is not None:
        report.rows.append(("compared with", f"{facts.name} ({facts.architecture}, {facts.n_layers} layers)"))
        _compare(report, draft, facts)
    return report


def _own_target(draft: DraftCheckpoint) -> TargetFacts | None:
    """The target our own directory names, when it is a folder on this machine; inspecting fetches nothing."""
    name = (draft.meta.get("target") or {}).get("name")
    return target_facts(name) if name and Path(name).is_dir() else None


def _describe(report: Report, draft: DraftCheckpoint) -> None:
    config = draft.head.config
    state = draft.head.state_dict()
    count = sum(value.numel() for value in state.values())
    layers = config.mtp_layers * config.layers
    bad = [name for name, value in state.items() if not torch.isfinite(value).all()]
    for name in bad:
        report.refuse(f"{name} holds values that are not finite")
    report.rows += [
        ("parameters", f"{count:,} in {str(dtype_of(state)).removeprefix('torch.')}"),
        ("layer", f"width {config.hidden_size}, {config.num_attention_heads} heads, "
                  f"{config.num_key_value_heads} key-value heads of {config.head_dim}, MLP {config.intermediate_size}"
                  f"{'' if layers == 1 else f'; {layers} such layers'}"),
        ("rope", ", ".join(f"{key} {value}" for key, value in config.rope_parameters.items())),
    ]  # fmt: skip
    own = f"{draft.token_map.size:,} of {draft.token_map.vocab_size:,} ids"
    shared = f"{own}, with the target's output matrix"
    report.rows.append(("draft vocabulary", own if config.own_vocabulary else shared))
    ids, needs = config.features.aux_layer_ids, ""
    if ids is not None:
        report.rows.append(("aux_layer_ids", f"{list(ids)} (id k = input of layer k = output of layer k-1)"))
        needs = f", {config.features.needed_layers} layers or more"
    switches = [one.name for one in fields(config) if one.name in config.variants() and isinstance(one.default, bool)]
    if switches:
        on = ", ".join(name for name in switches if getattr(config, name))
        report.rows.append(("variants", on or f"none: {config.kind} as published"))
    stated = (draft.meta.get("target") or {}).get("name")
    named = f"it names {stated}" if stated else "it names none, give --target"
    size = f"width {config.hidden_size}, vocabulary {config.vocab_size:,}{needs}"
    report.rows.append(("needs", f"a target of {size}; {named}"))
    init = draft.meta.get("init")
    if init:
        report.rows.append(
            ("trained from", f"{init.get('name', 'a local head')}, sha256 {init['weights_sha256'][:12]}")
        )
    measured = draft.meta.get("measured")
    if measured:
        pays = "" if measured.get("recommended", True) else ", not faster than plain decoding there"
        best = f"best shape {measured.get('best_shape')}{pays}"
        report.rows.append(("measured", f"{best}, {measured.get('date', 'no date')}"))


def _compare(report: Report, draft: DraftCheckpoint, facts: TargetFacts) -> None:
    """Note where the head does not fit the target."""
    config = draft.head.config
    for what, have, need in (
        ("width", config.hidden_size, facts.hidden_size),
        ("vocab_size", config.vocab_size, facts.vocab_size),
    ):
        if have != need:
            report.refuse(f"{what} {have}, the target's is {need}: it cannot work with {facts.name}")
    if config.features.needed_layers > facts.n_layers:
        ids = list(config.features.aux_layer_ids or ())
        report.refuse(f"aux_layer_ids {ids}: the target has {facts.n_layers} layers")
    found = (rope_difference(config, full_attention_rope(facts.config)), other_target(draft, facts))
    report.wrong += [one for one in found if one is not None]
    if draft.own_embedding is None or not report.usable:
        return
    try:
        distance = embedding_distance(draft.own_embedding, target_embedding(facts))
    except TargetError as error:
        report.wrong.append(f"its embedding could not be compared with the target's: {error}")
        return
    if embeddings_differ(distance):
        report.refuse(f"its embedding differs from the target's, which the engine reads, by {100 * distance:.1f} %")
