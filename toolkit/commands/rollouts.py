"""`toolkit rollouts`: the target answers the prompts itself, with the bundled engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.launch import set_threads
from toolkit.commands.recipe_arguments import ArgumentsError, add_recipe_arguments, run_of, run_one_stage
from toolkit.log import get_logger
from toolkit.recipe import RolloutSettings

if TYPE_CHECKING:
    from toolkit.commands.feature_capture import OnEnd
    from toolkit.data.conversations import Conversation
    from toolkit.infer.engine.engine import Engine
    from toolkit.targets.target import Target

log = get_logger(__name__)

HELP = "let the target answer the prompts of a recipe, or of any file of conversations"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="answer again, even when the rollouts are up to date")
    group = parser.add_argument_group("other prompts than the recipe's run has (both are needed)")
    group.add_argument("--prompts", metavar="SOURCE", help=".jsonl(.gz), .json, a directory or hub:org/name[:split]")
    group.add_argument("--out", type=Path, metavar="FILE", help="rollouts.jsonl to write, or to go on with")
    group.add_argument("--draft", type=Path, metavar="DIR", help="a draft head that speeds the answers up")


def run(args: argparse.Namespace) -> int:
    """Writes rollouts: the run folder's stage, or --prompts into --out."""
    job = run_of(args)
    set_threads()
    if (args.prompts is None) != (args.out is None) or (args.draft is not None and args.out is None):
        raise ArgumentsError("--prompts SOURCE and --out FILE belong together (and --draft needs both)")
    if args.out is None:
        run_one_stage(job, "rollouts", args.force)
        return 0
    if args.force:
        raise ArgumentsError(f"--force is for the recipe's own rollouts; remove {args.out} to answer again")
    if job.recipe.rollouts.keep_features:
        log.info("rollouts.keep_features is for the recipe's own rollouts; none are kept of %s", args.out)
        job.recipe = replace(job.recipe, rollouts=replace(job.recipe.rollouts, keep_features=False))
    print(answer_prompts(job.target, job.recipe.rollouts, job.recipe.seed, args.prompts, args.out, args.draft))
    return 0


def answer_prompts(
    target: Target,
    settings: RolloutSettings,
    seed: int,
    prompts: str | Path,
    out: Path,
    draft_dir: Path | None = None,
    capture: Callable[[Engine, Sequence[Conversation]], AbstractContextManager[OnEnd]] | None = None,
) -> str:
    """Answer every conversation of `prompts` into `out`, keeping the rows it has. Returns a headline.

    Memory grows by what `read_conversations` and `write_rollouts` hold of a conversation.

    capture: keeps features, given the engine and the conversations (see feature_capture.py).
    """
    from toolkit.commands.progress_bar import progress_bar
    from toolkit.data.conversations import read_conversations
    from toolkit.data.rollouts import write_rollouts
    from toolkit.infer.cache.cache_manager import MemorySettings
    from toolkit.infer.engine.engine import Engine
    from toolkit.infer.load.load_draft import fit_draft, load_draft
    from toolkit.train.engine_generate import engine_generate

    if settings.torch_compile and target.device.type != "cpu":
        raise ArgumentsError(
            f"rollouts.torch_compile: true came with a target on {target.device}; it is for the CPU: set it to false"
        )
    conversations = read_conversations(prompts)
    draft = None
    if draft_dir is not None:
        draft = fit_draft(load_draft(draft_dir, target.name, target.revision), target)
    # What a prefix cache gives is not read anew, so it has no features.
    memory = MemorySettings(prefix_cache=capture is None)
    engine = Engine(target, draft, max_batch=settings.batch_size, memory=memory, torch_compile=settings.torch_compile)
    keeping = nullcontext() if capture is None else capture(engine, conversations)
    try:
        with keeping as on_end, progress_bar("rollouts", "conversation", len(conversations), "tokens") as show:
            stats = write_rollouts(
                conversations,
                engine_generate(engine, None if draft_dir is None else str(draft_dir), on_end),
                target.tokenizer,
                settings,
                out,
                target=target.name,
                seed=seed,
                max_context=engine.max_context,
                on_progress=show,
            )
    finally:
        engine.close()
    return f"{stats['rollouts']} rollouts, {stats['response_tokens']} response tokens"
