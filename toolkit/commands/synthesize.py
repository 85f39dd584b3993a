"""`toolkit synthesize`: the prompts of a run, from sources or written by the target itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.launch import set_threads
from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage
from toolkit.recipe import PromptSettings

if TYPE_CHECKING:
    from toolkit.targets.target import Target

HELP = "collect the prompts of a recipe: from its sources, and written by the target itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="collect again, even when the prompts are up to date")
    parser.add_argument("--out", type=Path, metavar="FILE", help="another place than the recipe's run folder")
    parser.epilog = "For example: toolkit synthesize prompts.synthesize=100 --out prompts/prompts.jsonl"


def run(args: argparse.Namespace) -> int:
    """Writes prompts: the run folder's stage, or --out."""
    job = run_of(args)
    job.stages()  # a recipe without prompts is refused before the target is loaded
    set_threads()
    if args.out is None:
        run_one_stage(job, "prompts", args.force)
        return 0
    if args.force:
        raise ArgumentsError(f"--force is for the recipe's run folder; remove {args.out.parent} to start over")
    print(write_prompts(job.target, job.recipe.prompts, job.recipe.seed, args.out))
    return 0


def write_prompts(target: Target, settings: PromptSettings, seed: int, out: Path) -> str:
    """Write {"id", "messages", "provenance"} rows to `out`: the sources' user turns first, then the target's own.

    What the target wrote before a kill is kept beside `out` (attempts.jsonl) and used again. Returns a headline.
    Memory: what `read_conversations` says, some 100 bytes a prompt, and all of what the target writes itself.
    """
    from toolkit.data.conversations import read_conversations, user_turns, write_conversations

    parts = []
    provenance: dict[str, dict[str, object]] = {}
    if settings.sources:
        parts.append(read_conversations(settings.sources, settings.limit, seed))
        provenance = dict.fromkeys(parts[0].ids, {"method": "sources", "sources": list(settings.sources)})
    if settings.synthesize:
        own = out.with_name(f"{out.stem}_synthesised.jsonl") if settings.sources else out
        told = _synthesise(target, settings, seed, own)
        if not settings.sources:
            return told
        parts.append(read_conversations(own))
        twice = provenance.keys() & parts[1].ids
        if twice:
            raise ArgumentsError(f"id {min(twice)!r} of the sources is one of self-synthesis; rename it in the source")
        provenance |= dict.fromkeys(parts[1].ids, {"method": "self-synthesis", "file": own.name})
    turns = sum(message["role"] == "user" for part in parts for one in part for message in one.messages)
    count = write_conversations(out, (user_turns(one) for part in parts for one in part), provenance)
    return f"{count} prompts, {turns} user turns"


def _synthesise(target: Target, settings: PromptSettings, seed: int, out: Path) -> str:
    from toolkit.commands.progress_bar import progress_bar
    from toolkit.data.synthesis import synthesise_prompts
    from toolkit.infer.cache.cache_manager import MemorySettings
    from toolkit.infer.engine.engine import Engine
    from toolkit.train.engine_generate import engine_generate

    engine = Engine(target, max_batch=settings.batch_size, memory=MemorySettings(prefix_cache=False))
    try:
        with progress_bar("prompts", "prompt", settings.synthesize, "attempts") as show:
            stats = synthesise_prompts(
                engine_generate(engine),
                target.tokenizer,
                settings,
                out,
                target=target.name,
                seed=seed,
                on_progress=show,
            )
    finally:
        engine.close()
    return f"{stats['accepted']} prompts of {stats['attempts']} that the target wrote"
