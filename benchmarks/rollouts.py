"""Rollouts as a run makes them beside Hugging Face's `generate`: the same prompts, greedy, on a CPU.

    python benchmarks/rollouts.py [--prompts CONVERSATIONS] [--batch 16 32]

ours           the bundled engine as `toolkit rollouts` starts it: `dtype: auto` (bfloat16 where our own products of it
               are to be had, else the faster of the two), packed weights, a prompt taken in as soon as others'
               answers have ended; nothing drafted
hf-generate    `generate` in bfloat16 and float32, in batches of as many prompts in the file's order, padded on the
               left; a batch ends with its longest answer

Answers end at the target's stop ids, after --max-tokens at most. The prompts are dealt into queues of two batches or
more. Every engine answers each queue in turns, the first one rotating, in one process. Nothing is kept from queue to
queue: each has an engine of its own, built before the clock starts. Writes benchmarks/results/rollouts-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import transformers
from harness import Row, leave, parser_of, ratio, set_threads, settings_of, show

from toolkit import __version__
from toolkit.bench.bootstrap import LEAST_GROUPS
from toolkit.bench.prompts import BUILTIN, builtin_prompts
from toolkit.bench.side_by_side import BenchError, rotated
from toolkit.data.chat_template import Message, prompt_ids
from toolkit.data.conversations import read_conversations
from toolkit.errors import exit_status
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.log import Progress
from toolkit.targets.gguf_file import DEMO_NAME
from toolkit.targets.load import DTYPES
from toolkit.targets.target import Target

OURS = "ours"
WARMUP_TOKENS = 4
COLUMNS = ("engine", "dtype", "batch", "tokens", "tokens_per_s", "ratio", "interval", "equal", "answers")
DEFINITIONS = {
    "weight_bits": "bits per weight as the engine holds them",
    "tokens": "tokens written in `seconds`, stop ids included, over all queues and repeats",
    "seconds": "from the call with token ids to the last answer of a queue; building an engine or a model is not in it",
    "ratio": "the row's time for as many tokens as ours wrote / our time; 95 % bootstrap interval over queues, "
    f"each with all its repeats; null below {LEAST_GROUPS} queues, whose spread says little",
    "equal": "answers with the very tokens of ours (another dtype parts at near-ties, and then writes another text)",
}

Ids = list[int]


@dataclass(frozen=True)
class Turn:
    """A queue of prompts answered once."""

    queue: int
    seconds: float
    answers: list[Ids]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def by_the_engine(target: Target, prompts: Sequence[Ids], batch: int, max_tokens: int) -> tuple[float, list[Ids]]:
    """Seconds and answers of our engine over a target that is packed."""
    with closing(Engine(target, max_running_requests=batch)) as engine:  # a new one: it remembers no prompt
        began = time.perf_counter()
        done = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
        return time.perf_counter() - began, [list(one.output_ids) for one in done]


def by_generate(target: Target, prompts: Sequence[Ids], batch: int, max_tokens: int) -> tuple[float, list[Ids]]:
    """The same of Hugging Face's `generate` over a target that is as transformers loads it."""
    # What a call leaves out is taken from here: the target's own settings would bring sampling back.
    target.model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, eos_token_id=sorted(target.stop_ids), max_new_tokens=max_tokens, do_sample=False
    )
    answers: list[Ids] = []
    began = time.perf_counter()
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        longest = max(map(len, group))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in group])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in group])
        for written in target.model.generate(ids, attention_mask=mask)[:, longest:].tolist():
            own = list(takewhile(lambda token: token not in target.stop_ids, written))
            answers.append(written[: len(own) + 1])  # without what the batch wrote behind its end
    return time.perf_counter() - began, answers


