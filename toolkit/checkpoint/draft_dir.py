"""The draft directory: a self-describing checkpoint of a draft head. `toolkit serve --draft DIR` needs nothing else.

config.json        the head's sizes and variants, and a `toolkit` block that says which kind of head it is
                   (head_kinds.py), what it reads of the target, and where it came from
model.safetensors  the head's tensors; with d2t (offsets) and t2d (bool) where the head has a token map
measured.json      what `toolkit bench` measured with it (optional)
search.json        the fastest settings that `toolkit search` found, and the machine (optional)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.files import read_config
from toolkit.errors import DraftDirError, TargetError
from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.draft_head import DraftHead, empty_head, head_class
from toolkit.heads.head_config import HeadConfig, full_attention_rope
from toolkit.log import get_logger
from toolkit.targets.facts import TargetFacts, target_embedding
from toolkit.targets.load import full_name
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError, load_strict, load_tensors, read_json, save_tensors, write_json

log = get_logger(__name__)

FORMAT = 1
# Files beside the weights, by the key of `DraftCheckpoint.meta`.
MEASUREMENTS = {"measured": "measured.json", "search": "search.json"}
# Largest distance, as a share of the norm, at which two embeddings count as equal. Rounding and quantisation stay
# below it.
SAME_EMBEDDING = 0.15
# What a setting of a wrong type or size raises where a head is built with it.
SETTINGS_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError)


@dataclass(frozen=True)
class Resolution:
    """How an ambiguous setting was read: its value and the rule that decided it. `warning`: the value may well be
    wrong, or something was left out; the rule says what to do about it."""

    key: str
    value: Any
    rule: str
    warning: bool = False

    @property
    def line(self) -> str:
        """The text that is printed."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return f"{self.key} = {value}: {self.rule}"


@dataclass
class DraftCheckpoint:
    """A loaded head with the token map it drafts with. `meta` says where it came from (target, training, measured).

    A head that shares the target's output matrix has the whole vocabulary, unless it was trained on the ids of a map,
    or a map was given when it was loaded.
    weights: names of its files of weights in `path`. Of a foreign checkpoint: how its settings were read
    (`resolutions`), and the embedding that came with it, which must be the target's. draft_confidence: a block
    drafter ends a chain where the chance that all of it is accepted falls below this.
    """

    head: DraftHead
    token_map: TokenMap
    meta: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    weights: tuple[str, ...] = ()
    resolutions: list[Resolution] = field(default_factory=list)
    own_embedding: torch.Tensor | None = None
    draft_confidence: float = 0.0

    @property
    def kind(self) -> str:
        """Its name in head_kinds.py."""
        return self.head.config.kind


def save_draft(
    directory: str | Path,
    head_state: Mapping[str, torch.Tensor],
    config: HeadConfig,
    token_map: TokenMap | None,
    meta: Mapping[str, Any],
) -> Path:
    """Write a draft directory, or write it again.

    config.json is removed first and written last, so that a directory with a config is complete. Measurements of other
    weights are removed. token_map: None if the head drafts all ids, with the target's output matrix.
    """
    directory = Path(directory)
    assert token_map is not None or not config.own_vocabulary, f"an {config.kind} head has a token map"
    tensors = dict(head_state)
    # The writer is as strict as the reader: a head that cannot be read back must not be saved.
    load_strict(empty_head(config), tensors, "the head that is being saved")
    if token_map is not None:
        tensors |= {"d2t": token_map.d2t, "t2d": token_map.t2d}
    if not _same_tensors(directory / "model.safetensors", tensors):
        for name in MEASUREMENTS.values():
            (directory / name).unlink(missing_ok=True)
    (directory / "config.json").unlink(missing_ok=True)
    save_tensors(directory / "model.safetensors", tensors)
    block = {"format": FORMAT, "head": config.kind, **config.features.to_dict(), **meta}
    values = {name: value for name, value in config.to_dict().items() if name != "aux_layer_ids"}
    write_json(directory / "config.json", {**values, "toolkit": block})
    return directory


def _same_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    try:
        stored = load_tensors(path)
    except WeightsError:
        return False
    return stored.keys() == tensors.keys() and all(
        stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor.cpu())
        for name, tensor in tensors.items()
    )


