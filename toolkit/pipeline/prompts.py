"""The prompts stage: the prompts of a run, from sources or written by the target itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.data.chat_template import template_text
from toolkit.data.conversations import read_conversations, user_turns, write_conversations
from toolkit.data.generation import GenerateFn
from toolkit.data.server_pool import ServerPool
from toolkit.data.synthesis import synthesise_prompts
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine
from toolkit.pipeline.progress_bar import progress_bar
from toolkit.pipeline.run import PROMPTS, Run
from toolkit.pipeline.stages import PipelineError
from toolkit.recipe import PromptSettings
from toolkit.targets.chat_templates import has_chat_template
from toolkit.targets.facts import ServedTarget
from toolkit.targets.target import Target
from toolkit.train.engine_client import engine_generate


def prompts_stage(run: Run) -> str:
    """The prompts of a run. Returns a headline."""
    return write_prompts(run.writing_target, run.recipe.prompts, run.recipe.seed, run.folder / PROMPTS)


def write_prompts(target: Target | ServedTarget, settings: PromptSettings, seed: int, out: Path) -> str:
    """Write {"id", "messages", "provenance"} rows to `out`: the sources' user turns first, then the target's own.

    What the target wrote before a kill is kept beside `out` (attempts.jsonl) and used again. Returns a headline.
    Memory: what `read_conversations` says, some 100 bytes a prompt, and all of what the target writes itself.
    Raises `ChatTemplateError` without a template, `PipelineError` for plain texts with one and for ids used twice.
    """
    template_text(target.tokenizer)  # rollouts need one: its absence is told before prompts are read
    parts = []
    provenance: dict[str, dict[str, object]] = {}
    if settings.sources:
        parts.append(read_conversations(settings.sources, settings.limit, seed))
        if parts[0][0].is_text and has_chat_template(target.tokenizer):
            raise PipelineError(
                "prompts.sources has plain texts, for base models to continue, and this target has a chat template; "
                "give chats, or set target.chat_template=none"
            )
        provenance = dict.fromkeys(parts[0].ids, {"method": "sources", "sources": list(settings.sources)})
    if settings.synthesize:
        own = out.with_name(f"{out.stem}_synthesised.jsonl") if settings.sources else out
        headline = _synthesise(target, settings, seed, own)
        if not settings.sources:
            return headline
        parts.append(read_conversations(own))
        twice = provenance.keys() & parts[1].ids
        if twice:
            raise PipelineError(
                f"id {min(twice)!r} is in the sources and among the synthesised prompts; rename it in the source"
            )
        provenance |= dict.fromkeys(parts[1].ids, {"method": "self-synthesis", "file": own.name})
    turns = sum(message["role"] == "user" for part in parts for one in part for message in one.messages)
    count = write_conversations(out, (user_turns(one) for part in parts for one in part), provenance)
    return f"{count} prompts, {turns} user turns"


def _synthesise(target: Target | ServedTarget, settings: PromptSettings, seed: int, out: Path) -> str:
    bar = progress_bar("prompts", "prompt", settings.synthesize, "attempts")
    with _generate(target, settings.max_running_requests) as generate, bar as show:
        stats = synthesise_prompts(
            generate,
            target.tokenizer,
            settings,
            out,
            target=target.name,
            seed=seed,
            on_progress=show,
        )
    return f"{stats['accepted']} prompts of {stats['attempts']} that the target wrote"


@contextmanager
def _generate(target: Target | ServedTarget, at_once: int) -> Iterator[GenerateFn]:
    if isinstance(target, ServedTarget):
        with ServerPool(target, at_once) as pool:
            yield pool.generate
        return
    engine = build_engine(EngineConfig(max_running_requests=at_once, prefix_cache=False), target).engine
    try:
        yield engine_generate(engine)
    finally:
        engine.close()
