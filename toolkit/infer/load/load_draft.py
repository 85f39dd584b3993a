"""Loads a draft by the user's name for it, and fits it to the target."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.chat_rows import ROLES, encodable, read_message
from toolkit.checkpoint.draft_dir import DraftCheckpoint, DraftDirError, check_draft_matches
from toolkit.checkpoint.native_mtp import NativeModules, find_native, load_native
from toolkit.checkpoint.open_head import open_head
from toolkit.errors import TargetError, UnknownFamilyError
from toolkit.infer.drafters.choose_drafter import Draft, default_shape, says_confidence
from toolkit.infer.drafters.lookup import SEPARATOR, NgramLookup, SuffixAutomaton
from toolkit.infer.engine.config import NATIVE, NGRAM, ConfigError, EngineConfig, parse_shape
from toolkit.infer.load.search_file import Found
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.jsonl import DataError, read_rows
from toolkit.log import get_logger
from toolkit.targets.facts import TargetFacts, target_facts
from toolkit.targets.target import Target
from toolkit.tokenmap.build import forced_ids_for
from toolkit.tokenmap.files import load_freq_list
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError

logger = get_logger(__name__)

MOST_TOKENS = 262144  # of a corpus for lookup, its last ones: an automaton takes some 450 bytes a token


def load_draft(name: str | Path, target: str | None = None, revision: str | None = None) -> Draft:
    """Load n-gram lookup for "ngram" (a folder of that name is ./ngram), else a head by directory or hub id.

    target, revision: the head's target, if the head does not name one.
    Raises DraftDirError, WeightsError, TokenMapError, TargetError.
    """
    return NgramLookup() if str(name) == NGRAM else open_head(name, target=target, revision=revision)


def with_target(config: EngineConfig, draft: Draft | None) -> EngineConfig:
    """`config` with the target that the draft directory states, where it names none itself: name, revision,
    quantization ("auto" no longer) and chat template. Raises DraftDirError."""
    if config.target is None:
        assert isinstance(draft, DraftCheckpoint), "config.check() lets only a head go without a target"
        name, revision = stated_target(draft)
        config = replace(config, target=name, revision=revision)
    stated = draft.meta.get("target") if isinstance(draft, DraftCheckpoint) else None
    stated = stated if isinstance(stated, dict) else {}
    quantization = (stated.get("quantization") or "none") if config.quantization == "auto" else config.quantization
    return replace(config, quantization=quantization, chat_template=config.chat_template or stated.get("chat_template"))


def find_module(config: EngineConfig) -> tuple[TargetFacts, NativeModules] | None:
    """The MTP module in the target's own checkpoint, before the target's weights are loaded; None: decode plainly.

    Raises ConfigError if there is none and `draft` is "native" or an option asks for drafts. A checkpoint that cannot
    be searched is an error for "native", else there is no module.
    """
    asked, name = str(config.draft) == NATIVE, str(config.target)
    found: NativeModules | None = None
    try:
        facts = target_facts(name, config.revision)
        found = find_native(facts)
    except (DraftDirError, TargetError) as error:
        if asked or isinstance(error, UnknownFamilyError):
            raise
        # Weights other than safetensors have no names to search. An incomplete module is worth a word.
        level = logging.WARNING if isinstance(error, DraftDirError) else logging.DEBUG
        logger.log(level, "%s. Nothing is drafted", error)
    if found is not None:
        return facts, found
    if asked:
        raise ConfigError(f"`draft` is native, but {name} has no MTP module in its checkpoint; give a head")
    config.check_plain()
    return None


def native_draft(
    config: EngineConfig, target: Target, facts: TargetFacts, found: NativeModules
) -> DraftCheckpoint | None:
    """The module as a draft. One that cannot be read is a warning and None, unless drafts are asked for.

    Raises DraftDirError and WeightsError.
    """
    try:
        draft = load_native(target, facts, found)
    except (DraftDirError, WeightsError) as error:
        if str(config.draft) == NATIVE or config.of_drafts:
            raise
        logger.warning("%s. Nothing is drafted", error)
        return None
    logger.info(
        "drafting with the target's own MTP module (%s, %d); `draft` none switches it off",
        found.family.title,
        found.count,
    )
    return draft


def stated_target(draft: DraftCheckpoint) -> tuple[str, str | None]:
    """Name and revision of the target stated in a draft directory. Raises DraftDirError."""
    stated = draft.meta.get("target")
    if not isinstance(stated, dict) or not stated.get("name"):
        raise DraftDirError(
            f"{draft.path}/config.json does not say which target the head was trained for; name it with `target`"
        )
    return str(stated["name"]), stated.get("revision")


def measured_shape(draft: Draft, adaptive: bool, search: Found | None, batch: int) -> DraftShape:
    """The shape that this head was measured best with, else a chain of 3 for a native MTP module, or `default_shape`.

    search: what search.json found, if it holds here; batch: the largest batch of the engine.

    measured.json has `best_shape`, and for adaptive drafting the largest one, `adaptive_shape`, if it was measured."""
    if search is not None and search.best:
        if not adaptive:
            return search.shape(batch)
        others = [] if len(search.best) == 2 else [measured_shape(draft, adaptive, None, batch)]
        return DraftShape.covering([search.largest, *others])  # a kind that was not searched may draft as ever
    if isinstance(draft, DraftCheckpoint) and "native" in draft.meta:
        return DraftShape.chain(3)  # SGLang's default for MTP modules
    measured: Any = draft.meta.get("measured") if isinstance(draft, DraftCheckpoint) else None
    if not isinstance(draft, DraftCheckpoint) or not isinstance(measured, dict):
        return default_shape(draft)
    name = "adaptive_shape" if adaptive and "adaptive_shape" in measured else "best_shape"
    text = measured.get(name)
    return default_shape(draft) if text is None else parse_shape(str(text), f"{draft.path}/measured.json: {name}")


def check_takes_token_map(draft: Draft, path: str | Path) -> None:
    """Raise ConfigError unless the head uses the target's output matrix."""
    if isinstance(draft, DraftCheckpoint) and not draft.head.config.own_vocabulary:
        return
    if isinstance(draft, DraftCheckpoint):
        why = f"this {draft.kind} head has an output matrix of its own, over the {draft.token_map.size} ids of its map"
    else:
        why = "n-gram lookup scores no tokens"
    raise ConfigError(
        f"`token_map` is {path}, but {why}; leave it out (it chooses rows of the target's output matrix, for heads "
        "that share it)"
    )


