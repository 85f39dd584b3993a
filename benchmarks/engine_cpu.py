"""Our engine beside what else could be picked on a CPU: same prompts, same number of tokens, one run, greedy.

    python benchmarks/engine_cpu.py --draft runs/smollm2-135m/ckpt --torch-compile --quantization int8 int4 \
        [--vllm-python PATH] [--gguf FILE [--llama-server FILE | --llama-python PATH]] [--eagle-python PATH]

Every engine has a process of its own (engine_worker.py), all are loaded before the clock starts, and they take turns
group of prompts by group, the first one rotating, so that whatever the machine does meets all of them alike:

    group 0   plain   chain   hf         group 1   chain   hf   plain         group 2   hf   plain   chain

Their tokens are compared with our plain decoding's, of the same weights. What has no row is named with the reason;
engine_rivals.py says what --vllm-python and the like have to import (for llama.cpp: `pip install xllamacpp`), and
`pip install torchao` adds rows of Hugging Face's int8. ours-null drafts nothing and has to come out at 1.00.
Writes benchmarks/results/engine-<hardware>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from engine_plans import REFERENCES, Plan, plans_for
from engine_process import EngineProcess, EngineProcessError
from engine_rows import DEFINITIONS, REFERENCE, Entrant, Judge, Run, engine_table, rows_of
from harness import leave
from rich.console import Console

from toolkit.bench.near_tie import NOISE_RULE, Divergence, find_divergence, plain_logits
from toolkit.bench.prompts import BUILTIN, builtin_prompts, limited, read_prompts
from toolkit.bench.records import make_record
from toolkit.bench.side_by_side import BenchError, rotated
from toolkit.checkpoint.draft_dir import load_draft
from toolkit.errors import exit_status
from toolkit.infer.engine.cpu_door import QUANTIZATIONS, load_target
from toolkit.infer.load.load_draft import stated_target
from toolkit.infer.request.chat_prompt import chat_ids
from toolkit.log import Progress, get_logger
from toolkit.targets.demo import DEMO_NAME
from toolkit.targets.load import load_tokenizer
from toolkit.targets.target import Target
from toolkit.threads import physical_cores, users_threads

logger = get_logger(__name__)

WARMUP_TOKENS = 16
SPARE_CONTEXT = 64  # drafts reach behind the last token


@dataclass
class Rivals:
    """Engines that were loaded, and for the others why they were not."""

    plans: list[Plan]
    processes: dict[str, EngineProcess] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, why: object) -> None:
        if name == REFERENCE:
            raise BenchError(f"{REFERENCE}, which all others are compared with, failed: {why}")
        logger.warning("%s is left out: %s", name, why)
        self.left_out[name] = str(why)
        self.processes.pop(name, None)


def start(rivals: Rivals, shared: Mapping[str, Any], threads: int, stack: contextlib.ExitStack) -> None:
    """Load every engine, one after the other: two loads at once would fight for the cores and the memory."""
    for plan in rivals.plans:
        logger.info("loading %s", plan.name)
        process = stack.enter_context(
            EngineProcess({**shared, **plan.settings}, threads, plan.python, plan.environment)
        )
        try:
            process.wait_until_loaded()
        except EngineProcessError as error:
            rivals.drop(plan.name, error)
        else:
            rivals.processes[plan.name] = process


def race(
    rivals: Rivals, prompts: Sequence[Sequence[int]], batches: Sequence[int], max_tokens: int, repeats: int
) -> list[Run]:
    """Every engine answers every full group of every batch size, `repeats` times; smaller batches first, so that the
    peak memory of each is its own. An engine that fails on the way is left out whole."""
    runs: list[Run] = []
    for batch in sorted(batches):
        groups = range(0, len(prompts) - batch + 1, batch)
        loaded = [plan for plan in rivals.plans if plan.name in rivals.processes]
        names = []
        for plan in loaded:
            most = rivals.processes[plan.name].most
            if most is None or batch <= most:
                names.append(plan.name)
            else:
                rivals.left_out[f"{plan.name}, batch {batch}"] = f"it takes {most} prompt at a time"
        for name in names:
            _ask(rivals, name, prompts[:batch], min(WARMUP_TOKENS, max_tokens))
        with Progress(len(groups) * repeats, f"batch {batch}, {len(names)} engines", "turn") as progress:
            for repeat in range(repeats):
                for place, first in enumerate(groups):
                    for name in rotated(names, place + repeat):
                        reply = _ask(rivals, name, prompts[first : first + batch], max_tokens)
                        if reply is not None:
                            runs.append(Run(name, batch, repeat, first, reply))
                    progress.update()
    return [run for run in runs if run.engine in rivals.processes]


def _ask(rivals: Rivals, name: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any] | None:
    """The reply; None once the engine has failed."""
    if name not in rivals.processes:
        return None
    try:
        reply = rivals.processes[name].answer(prompts, max_tokens)
    except EngineProcessError as error:
        rivals.drop(name, error)
        return None
    lengths = {len(written) for written in reply["output_ids"]}
    if lengths != {max_tokens}:
        rivals.drop(name, f"answers of {sorted(lengths)} tokens came; {max_tokens} were asked for")
        return None
    return reply


def judge_of(target_settings: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> Judge:
    """Compares answers; loads the target, quantised or not, when two of them part for the first time."""

    @cache
    def target(quantization: str | None) -> Target:
        settings = {**target_settings, "quantization": quantization}
        return load_target(settings.pop("target"), **settings)

    def judge(reference: str, place: int, plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
        if list(plain) == list(other):
            return None
        exact = target(REFERENCES[reference])
        return find_divergence(plain, other, lambda ids: plain_logits(exact, [*prompts[place], *ids]), exact.dtype)

    return judge


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft directory of the head (else none is measured)")
    parser.add_argument("--target", help=f"default: the one that --draft names, else {DEMO_NAME}")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument(
        "--quantization",
        nargs="*",
        choices=QUANTIZATIONS,
        default=[],
        help="also rows of our engine and Hugging Face's with the target so",
    )
    parser.add_argument(
        "--torch-compile", action="store_true", help="also rows of our engine and Hugging Face's compiled"
    )
    parser.add_argument("--chain", type=int, default=3, metavar="STEPS", help="the head's chain (default: 3)")
    parser.add_argument("--tree", default="4,4,16", metavar="S,K,N", help="the head's tree (default: 4,4,16)")
    parser.add_argument(
        "--lookup",
        type=int,
        default=4,
        metavar="N",
        help="drafts of n-gram lookup, ours and Hugging Face's (default: 4)",
    )
    parser.add_argument("--prompts", metavar="FILE", help="in MT-bench's field style (default: the 40 built-in ones)")
    parser.add_argument(
        "--limit", type=int, default=16, metavar="N", help="so many prompts, evenly over tasks (default: 16)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of every answer (default: 64)")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 16], metavar="N", help="prompts answered together (default: 1 16)"
    )
    parser.add_argument("--repeats", type=int, default=2, help="times that each group is answered (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="ENGINE", help=f"these rows, and {REFERENCE}")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="the target in llama.cpp's form, for the rows of llama.cpp"
    )
    parser.add_argument(
        "--llama-server",
        metavar="FILE",
        help="llama.cpp's server: rows plain and with the head, of --gguf's weights and of these in BF16 and Q8_0",
    )
    parser.add_argument(
        "--llama-python", metavar="PATH", help="interpreter with xllamacpp or llama_cpp (default: this one)"
    )
    parser.add_argument(
        "--eagle-python", metavar="PATH", help="interpreter that imports SafeAILab/EAGLE, by its name `eagle`"
    )
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """First turns, rendered by the chat template, as ids. Raises DataError, ChatPromptError, BenchError."""
    listed = builtin_prompts() if args.prompts is None else read_prompts(args.prompts)
    chosen = limited(listed, args.limit)
    if min(args.batch) < 1 or max(args.batch) > len(chosen):
        raise BenchError(f"--batch {max(args.batch)} needs so many prompts, {len(chosen)} came; raise --limit")
    if args.max_tokens < 2 or args.repeats < 1:
        raise BenchError(f"--max-tokens {args.max_tokens} --repeats {args.repeats}: at least 2 and 1 are needed")
    return [chat_ids(tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    threads = int(users_threads() or physical_cores())
    torch.set_num_threads(threads)  # what the record says of this machine
    head = None if args.draft is None else load_draft(args.draft)
    name, revision = (args.target or DEMO_NAME, None) if args.target or head is None else stated_target(head)
    tokenizer = load_tokenizer(name, revision)
    prompts = prompts_of(args, tokenizer)
    target = {"target": name, "revision": revision, "dtype": args.dtype}
    longest = max(len(prompt) for prompt in prompts) + args.max_tokens
    shared = {
        **target, "directory": tokenizer.name_or_path, "draft": None, "shape": None, "lookup": None,
        "quantization": None, "torch_compile": False, "threads": threads, "max_running_requests": max(args.batch),
        "context_length": longest + SPARE_CONTEXT,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-cpu-")))
        plans, absent = plans_for(args, head, shared, folder)
        rivals = Rivals(plans, left_out=absent)
        start(rivals, shared, threads, stack)
        runs = race(rivals, prompts, args.batch, args.max_tokens, args.repeats)
        entrants = [
            Entrant(
                plan.name, plan.shape, plan.equals, plan.over, process.version, process.weight_bits, process.settings
            )
            for plan in plans
            if (process := rivals.processes.get(plan.name)) is not None
        ]
    rows = rows_of(entrants, runs, prompts, args.max_tokens, judge_of(target, prompts))
    settings = {
        **target, "quantization": args.quantization, "torch_compile": args.torch_compile,
        "draft": None if args.draft is None else str(args.draft), "prompts": args.prompts or BUILTIN,
        "limit": args.limit, "max_tokens": args.max_tokens, "batches": sorted(args.batch), "repeats": args.repeats,
        "threads": threads, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    record = make_record(
        "engine",
        ["python", *sys.argv],
        settings,
        rows,
        left_out=rivals.left_out,
        definitions={**DEFINITIONS, "near_ties": NOISE_RULE},
    )
    title = f"{name}, {len(prompts)} prompts, {args.max_tokens} tokens each, greedy, {threads} threads"
    Console(width=None if os.isatty(1) else 140).print(engine_table(rows, title))
    for left, why in rivals.left_out.items():
        print(f"no row of {left}: {why}")
    leave(record, "engine", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
