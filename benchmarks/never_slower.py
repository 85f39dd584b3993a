"""Adaptive drafting against plain decoding, with a head that is useless (random weights) and with any others.

    python benchmarks/never_slower.py [--draft runs/NAME/ckpt ngram] [--shape 4,1,5 5,4,16] [--fixed]

The engines answer the same prompts at the same time, in turns of a few tokens, so that what else the machine does
hits all of them alike. Each has a target of its own: plain decoding pays for none of the head's hooks. Answers have a
fixed number of tokens. The ratio counts decoding only; `whole_ratio` also the reading of the prompts.
Writes benchmarks/results/engine-never-slower-<hardware>.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import leave, parser_of, set_threads, settings_of, show

from toolkit import __version__
from toolkit.bench.bootstrap import LEAST_GROUPS, ratio_interval
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.rows import number
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.chat_template import prompt_ids
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import default_aux_layer_ids
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.cpu_door import pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_draft import fit_draft, load_draft
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, summarise
from toolkit.targets.load import read_target
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

RANDOM = "random head"
TURN = 16  # tokens a row in one engine's turn
WARMUP_TOKENS = 16
COLUMNS = ("draft", "shape", "engine", "ratio", "interval", "processor_ratio", "worst_group_ratio", "whole_ratio",
           "accept_length", "drafted_steps")  # fmt: skip
DEFINITIONS = {
    "ratio": "seconds of decoding / plain decoding's for the same prompts; 95 % bootstrap interval over groups, null "
    f"below {LEAST_GROUPS} groups",
    "processor_ratio": "as ratio, in processor time of all threads: with one thread, other programs hardly show",
    "whole_ratio": "as ratio, with the reading of the prompts",
    "drafted_steps": "share of verify steps in which anything was drafted",
    "seconds": "decoding only, from the first token to the last",
}


@dataclass
class Entrant:
    """One engine and what it took, by group of prompts: seconds of [reading, decoding], processor time of decoding."""

    name: str
    engine: Engine
    groups: list[list[float]] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def start(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self.running = [self.engine.add_request(prompt, params) for prompt in prompts]
        self.groups.append([0.0, 0.0])
        self.processor.append(0.0)

    def turn(self, tokens: int) -> None:
        """Step until the rows have `tokens` more tokens each, in the mean, or have ended."""
        wanted = self._written() + tokens * len(self.running)
        while self.engine.has_work() and self._written() < wanted:
            fresh = [request for request in self.running if not request.output_ids]
            started, before = time.perf_counter(), time.process_time()
            self.engine.step()
            ended = time.perf_counter()
            self.processor[-1] += 0.0 if fresh else time.process_time() - before
            first = max((request.first_token_at or started for request in fresh), default=started)
            self.groups[-1][0] += first - started
            self.groups[-1][1] += ended - first

    def _written(self) -> int:
        return sum(len(request.output_ids) for request in self.running)

    def decoding(self) -> list[float]:
        return [decoding for _, decoding in self.groups]

    def whole(self) -> list[float]:
        return [sum(parts) for parts in self.groups]


def random_head(target: Target, kept: int) -> DraftCheckpoint:
    """An untrained EAGLE-3 head over the first `kept` ids: what it drafts is all but never right."""
    torch.manual_seed(0)
    size = min(kept, target.vocab_size)
    config = Eagle3Config.from_target_config(
        target.config,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        aux_layer_ids=default_aux_layer_ids(target.n_layers),
    )
    head = Eagle3Head(config).eval().requires_grad_(False)
    return DraftCheckpoint(head=head, token_map=TokenMap.from_ids(range(size), target.vocab_size))


def race(entrants: Sequence[Entrant], groups: Sequence[Sequence[Sequence[int]]], max_tokens: int) -> None:
    """All groups of prompts, each answered by all engines in turns; who goes first alternates."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    orders = itertools.cycle([list(entrants), list(reversed(entrants))])
    for i, prompts in enumerate(groups):
        for one in entrants:
            one.start(prompts, params)
        while any(one.engine.has_work() for one in entrants):
            for one in next(orders):
                one.turn(TURN)
        for one in entrants:
            one.requests += one.running
        progress = ", ".join(
            f"{one.name} {sum(one.decoding()):.1f} s ({sum(one.processor):.1f} s of processors)" for one in entrants
        )
        print(f"  {i + 1}/{len(groups)}: {progress}", file=sys.stderr, flush=True)


