"""A target that OpenAI-compatible servers run: what prompts and rollouts need of it here, without its weights."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from toolkit.targets.facts import TargetFacts, target_facts
from toolkit.targets.load import load_tokenizer, split_revision
from toolkit.targets.target import stated_context, stop_ids_of


@dataclass(frozen=True)
class ServedTarget:
    """servers: URLs, or files that list some. served_model: the target's name there; None: its own.

    max_context: of the target's config, in tokens; None if it states none.
    """

    facts: TargetFacts
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    max_context: int | None
    servers: tuple[str, ...]
    served_model: str | None = None

    @property
    def name(self) -> str:
        return self.facts.name


def served_target(
    name: str,
    revision: str | None,
    servers: tuple[str, ...],
    served_model: str | None = None,
    chat_template: str | None = None,
) -> ServedTarget:
    """Read a target's configuration and tokenizer; takes the same names as `load_target`. Raises `TargetError`."""
    name, revision = split_revision(name, revision)
    facts, tokenizer = target_facts(name, revision), load_tokenizer(name, revision, chat_template)
    try:
        generation = GenerationConfig.from_pretrained(facts.source, revision=facts.revision or "main")
    except OSError:  # it has none
        generation = None
    stop_ids = stop_ids_of(generation, facts.config, tokenizer, facts.vocab_size)
    return ServedTarget(facts, tokenizer, stop_ids, stated_context(facts.config), servers, served_model)
