"""The prompts stage, from sources or written by the target itself, and the rollouts stage, in which the target answers
them in the bundled engine or on servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from toolkit.data.chat_template import template_text
from toolkit.data.conversations import read_conversations, user_turns, write_conversations
from toolkit.data.generation import GenerateFn
from toolkit.data.rollouts import write_rollouts
from toolkit.data.server_pool import open_servers
from toolkit.data.synthesis import synthesise_prompts
from toolkit.infer.drafters.choose_drafter import Draft, default_shape
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_draft import fit_draft, load_draft
from toolkit.infer.load.load_engine import build_engine
from toolkit.pipeline.feature_capture import OnEnd, captured_features
from toolkit.pipeline.run import FEATURES, PROMPTS, ROLLOUTS, ROLLOUTS_STATS, Run
from toolkit.pipeline.stages import PipelineError, progress_bar
from toolkit.recipe import PromptSettings, RolloutSettings
from toolkit.targets.chat_templates import has_chat_template
from toolkit.targets.facts import ServedTarget
from toolkit.targets.target import Target
from toolkit.train.engine_client import engine_generate
from toolkit.weights import read_json

Capture = Callable[..., AbstractContextManager[OnEnd]]
"""(engine, conversations)"""


def prompts_stage(run: Run) -> str:
    """The prompts of a run. Returns a headline."""
    return write_prompts(run.target, run.recipe.prompts, run.recipe.seed, run.folder / PROMPTS)


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
    config = EngineConfig(max_running_requests=settings.max_running_requests, prefix_cache=False)
    with _generator(target, config) as (generate, _), bar as show:
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
def _generator(
    target: Target | ServedTarget,
    config: EngineConfig,
    draft: Draft | None = None,
    draft_used: str | None = None,
    capture: Callable[[Engine], AbstractContextManager[OnEnd]] | None = None,
) -> Iterator[tuple[GenerateFn, int]]:
    """Yields what writes texts, the target's servers or an engine, and the context length in tokens."""
    if isinstance(target, ServedTarget):
        with open_servers(target, config.max_running_requests) as pool:
            yield pool.generate, pool.max_context
        return
    engine = build_engine(config, target, draft).engine
    try:
        with nullcontext() if capture is None else capture(engine) as on_end:
            yield engine_generate(engine, draft_used, on_end), engine.context_length
    finally:
        engine.close()


def rollouts_stage(run: Run) -> str:
    """The rollouts of a run, and their features where the recipe keeps them. Returns a headline.

    Raises `PipelineError` when a split is empty.
    """
    settings, folder = run.recipe.rollouts, run.folder
    capture = None
    if settings.keep_features:
        capture = partial(
            captured_features, settings=run.recipe.train, max_tokens=settings.max_tokens, folder=folder / FEATURES
        )
    headline = answer_prompts(
        run.target, settings, run.recipe.seed, folder / PROMPTS, folder / ROLLOUTS, capture=capture
    )
    splits = read_json(folder / ROLLOUTS_STATS)["splits"]
    absent = [name for name, count in splits.items() if not count]
    if absent:
        raise PipelineError(
            f"the split {' and '.join(absent)} has no rollouts (rollouts.held_out is {settings.held_out}), and "
            "training needs both splits; give more prompts, or change rollouts.held_out"
        )
    return headline


def answer_prompts(
    target: Target | ServedTarget,
    settings: RolloutSettings,
    seed: int,
    prompts: str | Path,
    out: Path,
    draft_dir: Path | None = None,
    capture: Capture | None = None,
) -> str:
    """Answer every conversation of `prompts` into `out`, keeping the rows it has. Returns a headline.

    Memory grows by what `read_conversations` and `write_rollouts` hold of a conversation.

    capture: keeps features, given the engine and the conversations (see feature_capture.py); not with servers.
    Raises `PipelineError` for a draft head with servers, and when no conversation becomes a rollout.
    """
    conversations = read_conversations(prompts)
    draft = draft_used = None
    if draft_dir is not None:
        if isinstance(target, ServedTarget):
            raise PipelineError("--draft is for the bundled engine; servers draft by themselves, leave it out")
        draft, draft_used = fit_draft(load_draft(draft_dir, target.name, target.revision), target), str(draft_dir)
    config = EngineConfig(
        shape=None if draft is None else default_shape(draft).as_text(),
        verify="target",
        deterministic=settings.deterministic,
        max_running_requests=settings.max_running_requests,
        prefix_cache=capture is None,  # a prefix that the cache holds is not computed again, so it has no features
        disable_cuda_graph=capture is not None,  # a replay calls no hook that could keep them
    )
    keeping = None if capture is None else partial(capture, conversations=conversations)
    writer = _generator(target, config, draft, draft_used, keeping)
    bar = progress_bar("rollouts", "conversation", len(conversations), "tokens")
    with writer as (generate, max_context), bar as show:
        stats = write_rollouts(
            conversations,
            generate,
            target.tokenizer,
            settings,
            out,
            target=target.name,
            seed=seed,
            max_context=max_context,
            more_provenance=None if settings.server_model is None else {"server_model": settings.server_model},
            on_progress=show,
        )
    if not stats["rollouts"]:
        raise PipelineError(
            f"none of {len(conversations)} conversations became a rollout (skipped: {stats['skipped']}); give shorter "
            "prompts, another target, or servers that return token ids (no_round_trip) or have room for these prompts "
            "(refused)"
        )
    return f"{stats['rollouts']} rollouts, {stats['response_tokens']} response tokens"
