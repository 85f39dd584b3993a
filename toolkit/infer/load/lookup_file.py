"""The option `lookup` and the texts of `lookup_corpus`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toolkit.chat_rows import ROLES, read_message
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.choose_drafter import Draft, Lookup
from toolkit.infer.drafters.lookup import SEPARATOR, SuffixAutomaton
from toolkit.infer.load.config import ConfigError, EngineConfig
from toolkit.jsonl import DataError, read_rows
from toolkit.log import get_logger
from toolkit.targets.target import Target

logger = get_logger(__name__)

MOST_TOKENS = 262144  # of a corpus, its last ones: an automaton takes some 450 bytes a token


def lookup_of(config: EngineConfig, target: Target, draft: Draft | None, *, adaptive: bool) -> Lookup | None:
    """Returns lookup beside the head `draft`; None if it is not wanted. adaptive: it is wanted unless refused.

    Raises ConfigError if it is asked for without a head or with CUDA graphs, and for a corpus that cannot be read.
    """
    asked = asked_for_lookup(config)
    if draft is None or not (asked or (adaptive and config.lookup is None)):
        return None
    if config.lookup is False:
        raise ConfigError(f"`lookup_corpus` is {config.lookup_corpus}, but `lookup` is off; leave one of them out")
    name = "lookup" if config.lookup else "lookup_corpus"
    if asked and not isinstance(draft, DraftCheckpoint):
        raise ConfigError(f"`{name}` is given, but n-gram lookup has no head beside it; give a head with `draft`")
    if asked and config.cuda_graph_max_bs is not None:
        raise ConfigError(
            f"`{name}` and `cuda_graph_max_bs` are both given; a graph drafts with the head alone: leave one out"
        )
    if not isinstance(draft, DraftCheckpoint):
        return None
    if config.lookup_corpus is None:
        return Lookup()
    texts = list(_texts(Path(config.lookup_corpus)))
    ids = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokens = [token for one in ids if one for token in (*one, SEPARATOR)]
    if not tokens:
        raise ConfigError(f"`lookup_corpus` is {config.lookup_corpus}, which has no text of an answer; leave it out")
    corpus = SuffixAutomaton()
    corpus.extend(tokens[-MOST_TOKENS:])
    logger.info("lookup searches %d of %d tokens of %s", len(corpus.tokens), len(tokens), config.lookup_corpus)
    return Lookup(corpus)


def asked_for_lookup(config: EngineConfig) -> bool:
    """Returns whether an option asks for lookup; else it is a part of adaptive drafting."""
    return bool(config.lookup) or config.lookup_corpus is not None


def _texts(path: Path) -> Iterator[str]:
    """Yields the answers of a file: of a jsonl file those of the assistant, or each row's `text`; else the file."""
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
                yield row["text"]
            else:
                raise ConfigError(f"{path}:{number} has neither `messages` nor `text`; one of them is needed")
    except (OSError, UnicodeDecodeError, DataError) as error:
        raise ConfigError(f"`lookup_corpus` is {path}, which cannot be read: {error}") from error
