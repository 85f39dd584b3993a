"""Engines that are open side by side: with a context as long as what is measured, and with one share of a GPU's memory.

Without it each engine takes a cache for the target's whole context, or for most of the free memory, from the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from toolkit.bench.answers import Sampling
from toolkit.bench.prompts import Prompt
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.chat_template import prompt_ids
from toolkit.infer.cache.cache_manager import GPU_SHARE
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.target import Target

TOKENS_AGAIN = 3  # most tokens that one of an answer is in the next prompt: incomplete characters are read as U+FFFD


@dataclass(frozen=True)
class Trial:
    """What is measured: a head on its target, prompts and how they are answered, and the options of the engines."""

    target: Target
    draft: DraftCheckpoint
    prompts: Sequence[Prompt]
    sampling: Sampling
    config: EngineConfig

    @property
    def batch(self) -> int:
        return self.config.max_running_requests

    def at_batch(self, batch: int) -> Trial:
        return replace(self, config=replace(self.config, max_running_requests=batch))

    def with_room(self) -> Trial:
        """By verify rule `target`, in a context as long as the conversations need."""
        most = self.sampling.max_tokens
        config = replace(self.config, verify="target")
        return replace(self, config=with_context(config, longest_prompt(self.target, self.prompts, most), most))


class SideBySide(ExitStack):
    """A context manager that opens `count` engines of `config`, and closes them at its end.

    settings: of `build_engine`. On a GPU they share what one engine would take: the first has a `count`th of the
    cache's share of the memory, and the others a cache of the same size. On a CPU memory is taken when it is used, so
    each has its own share.
    """

    def __init__(self, config: EngineConfig, target: Target, count: int, **settings: Any) -> None:
        super().__init__()
        self._target, self._settings = target, settings
        if target.device.type == "cuda" and config.max_total_tokens is None:
            config = replace(config, mem_fraction_static=(config.mem_fraction_static or GPU_SHARE) / count)
        # All read the same prompts; with a prefix cache, later engines would reuse the work of earlier ones.
        self._config = replace(config, prefix_cache=False)

    def open(self, draft: Draft | None = None, shape: DraftShape | None = None, **options: Any) -> Engine:
        """Open an engine that drafts `shape` in every step, or decodes plainly without a draft.

        options: fields of EngineConfig."""
        text = None if draft is None or shape is None else shape.as_text()
        config = replace(self._config, **{"shape": text, "adaptive": False, **options})
        engine = self.enter_context(closing(build_engine(config, self._target, draft, **self._settings).engine))
        if self._target.device.type == "cuda":
            pool = engine.scheduler.memory.pool
            tokens = pool.capacity * pool.page_size
            self._config = replace(self._config, mem_fraction_static=None, max_total_tokens=tokens)
        return engine


def with_context(config: EngineConfig, longest: int, max_tokens: int) -> EngineConfig:
    """The options for prompts of up to `longest` tokens and answers of max_tokens; a given `context_length` stays.

    The cache follows from it: all rows at full length, each with room for drafted nodes, within the engine's share of
    the memory (see `MemorySettings`).
    """
    return replace(config, context_length=config.context_length or longest + max_tokens)


def with_eager_rounds(config: EngineConfig, target: Target) -> EngineConfig:
    """The options for rounds of which the host sees the parts: no CUDA graphs, which are also what a GPU compiles."""
    compiled = config.torch_compile and target.device.type == "cpu"
    return replace(config, disable_cuda_graph=True, cuda_graph_max_bs=None, torch_compile=compiled)


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
