"""Answers under many schedules, with `deterministic` and without: how many have the bits of the request alone.

    python benchmarks/deterministic.py [--draft runs/NAME/ckpt] [--limit 200] [--max-tokens 48] [--quantization int8]

Requests of mixed lengths, every second one sampled with a seed. First each runs alone, without reuse and drafts, in an
engine with the option and in one without. Then come the schedules, in both: an answer is `equal` if its tokens and all
log-probabilities are those of the same request alone, to the bit; `tokens_unequal` counts those whose tokens differ.
`cost` is the time with the option over the time without, the two in turns, in the median of --repeats.
Writes benchmarks/results/deterministic-<hardware>.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_folder import leave
from rich.console import Console
from rich.table import Table

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.prompts import builtin_prompts
from toolkit.bench.records import command_line, make_record
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine, device_of, load_models
from toolkit.infer.request.chat_prompt import chat_ids
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.targets.target import Target

ALONE = {"max_running_requests": 1, "prefix_cache": False, "adaptive": False, "lookup": False}
FOUR = {**ALONE, "max_running_requests": 4}
HEAD, NGRAM = "head", "n-gram"
# Options of the engine by schedule, and what drafts.
SCHEDULES: dict[str, tuple[dict[str, Any], str | None]] = {
    "batch 1": (ALONE, None),
    "batch 4": (FOUR, None),
    "batch 16": ({**ALONE, "max_running_requests": 16}, None),
    "prefix reuse": ({**FOUR, "prefix_cache": True}, None),
    "chunks of 64": ({**FOUR, "chunked_prefill_size": 64}, None),
    "chunks of 512": ({**FOUR, "chunked_prefill_size": 512}, None),
    "preempted": ({**ALONE, "max_running_requests": 16, "max_total_tokens": 0}, None),  # tokens: `preempting`
    "n-gram 4,1,5": ({**FOUR, "shape": "4,1,5"}, NGRAM),
    "chain 4,1,5": ({**FOUR, "shape": "4,1,5"}, HEAD),
    "tree 4,4,16": ({**FOUR, "shape": "4,4,16"}, HEAD),
    "tree 5,8,32": ({**FOUR, "shape": "5,8,32"}, HEAD),
    "adaptive, reuse": ({**FOUR, "prefix_cache": True, "adaptive": True, "lookup": None}, HEAD),
}
Bits = list[tuple[list[int], list[Any]]]


@dataclass(frozen=True)
class Asked:
    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def preempting(self) -> int:
        """Tokens of a cache that holds about three requests, and the longest one."""
        most = max(len(prompt) + one.max_tokens for prompt, one in zip(self.prompts, self.params, strict=True))
        mean = statistics.mean(map(len, self.prompts)) + max(one.max_tokens for one in self.params)
        return int(max(most + 128, 3 * mean)) // 16 * 16


def questions(target: Target, limit: int, max_tokens: int) -> Asked:
    """Conversations of one to eight of the built-in prompts; many begin with the same ones."""
    chance, asked = random.Random(0), [one.turns[0] for one in builtin_prompts()]
    found, most = Asked([], []), target.max_context - max_tokens - 64
    for number in range(limit):
        first = chance.choice((0, 0, 10, chance.randrange(len(asked))))
        texts = asked[first : first + chance.choice((1, 1, 2, 4, 8))] + [chance.choice(asked)]
        ids = chat_ids(target.tokenizer, [{"role": "user", "content": "\n".join(texts)}])
        found.prompts.append(ids[:most])
        settings = {"temperature": 0.8, "seed": number} if number % 2 else {}
        found.params.append(SamplingParams(max_tokens=chance.randint(8, max_tokens), logprobs=2, **settings))
    return found


@dataclass(frozen=True)
class Side:
    """A target loaded for engines with these options, and a head for it."""

    config: EngineConfig
    target: Target
    draft: Draft | None

    @classmethod
    def of(cls, config: EngineConfig) -> Side:
        return cls(config, *load_models(config, device_of(config)))

    def run(self, asked: Asked, options: dict[str, Any], drafts: str | None) -> tuple[float, list[Request]]:
        """Seconds and answers."""
        if "max_total_tokens" in options:
            options = {**options, "max_total_tokens": asked.preempting}
        draft = {None: None, HEAD: self.draft, NGRAM: NgramLookup()}[drafts]
        with closing(build_engine(self.config.with_options(**options), self.target, draft).engine) as engine:
            engine.generate(asked.prompts[:1], asked.params[:1])  # the first products of a process take longer
            began = time.perf_counter()
            answers = engine.generate(asked.prompts, asked.params)
            return time.perf_counter() - began, answers


def bits_of(answers: Sequence[Request]) -> Bits:
    return [(one.output_ids, one.logprobs) for one in answers]


def rows_of(
    name: str, sides: dict[bool, Side], asked: Asked, alone: dict[bool, Bits], repeats: int, dtype: str
) -> list[dict[str, Any]]:
    """The two rows of a schedule: with `deterministic` and without."""
    options, drafts = SCHEDULES[name]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    answers: dict[bool, list[Request]] = {}
    for turn in range(repeats):
        for flag in (True, False) if turn % 2 else (False, True):
            took, answers[flag] = sides[flag].run(asked, options, drafts)
            seconds[flag].append(took)
    rows = []
    for flag in (False, True):
        found = bits_of(answers[flag])
        equal = sum(one == other for one, other in zip(found, alone[flag], strict=True))
        rows.append({
            "schedule": name, "deterministic": flag, "dtype": dtype, "requests": len(found), "equal": equal,
            "unequal": len(found) - equal,
            "tokens_unequal": sum(one[0] != other[0] for one, other in zip(found, alone[flag], strict=True)),
            "seconds": statistics.median(seconds[flag]),
            "cost": statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True)) if flag else 1,
            "preemptions": sum(one.preemptions for one in answers[flag]),
            "cached_tokens": sum(one.cached_tokens for one in answers[flag]),
        })  # fmt: skip
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="(default: the one that --draft names)")
    parser.add_argument("--draft", help="without: plain decoding and n-gram lookup")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--limit", type=int, default=200, help="requests (default: 200; 24 take some minutes)")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2, help="turns of each schedule (default: 2)")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), metavar="NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    target = args.target or (None if args.draft else "smollm2-135m")
    config = EngineConfig(
        target=target, draft=args.draft or "none", dtype=args.dtype, quantization=args.quantization, verify="target"
    )
    sides = {flag: Side.of(config.with_options(deterministic=flag)) for flag in (False, True)}
    asked = questions(sides[True].target, args.limit, args.max_tokens)
    alone = {flag: bits_of(side.run(asked, ALONE, None)[1]) for flag, side in sides.items()}
    dtype = str(sides[True].target.dtype).removeprefix("torch.")
    dtype += "" if args.quantization == "none" else f", {args.quantization} weights"
    rows: list[dict[str, Any]] = []
    for name in args.schedules:
        if SCHEDULES[name][1] == HEAD and sides[True].draft is None:
            continue
        rows += rows_of(name, sides, asked, alone, args.repeats, dtype)
        print(*(f"{name}, {'with' if row['deterministic'] else 'without'}: {row['equal']} equal of {row['requests']}"
                for row in rows[-2:]), sep="; ", flush=True)  # fmt: skip
    columns = ("schedule", "deterministic", "requests", "equal", "unequal", "tokens_unequal", "seconds", "cost")
    table = Table(*columns)
    for row in rows:
        table.add_row(*(f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in columns))
    Console().print(table)
    settings = {"max_tokens": args.max_tokens, "repeats": args.repeats, "prompt_tokens": sum(map(len, asked.prompts))}
    described = {"target": describe_target(sides[True].target)}
    if sides[True].draft is not None:
        described["draft"] = describe_draft(sides[True].draft)
    leave(make_record("deterministic", command_line(), settings, rows, **described), "deterministic", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
