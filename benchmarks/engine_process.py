"""The parent's side of benchmarks/engine_worker.py: start an engine in a process, ask it, end it.

What vLLM's page for CPUs tells to preload is preloaded where it is found: tcmalloc (Debian: libtcmalloc-minimal4), and
the environment's Intel OpenMP.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

WORKER = Path(__file__).resolve().with_name("engine_worker.py")
REPOSITORY = WORKER.parents[1]


class EngineProcessError(RuntimeError):
    """The engine could not be loaded, or its process ended; the message has its last words."""


def vllm_environment(python: str, bound: str) -> dict[str, str]:
    """Variables of vLLM's process. bound: the cores of its threads, "auto" or as `first_cores` names them."""
    openmp = Path(shutil.which(python) or python).absolute().parents[1] / "lib" / "libiomp5.so"
    ours = [ctypes.util.find_library("tcmalloc_minimal"), str(openmp) if openmp.is_file() else None]
    preloaded = [path for path in [*ours, *os.environ.get("LD_PRELOAD", "").split(":")] if path]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CPU_OMP_THREADS_BIND": bound,
    }


def first_cores(count: int) -> str:
    """As many of the cores that this process may use, with commas between them."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:count])


class EngineProcess:
    """One engine. `settings` are the worker's; `python` is the interpreter that has the engine (None: this one);
    `more`: variables of its environment."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        threads: int,
        python: str | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **(more or {}),
        }
        if python is None:
            paths = (str(REPOSITORY), os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        else:
            environment.pop("PYTHONPATH", None)  # our packages are not that interpreter's
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [python or sys.executable, str(WORKER), json.dumps(dict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        self.version: str | None = None
        self.weight_bits: float | None = None
        self.most: int | None = None
        self.settings: str | None = None

    def wait_until_loaded(self) -> None:
        """Raises EngineProcessError when the engine cannot be had."""
        ready = self._reply()
        self.version, self.weight_bits, self.most = ready["version"], ready["weight_bits"], ready["most"]
        self.settings = ready["settings"]

    def answer(self, prompt_ids: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """The worker's reply. Raises EngineProcessError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompt_ids": prompt_ids, "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineProcessError(self._last_words()) from error
        return self._reply()

    def close(self) -> None:
        """End the process: it stops at the end of its input."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:  # it is gone, and what was still to be written with it
                pass
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineProcessError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineProcessError(reply["error"])
        return reply

    def _last_words(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"its process ended with {status}: {lines[-1] if lines else 'without a word'}"