def fit_draft(
    draft: Draft,
    target: Target,
    token_map: str | Path | None = None,
    confidence: float = 0.0,
) -> Draft:
    """Move `draft` to the target's device and dtype. With a `token_map` file, draft only its ids.

    confidence: see `DraftCheckpoint`.

    The file is a list of ids (freq_N.pt, the format of SGLang's --speculative-token-map; FR-Spec, arXiv 2502.14856).
    Missing ids of special tokens and ends of turns are added: FR-Spec's published maps lack them, and a head that
    cannot draft the end of a turn loses one step per answer. The answers do not depend on the map: the target still
    writes ids that are never drafted.
    Raises TokenMapError for duplicates and ids out of range, ConfigError, DraftDirError.
    """
    if token_map is not None:
        check_takes_token_map(draft, token_map)
    if not 0 <= confidence <= 1:
        raise ConfigError(f"`draft_confidence` is {confidence}; a chance from 0 to 1 is needed")
    if confidence and not (isinstance(draft, DraftCheckpoint) and says_confidence(draft)):
        raise ConfigError(
            f"`draft_confidence` is {confidence}, but this draft does not say how sure it is, as DSpark heads "
            "do; leave it out"
        )
    if not isinstance(draft, DraftCheckpoint):
        return draft
    check_draft_matches(draft, target)
    draft.head.cast(target.device, target.dtype)
    _warn_of_broken(draft)
    draft = replace(draft, draft_confidence=confidence)
    return draft if token_map is None else with_token_map(draft, target, token_map)


def with_token_map(draft: DraftCheckpoint, target: Target, token_map: str | Path) -> DraftCheckpoint:
    """`draft` with the ids of the file, and those of special tokens and ends of turns. Raises as `fit_draft`."""
    check_takes_token_map(draft, token_map)
    given = load_freq_list(token_map, target.vocab_size)
    forced = forced_ids_for(target.tokenizer, target.stop_ids, target.vocab_size)
    missing = sorted(set(forced) - set(given.ids.tolist()))
    if missing:
        logger.info("%s lacks %d ids of special tokens and ends of turns; they are added", token_map, len(missing))
        given = TokenMap.from_ids(given.ids.tolist() + missing, target.vocab_size)
    logger.info("drafting with %d of the target's %d ids", given.size, target.vocab_size)
    return replace(draft, token_map=given)


def _warn_of_broken(draft: DraftCheckpoint) -> None:
    """Log the head's weights that are not finite. Its answers are right, so nothing else would tell."""
    state = draft.head.state_dict()
    bad = [name for name, value in state.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        logger.warning(
            "the head's %s%s hold values that are not finite: the answers are the target's, but drafting only costs "
            "time; train or export the head again, or leave it out",
            ", ".join(bad[:3]),
            " and others" if len(bad) > 3 else "",
        )


def read_corpus(config: EngineConfig, target: Target) -> SuffixAutomaton | None:
    """The earlier answers of `lookup_corpus` for lookup; None without the option. Raises ConfigError."""
    if config.lookup_corpus is None:
        return None
    texts = list(_texts(Path(config.lookup_corpus)))
    ids = [target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    tokens = [token for one in ids if one for token in (*one, SEPARATOR)]
    if not tokens:
        raise ConfigError(f"`lookup_corpus` is {config.lookup_corpus}, which has no text of an answer; leave it out")
    corpus = SuffixAutomaton()
    corpus.extend(tokens[-MOST_TOKENS:])
    logger.info("lookup searches %d of %d tokens of %s", len(corpus.tokens), len(tokens), config.lookup_corpus)
    return corpus


def _texts(path: Path) -> Iterator[str]:
    """The answers of a file: of a jsonl file those of the assistant, or each row's `text`; else the file."""
    try:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8-sig")
            return
        for number, row in read_rows(path):
            messages = row.get("messages") or row.get("conversations")
            if isinstance(messages, list):
                read = [read_message(one, f"{path}:{number}: a message") for one in messages]
                yield from (text for role, text in read if text and ROLES.get(role) == "assistant")
            elif isinstance(row.get("text"), str):
                yield encodable(row["text"], f"{path}:{number}: text")
            else:
                raise ConfigError(f"{path}:{number} has neither `messages` nor `text`; one of them is needed")
    except (OSError, UnicodeDecodeError, DataError) as error:
        raise ConfigError(f"`lookup_corpus` is {path}, which cannot be read: {error}") from error
