"""Reports of whatever a path or a hub id names: a draft head, a target or a token map. No target is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft, problems
from toolkit.checkpoint.files import locate, read_checkpoint, target_named
from toolkit.checkpoint.model_card import head_rows
from toolkit.checkpoint.native_mtp import find_native, why_unread
from toolkit.checkpoint.open_head import OURS, facts_for, import_head, recognise
from toolkit.errors import DraftDirError, TargetError, TokenMapError, UnknownFamilyError
from toolkit.heads.decoder_layer import STATIC_ROPE_TYPES
from toolkit.heads.families import at
from toolkit.heads.head_config import HeadError, default_aux_layer_ids, full_attention_rope
from toolkit.targets.chat_templates import REMEDY
from toolkit.targets.facts import TargetFacts, bare_facts, target_facts
from toolkit.targets.load import load_tokenizer
from toolkit.targets.target import end_of_turn_id
from toolkit.tokenmap.build import forced_ids_for, problems_of
from toolkit.tokenmap.files import read_ids
from toolkit.tokenmap.token_map import TokenMap
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


def inspect_path(path: str, compare_with: str | None = None) -> Report:
    """The report of a draft head, a target or a token map. compare_with: the target that heads and maps are checked
    against.

    Raises `DraftDirError` for what is none of them and for a target that is to be compared, `TargetError`,
    `TokenMapError`.
    """
    if Path(path).is_file() and Path(path).suffix in (".pt", ".safetensors"):
        return inspect_map(path, compare_with)
    target = target_named(path)
    if target is None:
        return inspect_head(locate(path), compare_with)
    if compare_with is not None:
        raise DraftDirError(
            f"{path} is a target, and `target` {compare_with} is given, which is for draft heads only; leave it out"
        )
    return inspect_target(*target)


# -- draft heads -------------------------------------------------------------------------------------------------------


def inspect_head(directory: Path, target: str | None = None) -> Report:
    """A report of the checkpoint in `directory`; with a `target`, checked against its configuration and embedding.

    Damage and misfits are lines of the report, not errors; a target that cannot be found is. Raises `DraftDirError`
    for what is no draft head, `TargetError`.
    """
    files = read_checkpoint(directory)
    kind, writer = recognise(files.config, files.tensors)
    report = Report(f"{directory}: {kind} draft head, in the form of {writer}")
    settings = () if files.weights[0].endswith(".gguf") else ("config.json",)
    report.rows = [("files", ", ".join((*settings, *files.weights)))]
    facts = facts_for(files, target)
    try:
        draft = load_draft(directory) if writer == OURS else import_head(files, facts=facts)
    except (DraftDirError, WeightsError, TokenMapError) as error:
        report.refuse(str(error))
        report.rows.append(("tensors", f"{len(files.tensors)}: {', '.join(sorted(files.tensors))}"))
        return report
    named = (draft.meta.get("target") or {}).get("name")
    if facts is None and writer == OURS and named and Path(named).is_dir():
        facts = target_facts(named)  # a folder on this machine; inspecting fetches nothing
    _describe(report, draft, named)
    report.read = [one.line for one in draft.resolutions if not one.warning]
    report.wrong = [one.line for one in draft.resolutions if one.warning]
    report.compared = facts is not None
    if facts is not None:
        report.rows.append(("compared with", f"{facts.name} ({facts.architecture}, {facts.n_layers} layers)"))
    refused, warned = problems(draft, facts)
    report.wrong += refused + warned
    report.usable = not refused
    return report


def _describe(report: Report, draft: DraftCheckpoint, named: str | None) -> None:
    config = draft.head.config
    report.rows += head_rows(draft)
    needs = f", {config.features.needed_layers} layers or more" if config.features.needed_layers else ""
    says = f"it names {named}" if named else "it names none, give --target"
    size = f"width {config.hidden_size}, vocabulary {config.vocab_size:,}{needs}"
    report.rows.append(("needs", f"a target of {size}; {says}"))
    if init := draft.meta.get("init"):
        name = init.get("name", "a local head")
        report.rows.append(("trained from", f"{name}, sha256 {init['weights_sha256'][:12]}"))
    if measured := draft.meta.get("measured"):
        pays = "" if measured.get("recommended", True) else ", not faster than plain decoding there"
        best = f"best shape {measured.get('best_shape')}{pays}"
        report.rows.append(("measured", f"{best}, {measured.get('date', 'no date')}"))


# -- targets -----------------------------------------------------------------------------------------------------------


def inspect_target(name: str, revision: str | None = None) -> Report:
    """A report of a target by its name: its sizes and what a draft head would read of it.

    Raises `TargetError` when it has no configuration of a causal LM.
    """
    try:
        facts = target_facts(name, revision)
    except UnknownFamilyError as error:  # then all that is known is in its config.json
        facts = bare_facts(name, revision)
        report = Report(f"{name}: target, {facts.architecture}", _sizes(facts))
        _mtp(report, facts)
        report.refuse(str(error))
        return report
    rope = full_attention_rope(facts.config)
    report = Report(f"{name}: target, {facts.architecture}", _sizes(facts))
    report.rows.append(("rope", ", ".join(f"{key} {value}" for key, value in rope.items())))
    if rope.get("rope_type", "default") not in STATIC_ROPE_TYPES:
        report.wrong.append(f"rope_type {rope['rope_type']}: a draft head with the same rotation cannot be built")
    try:
        aux = f"{list(default_aux_layer_ids(facts.n_layers))} by default (id k = input of layer k)"
    except HeadError:
        aux = "too few for three"
        report.wrong.append(f"{facts.n_layers} layers: {aux} auxiliary layers; set train.head.aux_layer_ids")
    report.rows.append(("aux layers", aux))
    _tokenizer(report, name, revision, facts.vocab_size)
    _mtp(report, facts)
    return report


def _sizes(facts: TargetFacts) -> list[tuple[str, str]]:
    return [
        ("layers", str(facts.n_layers)),
        ("hidden", str(facts.hidden_size)),
        ("vocabulary", f"{facts.vocab_size:,} rows"),
        ("context", f"{facts.max_context:,} positions" if facts.max_context else "not stated"),
        ("dtype", facts.dtype or "not stated"),
    ]


def _tokenizer(report: Report, name: str, revision: str | None, vocab_size: int) -> None:
    try:
        tokenizer = load_tokenizer(name, revision)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        report.rows += [("tokenizer", f"{len(tokenizer):,} ids"),
                        ("chat template", "present" if has_template else "absent")]  # fmt: skip
        end_of_turn_id(tokenizer)
    except TargetError as error:
        report.refuse(str(error))
        return
    if not has_template:
        report.wrong.append(f"no chat template: {REMEDY}")
    if len(tokenizer) > vocab_size:
        report.refuse(f"the tokenizer has {len(tokenizer)} ids, the embedding {vocab_size} rows")


def _mtp(report: Report, facts: TargetFacts) -> None:
    """The MTP modules that the engine finds, or why it finds none."""
    use = None
    try:
        found = find_native(facts)
    except DraftDirError as error:
        said = "not those that its config states"
        report.wrong.append(str(error))
    except TargetError as error:
        said = f"unknown, since its weights cannot be searched ({error})"
    else:
        said = "none"
        if found is not None:
            places = [at(found.family.block, k, facts.n_layers).rstrip(".") for k in range(found.count)]
            said, why = f"{found.count}: {', '.join(places)}", why_unread(found)
            use = f"drafts unless --draft none ({found.family.title})" if why is None else f"no: {why}"
    report.rows.append(("native MTP layers", said))
    if use is not None:
        report.rows.append(("native MTP is used", use))


# -- token maps --------------------------------------------------------------------------------------------------------


def inspect_map(path: str, target: str | None = None) -> Report:
    """A report of the ids in a file; with a `target`, checked against its vocabulary and special ids.

    Raises `TokenMapError` for a file of another kind, `TargetError`.
    """
    ids = read_ids(path)
    report = Report(f"{path}: token map", [("ids", f"{ids.numel():,}")], compared=target is not None)
    vocab_size, forced = 1, tuple[int, ...]()
    if ids.numel():
        report.rows.append(("range", f"{int(ids.min()):,} to {int(ids.max()):,}"))
        vocab_size = int(ids.max()) + 1
    if target is not None:
        vocab_size = target_facts(target).vocab_size
        forced = forced_ids_for(load_tokenizer(target), (), vocab_size)
        report.rows.append(("compared with", f"{target} ({vocab_size:,} ids)"))
    report.wrong = problems_of(ids, vocab_size, forced)
    try:
        TokenMap.from_ids(ids, vocab_size)
    except TokenMapError as error:
        report.usable = False
        report.wrong = report.wrong or [str(error)]
    if report.wrong:
        report.wrong.append("`toolkit build-token-map --repair` writes a map without these")
    return report
