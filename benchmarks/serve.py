"""Our server beside others on a CPU: time to the first token, time per token, throughput; same prompts, greedy.

    python benchmarks/serve.py --draft runs/smollm2-135m/ckpt --flags=--torch-compile \
        [--transformers-python PATH] [--vllm-python PATH] [--soak]

Every server has a process of its own, all are loaded before the clock starts, and they take turns, the first one
rotating. At each number of clients, every client asks its next prompt as soon as it has its answer, streamed, until all
prompts are answered. Answers end where the model ends them, at --max-tokens at the latest; those that are not the text
of ours-plain are counted. serve_processes.py says what --transformers-python and --vllm-python have to import.

--soak adds a row of 200 clients (serve_soak.py): of many sizes, some leave, some have a deadline; in float32, where
every complete answer must equal plain decoding. What has no row is named with the reason.
Writes benchmarks/results/server-<hardware>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import leave
from rich.console import Console
from rich.table import Table
from serve_clients import Reply, ask_all, times
from serve_processes import PLAIN, ServerPlan, ServerProcess, plans_for, threads_of_all
from serve_soak import soak_row

from toolkit.bench.prompts import BUILTIN, builtin_prompts, limited, read_prompts
from toolkit.bench.records import make_record
from toolkit.bench.side_by_side import BenchError, rotated
from toolkit.checkpoint.draft_dir import load_draft
from toolkit.errors import exit_status
from toolkit.infer.load.load_draft import stated_target
from toolkit.log import get_logger
from toolkit.targets.demo import DEMO_NAME
from toolkit.targets.load import load_tokenizer

logger = get_logger(__name__)

COLUMNS = ("server", "clients", "requests", "ttft_p50", "ttft_p99", "tpot_p50", "tokens_per_s", "errors", "other_texts")
DEFINITIONS = {
    "ttft_p50, ttft_p99": "seconds from sending a request to its first text: median, and 99th percentile (of fewer "
    "than 100 requests the largest). With several clients, prompts that the server has answered before",
    "tpot_p50": "seconds per token after the first text of an answer: median over answers",
    "tokens_per_s": "tokens of all complete answers, divided by the seconds from the first request to the last answer",
    "other_texts": f"complete answers whose text is not that of {PLAIN} for the same prompt (near-ties in bfloat16)",
    "accept_length": "mean over answers, as the server says it; of vLLM: 1 + accepted tokens / drafts, by its counters",
    "errors": "requests without a complete answer",
    "peak_memory_bytes": "of the process that was started, without those that it starts",
    "leaked_pages": "pages of the cache that no request and no kept prefix holds at the end; null: not known",
}
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Turn:
    """All prompts answered once. accept_length: as the server counts it for all of them; None: it does not."""

    replies: Sequence[Reply]
    seconds: float
    accept_length: float | None


def turn_of(server: ServerProcess, bodies: Sequence[Mapping[str, Any]], clients: int) -> Turn:
    """Send the requests by so many clients."""
    before = server.drafted()
    replies, seconds = asyncio.run(ask_all(server.url, bodies, clients))
    drafts, accepted = (now - then for now, then in zip(server.drafted(), before, strict=True))
    return Turn(replies, seconds, 1 + accepted / drafts if drafts > 0 else None)


def bodies_of(plan: ServerPlan, prompts: Sequence[str], max_tokens: int) -> list[dict[str, Any]]:
    """The requests for a server."""
    common = {"model": plan.model, "temperature": 0, "max_tokens": max_tokens, **plan.fields}
    return [{**common, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]


def row_of(server: ServerProcess, clients: int, turns: Sequence[Turn], plain: Sequence[str] | None) -> dict[str, Any]:
    """One row: a server at a number of clients, over all repeats. plain: the texts of PLAIN, by prompt."""
    replies = [reply for turn in turns for reply in turn.replies]
    whole = [reply for reply in replies if reply.error is None]
    lengths = [one.accept_length for one in (*whole, *turns) if one.accept_length is not None]
    others = None
    if plain is not None:
        pairs = [pair for turn in turns for pair in zip(turn.replies, plain, strict=True)]
        others = sum(reply.error is None and reply.text != text for reply, text in pairs)
    return {
        "server": server.plan.name,
        "settings": server.plan.settings,
        "clients": clients,
        "requests": len(replies),
        **times([reply.first_s for reply in whole], [reply.per_token_s for reply in whole]),
        "tokens_per_s": sum(reply.tokens for reply in whole) / sum(turn.seconds for turn in turns),
        "tokens": sum(reply.tokens for reply in whole),
        "errors": len(replies) - len(whole),
        "first_error": next((reply.error for reply in replies if reply.error is not None), None),
        "other_texts": others,
        "accept_length": sum(lengths) / len(lengths) if lengths else None,
        "peak_memory_bytes": server.peak_memory_bytes(),
        "leaked_pages": None,
    }


def race(
    servers: Mapping[str, ServerProcess], prompts: Sequence[str], clients: Sequence[int], max_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Every server answers all prompts at every number of clients, `repeats` times. Returns the rows."""
    rows, plain = [], None
    for name, server in servers.items():
        logger.info("warming up %s", name)
        asyncio.run(ask_all(server.url, bodies_of(server.plan, prompts[:2], WARM_UP_TOKENS), 2))
    for count in sorted(clients):
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        for repeat in range(repeats):
            for name in rotated(list(servers), repeat):
                logger.info("%d clients, %s", count, name)
                server = servers[name]
                turns[name].append(turn_of(server, bodies_of(server.plan, prompts, max_tokens), count))
        if plain is None and PLAIN in servers:
            plain = [reply.text for reply in turns[PLAIN][0].replies]
        rows += [row_of(servers[name], count, answered, plain) for name, answered in turns.items()]
    return rows