def row_of(entrant: Entrant, plain: Entrant, draft: str, shape: DraftShape, batch: int) -> dict[str, Any]:
    events = [event for request in entrant.requests for event in request.events]
    parts = {"draft": 0.0, "verify": 0.0, "commit": 0.0}
    for event in events:
        for part in parts:
            parts[part] += getattr(event, f"{part}_s") / event.batch
    weights = [(p.numel(), p.element_size()) for p in entrant.engine.target.model.parameters()]
    stats = summarise(events)
    tokens = sum(len(request.output_ids) - 1 for request in entrant.requests)
    seconds, whole = entrant.decoding(), entrant.whole()
    interval = ratio_interval(seconds, plain.decoding(), least_units=LEAST_GROUPS)
    processor_interval = ratio_interval(entrant.processor, plain.processor, least_units=LEAST_GROUPS)
    return {
        "engine": entrant.name,
        "version": __version__,
        "weight_bits": 8 * sum(n * size for n, size in weights) / sum(n for n, _ in weights),
        "batch": batch,
        "context": max(request.length for request in entrant.requests),
        "tokens": tokens,
        "seconds": sum(seconds),
        "tokens_per_s": tokens / sum(seconds),
        "accept_length": number(stats.accept_length),
        "peak_memory_bytes": None,
        "parts": parts,
        "draft": draft,
        "shape": shape.as_text(),
        "drafted_steps": sum(event.offered > 0 for event in events) / len(events),
        "ratio": sum(seconds) / sum(plain.decoding()),
        "interval": [None, None] if interval is None else list(interval),
        "processor_ratio": sum(entrant.processor) / sum(plain.processor),
        "processor_interval": [None, None] if processor_interval is None else list(processor_interval),
        "worst_group_ratio": max(a / b for a, b in zip(seconds, plain.decoding(), strict=True)),
        "whole_ratio": sum(whole) / sum(plain.whole()),
    }


def measure(args: argparse.Namespace, name: str, shape: DraftShape) -> list[dict[str, Any]]:
    """One head and shape: a row for plain decoding, one for adaptive drafting, and one for the fixed shape if asked."""

    def build(drafts: bool, adaptive: bool = False) -> Engine:
        """As load_engine does it, with a head that is in no directory."""
        target, draft = read_target(args.target, dtype=args.dtype), None
        if drafts:
            unfitted: Draft = random_head(target, args.random_vocab) if name == RANDOM else load_draft(name)
            draft = fit_draft(unfitted, target)
        pack(target, draft)
        options: dict[str, Any] = {"max_running_requests": args.batch}
        return Engine(target, draft, shape if drafts else None, adaptive=adaptive, **options)

    entrants = [
        Entrant("ours-plain", build(False)),
        Entrant("ours-adaptive", build(True, adaptive=True)),
        *([Entrant("ours-fixed-shape", build(True))] if args.fixed else []),
    ]
    tokenizer = entrants[0].engine.target.tokenizer
    prompts = [
        prompt_ids(tokenizer, [{"role": "user", "content": one.turns[0]}])
        for one in limited(builtin_prompts(), args.limit)
    ]
    groups = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    print(f"{name}, {shape.name}, batch {args.batch}", file=sys.stderr)
    for one in entrants:  # first forwards of a process are slow; the adaptive engine's own first rounds do count
        warm = Engine(one.engine.target, max_running_requests=args.batch)
        warm.generate(groups[0], SamplingParams(max_tokens=WARMUP_TOKENS))
    race(entrants, groups, args.max_tokens)
    for one in entrants:
        one.engine.close()
    return [row_of(one, entrants[0], "none" if one is entrants[0] else name, shape, args.batch) for one in entrants]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", nargs="*", default=[], help="draft directories or ngram, beside the random head")
    parser.add_argument("--shape", nargs="+", default=["4,1,5", "5,4,16"], help="the largest shapes (both by default)")
    parser.add_argument("--fixed", action="store_true", help="also always draft the whole shape")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--random-vocab", type=int, default=8192, help="ids that the random head drafts from")
    args = parser.parse_args(argv)
    set_threads()
    rows: list[dict[str, Any]] = []
    for name in (RANDOM, *args.draft):
        for text in args.shape:
            rows += measure(args, name, DraftShape.parse(text))
    show(rows, COLUMNS, "decoding with drafts / plain decoding, same prompts, in turns (lower is better)")
    leave(args, "engine", "engine-never-slower", settings_of(args, turn=TURN), rows, definitions=DEFINITIONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
