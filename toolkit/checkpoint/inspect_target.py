"""A report on a target: its sizes and what a draft head would read of it. Its weights are not loaded."""

from __future__ import annotations

from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.inspect_head import Report
from toolkit.checkpoint.native_mtp import find_native, why_unread
from toolkit.errors import TargetError, UnknownFamilyError
from toolkit.heads.decoder_layer import STATIC_ROPE_TYPES
from toolkit.heads.families import at
from toolkit.heads.head_config import HeadError, default_aux_layer_ids, full_attention_rope
from toolkit.targets.chat_templates import REMEDY
from toolkit.targets.facts import TargetFacts, bare_facts, target_facts
from toolkit.targets.load import load_tokenizer
from toolkit.targets.target import end_of_turn_id


def inspect_target(name: str, revision: str | None = None) -> Report:
    """A report of a target by its name. Raises `TargetError` when it has no configuration of a causal LM."""
    try:
        facts = target_facts(name, revision)
    except UnknownFamilyError as error:
        return _unknown_family(name, revision, error)
    rope = full_attention_rope(facts.config)
    try:
        aux = f"{list(default_aux_layer_ids(facts.n_layers))} by default (id k = input of layer k)"
    except HeadError:
        aux = "too few for three"
    report = Report(f"{name}: target, {facts.architecture}")
    report.rows = [
        *_sizes(facts),
        ("rope", ", ".join(f"{key} {value}" for key, value in rope.items())),
        ("aux layers", aux),
    ]
    if rope.get("rope_type", "default") not in STATIC_ROPE_TYPES:
        report.wrong.append(f"rope_type {rope['rope_type']}: a draft head with the same rotation cannot be built")
    if aux == "too few for three":
        report.wrong.append(
            f"{facts.n_layers} layers: too few for three auxiliary layers by default; set train.head.aux_layer_ids"
        )
    _tokenizer(report, name, revision, facts.vocab_size)
    _mtp(report, facts)
    return report


def _unknown_family(name: str, revision: str | None, error: UnknownFamilyError) -> Report:
    """A report from the config.json of a model that cannot be a target here. Raises `TargetError` without one."""
    facts = bare_facts(name, revision)
    report = Report(f"{name}: target, {facts.architecture}", _sizes(facts))
    _mtp(report, facts)
    report.refuse(str(error))
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
    except TargetError as error:
        report.rows.append(("tokenizer", "none that loads"))
        report.wrong.append(str(error))
        report.usable = False
        return
    report.rows.append(("tokenizer", f"{len(tokenizer):,} ids"))
    has_template = bool(getattr(tokenizer, "chat_template", None))
    report.rows.append(("chat template", "present" if has_template else "absent"))
    if has_template:
        try:
            end_of_turn_id(tokenizer)
        except TargetError as error:
            report.refuse(str(error))
    else:
        report.wrong.append(f"no chat template: {REMEDY}")
    if len(tokenizer) > vocab_size:
        report.wrong.append(f"the tokenizer has {len(tokenizer)} ids, the embedding {vocab_size} rows")
        report.usable = False


def _mtp(report: Report, facts: TargetFacts) -> None:
    """The MTP modules that the engine finds, or why it finds none."""
    try:
        found = find_native(facts)
    except DraftDirError as error:
        report.rows.append(("native MTP layers", "not those that its config states"))
        report.wrong.append(str(error))
        return
    except TargetError as error:
        report.rows.append(("native MTP layers", f"unknown, since its weights cannot be searched ({error})"))
        return
    if found is None:
        report.rows.append(("native MTP layers", "none"))
        return
    places = [at(found.family.block, k, facts.n_layers).rstrip(".") for k in range(found.count)]
    report.rows.append(("native MTP layers", f"{found.count}: {', '.join(places)}"))
    why = why_unread(found)
    use = f"drafts unless --draft none ({found.family.title})" if why is None else f"no: {why}"
    report.rows.append(("native MTP is used", use))