def table_of(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The rows for the terminal; times in milliseconds."""
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(f"{column} ms" if column.startswith(("ttft", "tpot")) else column, justify="right")
    for row in rows:
        cells = []
        for column in COLUMNS:
            value = row.get(column)
            if value is not None and column.startswith(("ttft", "tpot")):
                value *= 1000
            cells.append("-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value))
        table.add_row(*cells)
    return table


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft directory of the head (else none is served)")
    parser.add_argument("--target", help=f"default: the one that --draft names, else {DEMO_NAME}")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--flags", type=shlex.split, default=[], metavar="TEXT", help='more flags of our servers: --flags="--X Y --Z"'
    )
    parser.add_argument(
        "--head-flags",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="more flags of ours with the head: --shape ..",
    )
    parser.add_argument("--chain", type=int, default=3, metavar="STEPS", help="vLLM's chain with the head (default: 3)")
    parser.add_argument("--context-length", type=int, default=1024, metavar="N", help="of all servers (default: 1024)")
    parser.add_argument("--prompts", metavar="FILE", help="in MT-bench's field style (default: the 40 built-in ones)")
    parser.add_argument("--limit", type=int, default=32, metavar="N", help="so many prompts, evenly over tasks (32)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer at most (default: 64)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="(default: 1 4 16)")
    parser.add_argument("--repeats", type=int, default=1, help="times that all prompts are asked (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="SERVER", help="these servers")
    parser.add_argument("--transformers-python", metavar="PATH", help="interpreter for rows of `transformers serve`")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--soak", action="store_true", help="also 200 clients with aborts and deadlines, in float32")
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would outlive this process
    if min(args.clients) < 1 or args.max_tokens < 2 or args.repeats < 1:
        raise BenchError("at least 1 client, 2 tokens and 1 repeat are needed (--clients, --max-tokens, --repeats)")
    threads = threads_of_all()
    head = None if args.draft is None else load_draft(args.draft)
    name, revision = (args.target or DEMO_NAME, None) if args.target or head is None else stated_target(head)
    target = {"target": name, "revision": revision}
    listed = builtin_prompts() if args.prompts is None else read_prompts(args.prompts)
    prompts = [prompt.turns[0] for prompt in limited(listed, args.limit)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-")))
        plans, left_out = plans_for(args, head, target, load_tokenizer(name, revision).name_or_path, folder)
        if args.only:
            left_out["all others"] = f"--only {' '.join(args.only)}"
        servers: dict[str, ServerProcess] = {}
        for plan in plans:
            if args.only and plan.name not in args.only:
                continue
            logger.info("loading %s", plan.name)
            server = stack.enter_context(ServerProcess(plan))
            try:
                server.wait_until_ready()
            except BenchError as error:
                left_out[plan.name] = str(error)
            else:
                servers[plan.name] = server
        if not servers:
            raise BenchError(f"no server started: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
        rows = race(servers, prompts, args.clients, args.max_tokens, args.repeats)
    if args.soak:
        rows.append(soak_row(target, args.draft, prompts))
    settings = {
        **target, "draft": None if args.draft is None else str(args.draft), "dtype": args.dtype, "flags": args.flags,
        "head_flags": args.head_flags,
        "chain": args.chain, "context_length": args.context_length, "prompts": args.prompts or BUILTIN,
        "limit": args.limit, "max_tokens": args.max_tokens, "repeats": args.repeats, "threads": threads,
        "temperature": 0.0,
    }  # fmt: skip
    command = ["python", *sys.argv]
    record = make_record("server", command, settings, rows, left_out=left_out, definitions=DEFINITIONS)
    title = f"{name}, {len(prompts)} prompts, at most {args.max_tokens} tokens each, greedy, {threads} threads"
    Console(width=None if os.isatty(1) else 140).print(table_of(rows, title))
    for left, why in left_out.items():
        print(f"no row of {left}: {why}")
    leave(record, "server", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
