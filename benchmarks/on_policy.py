"""What answers of the target's own are worth: two heads, the same prompts, settings, tokens and seed.

    python benchmarks/on_policy.py CONVERSATIONS [--limit 1200] [--tokens 50000] [--seeds 0 1 2] [a.b=c ...]

on-policy    trained on what the target answers to the first user turn of each conversation (rollouts, as a run makes
             them: temperature, length and held-out share are the recipe's)
off-policy   trained on the answers that stand in the file, cut at the same length

Both read the target's features of their text, stored once (not with train.data.features=online), and are taught by the
target's distribution there: only the text differs. Both get the token map of the rollouts. They are judged where heads
work: by the forecast on the held-out rollouts, and by the engine's accept_length on their prompts, greedy, with a chain
of 4. Every line has a process of its own.
Writes benchmarks/results/training-on-policy-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results_folder import leave
from rich.console import Console
from rich.table import Table
from training_cells import prepare as store_features
from training_jobs import CHAIN, DEFINITIONS, ROLLOUTS, Job, in_process_of_its_own, work

from toolkit.bench.records import command_line, make_record
from toolkit.bench.table import decimal
from toolkit.data.chat_template import prompt_ids
from toolkit.data.conversations import Conversation, read_conversations, write_conversations
from toolkit.data.generation import GenerationRequest, GenerationResult
from toolkit.data.rollouts import write_rollouts
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.jsonl import read_rows
from toolkit.pipeline.rollouts import answer_prompts
from toolkit.pipeline.token_map import map_rollouts
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe, result_settings
from toolkit.targets.target import Target
from toolkit.threads import users_threads

GIVEN = "the answers of the file"
VARIANTS = ("off-policy", "on-policy")


def first_turns(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    """The first user turn (behind a system message, if there is one) with its answer; others are left out."""
    for one in conversations:
        roles = [message["role"] for message in one.messages]
        start = roles.index("user") if "user" in roles else len(roles)
        if roles[start : start + 2] == ["user", "assistant"] and one.messages[start + 1]["content"].strip():
            yield replace(one, messages=one.messages[: start + 2])


def given_answers(conversations: Sequence[Conversation], target: Target) -> Any:
    """A `generate` that answers each prompt with what the file says."""
    tokenizer = target.tokenizer
    texts = {tuple(prompt_ids(tokenizer, one.messages[:-1])): one.messages[-1]["content"] for one in conversations}

    def generate(requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        for index, asked in enumerate(requests):
            ids = tokenizer(texts[tuple(asked.prompt_ids)], add_special_tokens=False)["input_ids"]
            cut = len(ids) >= asked.max_tokens
            ids = ids[: asked.max_tokens] if cut else [*ids, min(target.stop_ids)]
            yield index, GenerationResult(ids, "length" if cut else "stop")

    return generate


def prepare(args: argparse.Namespace, recipe: Recipe, place: Path) -> dict[str, Path]:
    """A run folder for each variant: rollouts and the token map. The held-out rows are the target's own in both."""
    chosen = recipe.target
    target = load_target(chosen.model, revision=chosen.revision, dtype=chosen.dtype, use="rollouts")
    conversations = list(first_turns(read_conversations(args.conversations)))[: args.limit]
    folders = {variant: place / variant for variant in VARIANTS}
    prompts = place / "prompts.jsonl"
    write_conversations(prompts, [replace(one, messages=one.messages[:-1]) for one in conversations])
    own = folders["on-policy"] / ROLLOUTS
    for folder in folders.values():
        (folder / ROLLOUTS).parent.mkdir(parents=True)
    pack(target)
    print(answer_prompts(target, recipe.rollouts, recipe.seed, prompts, own), file=sys.stderr)
    theirs = place / "given.jsonl"
    settings = replace(recipe.rollouts, temperature=1.0)  # not greedy: no id is taken for the target's argmax
    generate, limit = given_answers(conversations, target), target.max_context
    write_rollouts(conversations, generate, target.tokenizer, settings, theirs, target=GIVEN, seed=0, max_context=limit)
    # Of both only what both have: an answer of either can be empty, or too long.
    rows = {path: {row["id"]: row for _, row in read_rows(path)} for path in (own, theirs)}
    kept = [name for name in rows[own] if name in rows[theirs]]
    for path, folder in ((own, folders["on-policy"]), (theirs, folders["off-policy"])):
        chosen = [rows[own if rows[own][name]["split"] == "held_out" else path][name] for name in kept]
        (folder / ROLLOUTS).write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    for folder in folders.values():
        wanted = recipe.token_map
        map_rollouts(target, own, folder / "token_map", wanted.size, wanted.coverage)
    return folders


def in_own_process(job: Job) -> dict[str, Any]:
    """A process that has ended gives all its memory back, and its peak is its own."""
    row = in_process_of_its_own(work, job)
    print(f"{row}", file=sys.stderr, flush=True)
    return row


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line a head."""
    table = Table(title=f"heads: greedy, chain of {CHAIN}, held-out prompts", title_justify="left")
    for column in ("tokens", "seed", "answers", "accept_length", "forecast", "verify steps", "s/step", "tokens/s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            str(row["seed"]),
            row["variant"],
            with_interval(row["accept_length"], row["interval"]),
            with_interval(row["forecast"], row["forecast_interval"]),
            str(row["verify_steps"]),
            decimal(row["seconds_per_step"]),
            decimal(row["tokens_per_s"], 0),
        )
    Console(width=110).print(table)


def with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    return decimal(value) + ("" if interval is None else " [{:.2f}, {:.2f}]".format(*interval))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", type=Path, help=".jsonl with answers, as prepare-data reads it")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    parser.add_argument("--recipe", default=None, help="default: the demo recipe")
    parser.add_argument("--limit", type=int, default=1200, help="conversations, from the file's first")
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000], help="supervised, of a training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts that the engine answers, at most")
    parser.add_argument("--max-tokens", type=int, default=96, help="of the engine's answers")
    parser.add_argument("--at-once", type=int, default=1, help="lines measured at a time, which then share the machine")
    parser.add_argument("--note", help="what else the machine did, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    args.threads = int(users_threads() or 1)
    return args


def main() -> int:
    args = arguments()
    alike = ["train.data.features=offline", "rollouts.keep_features=false"]
    recipe = load_recipe(args.recipe or DEMO_RECIPE, [*alike, *args.overrides])
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folders = prepare(args, recipe, Path(name))
        if recipe.train.data.features == "offline":  # once, and not in every training
            for folder in folders.values():
                print(in_process_of_its_own(store_features, folder, folder, recipe), file=sys.stderr)
        jobs = [
            Job(variant, replace(recipe, seed=seed), folders[variant], tokens, None, args.prompts, args.max_tokens,
                args.threads)
            for tokens in args.tokens for seed in args.seeds for variant in VARIANTS
        ]  # fmt: skip
        with ThreadPoolExecutor(args.at_once) as waiting:
            rows = list(waiting.map(in_own_process, jobs))
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    settings = {key: value for key, value in settings.items() if key not in ("out", "recipe", "note")}
    settings |= {"conversations": args.conversations.name, "recipe": recipe.name, "target": recipe.target.model}
    settings |= {"rollouts": result_settings(recipe.rollouts), "train": result_settings(recipe.train)}
    command = f"python benchmarks/{command_line()}"
    record = make_record("training", command, settings, rows, definitions=DEFINITIONS, note=args.note)
    show(rows)
    leave(record, "training-on-policy", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