def dtype_of(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """A head's dtype: that of its layer's projections."""
    return next(value.dtype for name, value in sorted(tensors.items()) if name.endswith("_proj.weight"))


def load_draft(directory: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> DraftCheckpoint:
    """Read a draft directory strictly. dtype: None keeps the stored one.

    Raises `DraftDirError` when files or keys are absent, `WeightsError` when tensors are missing, unexpected, wrongly
    shaped or the file is cut short.
    """
    directory = Path(directory)
    stored = read_config(directory)
    head = _head_of(stored, directory)
    config, tensors = head.config, load_tensors(directory / "model.safetensors")
    if config.own_vocabulary or "d2t" in tensors:
        token_map = _token_map_from(tensors, config, directory)
        tensors = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    else:
        token_map = TokenMap.identity(config.vocab_size)
    load_strict(head, tensors, str(directory / "model.safetensors"))
    head = head.cast(device, dtype or dtype_of(tensors)).eval().requires_grad_(False)
    meta = dict(stored["toolkit"])
    for key, name in MEASUREMENTS.items():
        if (directory / name).is_file():
            meta[key] = read_json(directory / name)
    return DraftCheckpoint(head=head, token_map=token_map, meta=meta, path=directory, weights=("model.safetensors",))


def _head_of(stored: Mapping[str, Any], directory: Path) -> DraftHead:
    """An empty head with these settings. Raises `DraftDirError` for settings that no head can have."""
    if not isinstance(stored.get("toolkit"), dict):
        raise DraftDirError(
            f"{directory}/config.json has no `toolkit` block, so it was not written by this project; "
            "`toolkit export --draft DIR --to toolkit --out NEW` converts heads of other projects"
        )
    block = stored["toolkit"]
    if block.get("format") != FORMAT or str(block.get("head")) not in HEAD_KINDS:
        raise DraftDirError(
            f"{directory}/config.json holds format {block.get('format')!r}, head {block.get('head')!r}; "
            f"this version reads format {FORMAT}, head {' or '.join(HEAD_KINDS)}"
        )
    if not isinstance(block.get("target") or {}, dict):
        raise DraftDirError(f"{directory}/config.json: `target` is {block['target']!r}; a mapping is needed")
    kind, values = head_class(block["head"]).config_class, {**stored}
    if "aux_layer_ids" in block:
        values["aux_layer_ids"] = block["aux_layer_ids"]
    lacking = kind.lacking(values)
    if lacking:
        raise DraftDirError(f"{directory}/config.json lacks {', '.join(lacking)}; copy the file again from its source")
    try:
        return empty_head(kind.from_dict(values))
    except SETTINGS_ERRORS as error:
        raise DraftDirError(f"{directory}/config.json: {error}") from error


def _token_map_from(tensors: dict[str, torch.Tensor], config: HeadConfig, directory: Path) -> TokenMap:
    absent = [name for name in ("d2t", "t2d") if name not in tensors]
    if absent:
        raise WeightsError(
            f"{directory}/model.safetensors lacks {', '.join(absent)}: the token map of the draft vocabulary"
        )
    token_map = TokenMap.from_d2t(tensors["d2t"], tensors["t2d"].numel())
    sizes = (config.output_size if config.own_vocabulary else token_map.size, config.vocab_size)
    if (token_map.size, token_map.vocab_size) != sizes or not torch.equal(token_map.t2d, tensors["t2d"].bool()):
        raise WeightsError(
            f"{directory}/model.safetensors: d2t ({token_map.size} ids) and t2d ({int(tensors['t2d'].sum())} ids) and "
            f"draft_vocab_size {sizes[0]} of {sizes[1]} do not describe the same token map"
        )
    return token_map


def misfits(draft: DraftCheckpoint, target: Target | TargetFacts) -> tuple[list[str], list[str]]:
    """Why the head cannot work on `target`: by its sizes, its layers or its embedding; and what may cost accept_length.

    Of a target that is not loaded only the embedding is read."""
    refused, warned = size_problems(draft, target), []
    if draft.own_embedding is not None and not refused:
        try:
            if isinstance(target, Target):
                theirs = target.embed_tokens.weight.detach().cpu()
            else:
                theirs = target_embedding(target)
            problem = embedding_problem(draft.own_embedding, theirs)
            refused += [f"it has {problem}"] if problem else []
        except TargetError as error:
            warned.append(f"its embedding could not be compared with the target's: {error}")
    warned += [
        rope_difference(draft.head.config, full_attention_rope(target.config)) or "",
        *_other_target(draft, target),
    ]
    return refused, [one for one in warned if one]


def check_draft_fits(draft: DraftCheckpoint, target: Target | TargetFacts) -> list[str]:
    """Raise `DraftDirError` if the head cannot work on `target`. Returns what may cost accept_length."""
    refused, warned = misfits(draft, target)
    if refused:
        raise DraftDirError(
            f"the draft head {draft.path or ''} does not fit the target {target.name}: {'; '.join(refused)}. "
            "Use it with the target it was trained for"
        )
    if isinstance(target, Target):
        draft.own_embedding = None  # checked once; it is as large as the target's
    return warned


def size_problems(draft: DraftCheckpoint, target: Target | TargetFacts) -> list[str]:
    """Sizes of the head that are not the target's, each with the tensor that reads it."""
    config, layer = draft.head.config, draft.head.warm_start().solved
    name = next(name for name, module in draft.head.named_modules() if module is layer)
    reads = f"whose states {name}.weight {list(layer.weight.shape)} reads"
    needed = (target.hidden_size, target.vocab_size)
    tensors = (reads, "to whose ids t2d and lm_head.weight belong" if config.own_vocabulary else "whose rows it scores")
    wrong = [
        f"{what} {have} (the target's is {need}), {tensor}"
        for (what, have), need, tensor in zip(config.target_sizes.items(), needed, tensors, strict=True)
        if have != need
    ]
    if config.features.needed_layers > target.n_layers:
        ids = list(config.features.aux_layer_ids or ())
        wrong.append(f"aux_layer_ids {ids} (the target has {target.n_layers} layers), {reads}")
    return wrong


def check_draft_matches(draft: DraftCheckpoint, target: Target) -> None:
    """Raise `DraftDirError` if the head cannot work on `target`; warn of what may cost accept_length."""
    for warning in check_draft_fits(draft, target):
        log.warning("%s", warning)


def problems(draft: DraftCheckpoint, facts: TargetFacts | None) -> tuple[list[str], list[str]]:
    """Why a head cannot be used, with this target if there is one, and what may cost accept_length."""
    bad = [name for name, value in draft.head.state_dict().items() if not torch.isfinite(value).all()]
    broken = [f"{', '.join(bad)} hold values that are not finite: its training diverged, or it is damaged"] * bool(bad)
    refused, warned = ([], []) if facts is None else misfits(draft, facts)
    return broken + refused, warned


def _other_target(draft: DraftCheckpoint, target: Target | TargetFacts) -> list[str]:
    """Warnings when the head names another target, or revision or chat template of it."""
    stated = draft.meta.get("target") or {}
    named, revision = stated.get("name"), stated.get("revision")
    found = []
    if named and full_name(named) != target.name:
        found.append(f"the head names {named} as its target, but the target given is {target.name}: are they equal?")
    elif named and None not in (revision, target.revision) and revision != target.revision:
        found.append(f"the head names {named}@{revision} as its target, but the revision given is {target.revision}")
    elif isinstance(target, Target) and stated.get("fingerprint") not in (None, target.fingerprint):
        found.append(f"the head was trained for another configuration of {target.name}: accept_length may fall")
    if isinstance(target, Target) and stated.get("template_sha256") not in (None, target.template_sha256):
        found.append("the target's chat template is not the one the head was trained with: accept_length may fall")
    return found


def rope_difference(config: HeadConfig, target_rope: Mapping[str, Any]) -> str | None:
    """A warning when the head's rotation is not the target's; None when it is."""

    def with_defaults(rope: Mapping[str, Any]) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": 10000.0, **rope}

    mine, theirs = with_defaults(config.rope_parameters), with_defaults(target_rope)
    differing = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    if not differing:
        return None
    shown = ", ".join(f"{key} {mine.get(key)} (the target's {theirs.get(key)})" for key in differing)
    return (
        f"the head's rope is not the target's: {shown}. Some heads were trained so; where a key was lost on the way, "
        "accept_length falls with the length of the context"
    )


def embedding_problem(mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """What is wrong with the embedding that came with a head, in place of which the target's is read; None: nothing."""
    distance = float("inf")
    if mine.shape == theirs.shape:
        distance = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
    if distance <= SAME_EMBEDDING:  # NaN counts as different
        return None
    return f"an embedding that differs from the target's by {100 * distance:.1f} %, which would be read in its place"