def race(
    targets: dict[str, Target], prompts: Sequence[Ids], batch: int, max_tokens: int, repeats: int
) -> dict[str, list[Turn]]:
    """Every engine answers every queue `repeats` times. By name of the engine, in the same order of queues."""
    engines = {name: by_the_engine if name == OURS else by_generate for name in targets}
    for name, answer in engines.items():
        answer(targets[name], prompts[:batch], batch, WARMUP_TOKENS)
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    count = max(1, len(prompts) // (2 * batch))
    places = [(repeat, queue) for repeat in range(repeats) for queue in range(count)]
    with Progress(len(places) * len(engines), f"batch {batch}", "turn") as progress:
        for repeat, queue in places:
            for name in rotated(list(engines), repeat + queue):
                took = engines[name](targets[name], prompts[queue::count], batch, max_tokens)
                turns[name].append(Turn(queue, *took))
                progress.update()
    return turns


def rows_of(turns: dict[str, list[Turn]], batch: int, targets: dict[str, Target], context: int) -> list[Row]:
    """One row an engine. context: tokens of the longest prompt and the longest answer that was allowed."""
    ours, rows = turns[OURS], []
    queues = sorted({turn.queue for turn in ours})
    for name, mine in turns.items():
        tokens, seconds = sum(turn.tokens for turn in mine), sum(turn.seconds for turn in mine)
        both = list(zip(ours, mine, strict=True))
        # By queue, with all its repeats: those are no new prompts.
        as_many = [sum(one.seconds * own.tokens / one.tokens for own, one in both if one.queue == at) for at in queues]
        over, interval = ratio(as_many, [sum(own.seconds for own in ours if own.queue == at) for at in queues])
        pairs = [pair for own, one in both for pair in zip(own.answers, one.answers, strict=True)]
        rows.append({
            "engine": name, "version": __version__ if name == OURS else transformers.__version__,
            "dtype": str(targets[name].dtype).removeprefix("torch."), "weight_bits": targets[name].weight_bits,
            "batch": batch, "context": context, "queues": len(queues), "answers": len(pairs), "tokens": tokens,
            "seconds": seconds, "tokens_per_s": tokens / seconds, "ratio": over, "interval": interval,
            "equal": sum(own == other for own, other in pairs),
        })  # fmt: skip
    return rows


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[Ids]:
    """First user turns, behind their system message; of the built-in prompts every turn as one of its own."""
    if args.prompts is None:
        texts = [turn for number in (0, 1) for one in builtin_prompts() for turn in one.turns[number : number + 1]]
        asked: list[list[Message]] = [[{"role": "user", "content": text}] for text in texts]
    else:
        asked = []
        for one in read_conversations(args.prompts):
            roles = [message["role"] for message in one.messages]
            if "user" in roles:
                asked.append(list(one.messages[: roles.index("user") + 1]))
    if max(args.batch) > min(len(asked), args.limit):
        raise BenchError(f"--batch {max(args.batch)} needs so many prompts; --limit {args.limit} of {len(asked)} came")
    return [prompt_ids(tokenizer, messages) for messages in asked[: args.limit]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, limit=64, batch=[16, 32], max_tokens=160, repeats=1)
    parser.add_argument("--target", default=DEMO_NAME, help="(default: %(default)s)")
    parser.add_argument("--prompts", metavar="FILE", help="as `toolkit rollouts` takes them (default: built-in ones)")
    dtypes = sorted(DTYPES)
    parser.add_argument("--hf-dtype", nargs="+", choices=dtypes, default=dtypes, help="of `generate` (default: both)")
    args = parser.parse_args(argv)
    threads = set_threads()
    targets = {OURS: load_target(args.target, use="rollouts")}
    prompts = prompts_of(args, targets[OURS].tokenizer)
    targets |= {f"hf-generate-{dtype}": load_target(args.target, dtype=dtype) for dtype in args.hf_dtype}
    pack(targets[OURS])
    lengths, rows = sorted(map(len, prompts)), []
    for batch in sorted(args.batch):
        turns = race(targets, prompts, batch, args.max_tokens, args.repeats)
        rows += rows_of(turns, batch, targets, lengths[-1] + args.max_tokens)
    lengths = {"least": lengths[0], "median": lengths[len(lengths) // 2], "most": lengths[-1]}
    settings = settings_of(
        args, prompts=args.prompts or BUILTIN, temperature=0.0, prompt_tokens=lengths, threads=threads
    )
    show(rows, COLUMNS, f"{args.target}, {len(prompts)} prompts, greedy, {threads} threads")
    leave(args, "engine", "rollouts", settings, rows, definitions=DEFINITIONS)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
