"""Answers under many schedules, with `deterministic` and without: how many have the bits of the request alone.

    python benchmarks/deterministic.py [--draft runs/NAME/ckpt] [--limit 200] [--max-tokens 48] [--variants auto int8]
        [--tokens-only]

Requests of mixed lengths, every second one sampled with a seed. First each runs alone, without reuse and drafts, in an
engine with the option and in one without. Then come the schedules, in both: an answer is `equal` if its tokens and all
log-probabilities are those of the same request alone, to the bit; `tokens_unequal` counts those whose tokens differ.
`cost` is the time with the option over the time without, the two in turns, in the median of --repeats.

Each of --variants is loaded in turn: a dtype, or weights in int8; the rows of all are in one record.

Writes benchmarks/results/deterministic-<hardware>.json, anew after each schedule.
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
from typing import Any

from harness import Row, asked_ids, leave, parser_of, questions, settings_of, show

from toolkit import __version__
from toolkit.bench.acceptance import describe_draft, measured_target
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine, device_of, load_models
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
TOOLKIT = "toolkit"
WEIGHTS = ("int8",)
VARIANTS = ("auto", "float32", "bfloat16", *WEIGHTS)
COLUMNS = ("dtype", "schedule", "deterministic", "requests", "equal", "unequal", "tokens_unequal", "seconds", "cost")
DEFINITIONS = {
    "equal": "answers whose tokens and log-probabilities are those of the request alone, to the bit; "
    "with --tokens-only, whose tokens are",
    "tokens_unequal": "answers whose tokens are not those of the request alone",
    "cost": "seconds with the option over seconds without, in turns; null: there is no pair",
}
SLACK = 64  # tokens of a tight cache beyond the longest context
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
        return int(max(most + 2 * SLACK, 3 * mean)) // 16 * 16


def questions_of(target: Target, limit: int, max_tokens: int, logprobs: int | None) -> Asked:
    """Conversations of one to eight of the built-in prompts; many begin with the same ones."""
    chance, asked, texts, params = random.Random(0), questions(40), [], []
    for number in range(limit):
        first = chance.choice((0, 0, 10, chance.randrange(len(asked))))
        several = asked[first : first + chance.choice((1, 1, 2, 4, 8))] + [chance.choice(asked)]
        texts.append("\n".join(several))
        settings: dict[str, Any] = {"temperature": 0.8, "seed": number} if number % 2 else {}
        params.append(SamplingParams(max_tokens=chance.randint(8, max_tokens), logprobs=logprobs, **settings))
    most = target.max_context - max_tokens - 64
    return Asked([ids[:most] for ids in asked_ids(target.tokenizer, texts)], params)


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
            total = asked.preempting
            options = {**options, "max_total_tokens": total, "context_length": total - SLACK}
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
) -> list[Row]:
    """The rows of a schedule: without `deterministic`, and with it."""
    options, drafts = SCHEDULES[name]
    flags: tuple[bool, ...] = (False, True)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    answers: dict[bool, list[Request]] = {}
    for turn in range(repeats):
        for flag in flags[:: -1 if turn % 2 else 1]:
            took, answers[flag] = sides[flag].run(asked, options, drafts)
            seconds[flag].append(took)
    rows = []
    for flag in flags:
        found = bits_of(answers[flag])
        equal = sum(one == other for one, other in zip(found, alone[flag], strict=True))
        ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)] if flag else []
        rows.append({
            "engine": TOOLKIT, "schedule": name, "deterministic": flag, "dtype": dtype, "requests": len(found),
            "equal": equal, "unequal": len(found) - equal,
            "tokens_unequal": sum(one[0] != other[0] for one, other in zip(found, alone[flag], strict=True)),
            "seconds": statistics.median(seconds[flag]), "cost": statistics.median(ratios) if ratios else None,
            "preemptions": sum(one.preemptions for one in answers[flag]),
            "cached_tokens": sum(one.cached_tokens for one in answers[flag]), "version": __version__,
        })  # fmt: skip
    return rows


def sides_of(variant: str, args: argparse.Namespace) -> dict[bool, Side]:
    """Without the option, and with it; one of --variants."""
    target = args.target or (None if args.draft else "smollm2-135m")
    dtype, quantization = ("auto", variant) if variant in WEIGHTS else (variant, "none")
    options = {"target": target, "draft": args.draft or "none", "dtype": dtype, "quantization": quantization}
    return {flag: Side.of(EngineConfig(**options, verify="target", deterministic=flag)) for flag in (False, True)}


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, limit=200, max_tokens=48, repeats=2)
    parser.add_argument("--target", help="(default: the one that --draft names)")
    parser.add_argument("--draft", help="without: plain decoding and n-gram lookup")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["auto"], metavar="NAME")
    tokens_only = "no log-probabilities: `equal` then compares tokens alone, and a GPU runs rounds as CUDA graphs"
    parser.add_argument("--tokens-only", action="store_true", help=tokens_only)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), metavar="NAME")
    args = parser.parse_args(words)
    rows: list[Row] = []
    for variant in args.variants:
        sides = sides_of(variant, args)
        target, draft = sides[True].target, sides[True].draft
        described = {"target": measured_target(target)} | ({} if draft is None else {"draft": describe_draft(draft)})
        asked = questions_of(target, args.limit, args.max_tokens, None if args.tokens_only else 2)
        dtype = str(target.dtype).removeprefix("torch.") + (f", {variant} weights" if variant in WEIGHTS else "")
        alone = {flag: bits_of(side.run(asked, ALONE, None)[1]) for flag, side in sides.items()}
        for name in args.schedules:
            if SCHEDULES[name][1] != HEAD or draft is not None:
                rows += rows_of(name, sides, asked, alone, args.repeats, dtype)
                more = {"definitions": DEFINITIONS, **described}
                leave(args, "deterministic", "deterministic", settings_of(args), rows, **more)
    show(rows, COLUMNS, "answers with the bits of the request alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
