"""The context of engines that are open side by side: as long as what is measured.

Without it each engine takes a cache for the target's whole context, or for most of the free memory, from the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from toolkit.bench.prompts import Prompt
from toolkit.data.chat_template import prompt_ids
from toolkit.infer.load.config import EngineConfig
from toolkit.targets.target import Target

TOKENS_AGAIN = 3  # most tokens that one of an answer is in the next prompt: incomplete characters are read as U+FFFD


def with_context(config: EngineConfig, longest: int, max_tokens: int) -> EngineConfig:
    """The options for prompts of up to `longest` tokens and answers of max_tokens; a given `context_length` stays.

    The cache follows from it: all rows at full length, each with room for drafted nodes, within the engine's share of
    the memory (see `MemorySettings`).
    """
    return replace(config, context_length=config.context_length or longest + max_tokens)


def longest_prompt(target: Target, prompts: Iterable[Prompt], max_tokens: int) -> int:
    """The most tokens of a prompt in these conversations, whose earlier answers have up to max_tokens."""
    longest = 1
    for prompt in prompts:
        messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        for turn in prompt.turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "."}]
        answers = TOKENS_AGAIN * max_tokens * (len(prompt.turns) - 1)
        longest = max(longest, len(prompt_ids(target.tokenizer, messages[:-1])) + answers)
    return longest
