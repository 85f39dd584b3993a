"""One engine in a process of its own, for benchmarks/engine_cpu.py: it writes what it is told to and says how long.

    python engine_worker.py '{"engine": "ours", "target": ..., ...}'     the interpreter may be another engine's

A JSON object a line. It says {"version", "weight_bits", "most", "settings"} or {"error"} once it is loaded, most being
how many prompts it takes at a time (null: any number), settings what it runs with, in words. Then each {"prompt_ids",
"max_tokens"} is answered greedily, all prompts at once, by {"output_ids", "seconds", "peak_memory_bytes", ...}. Stop
ids are ignored, so that every engine writes exactly `max_tokens` tokens. No engine may remember prompts it has seen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from engine_rivals import EagleOwn, Vllm, in_words, llama_cpp


class Ours:
    """`toolkit.LLM`: plain, with a draft directory, or with n-gram lookup.

    null: with a drafter that no request uses, for the null control.
    """

    most = None

    def __init__(self, settings: dict[str, Any]) -> None:
        from toolkit import LLM, __version__
        from toolkit.targets.fixed_linear import is_int8

        names = ("target", "revision", "draft", "shape", "dtype", "torch_compile")
        options = {name: settings[name] for name in names}
        options |= {
            "quantization": settings["quantization"] or "none",
            "max_running_requests": settings["max_running_requests"],
        }
        self._llm = LLM(**options, device="cpu", prefix_cache=False)
        self.version, self.weight_bits = __version__, self._llm.target.weight_bits
        head = getattr(self._llm._loaded.draft, "head", None)  # lookup has none
        self.settings = in_words(
            settings,
            str(self._llm.target.dtype).removeprefix("torch."),
            f"{settings['quantization']} weights" if settings["quantization"] else None,
            "torch.compile" if settings["torch_compile"] else "eager",
            "head in int8" if head is not None and is_int8(head) else None,
            "no request drafts" if settings.get("null") else None,
        )
        self._drafts = not settings.get("null")
        self._parts: dict[str, float] = {}
        self._step, self._llm.engine.step = self._llm.engine.step, self._timed_step

    def _timed_step(self) -> list[Any]:
        """A step, its seconds by part: its round's as the engine tells them, and the rest where it read a prompt."""
        began = time.perf_counter()
        touched = self._step()
        rest, round_of = time.perf_counter() - began, None
        for request in touched:
            if request.events and request.events[-1] is not self._last.get(request):
                round_of = self._last[request] = request.events[-1]
        for part in ("draft", "verify", "commit") if round_of is not None else ():
            seconds = getattr(round_of, f"{part}_s")
            self._parts[part] += seconds
            rest -= seconds
        started = {request for request in touched if request.output_ids} - self._started
        self._started |= started
        if started or any(not request.output_ids for request in touched):
            self._parts["prefill"] += rest
        return touched

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        from toolkit import SamplingParams

        self._parts = dict.fromkeys(("prefill", "draft", "verify", "commit"), 0.0)
        self._last: dict[Any, Any] = {}
        self._started: set[Any] = set()
        asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        done = self._llm.generate(prompts, asked, speculative=self._drafts)
        return {
            "output_ids": [one.token_ids for one in done],
            "verify_steps": sum(one.acceptance.verify_steps for one in done),
            "accepted": sum(one.acceptance.accepted for one in done),
            "parts": self._parts,
        }


class HuggingFace:
    """transformers' `generate`: plain, with prompt lookup, which takes one prompt at a time, or compiled.

    Compiled: decoding steps over a static cache of the longest context, by torch.compile. transformers does that by
    itself on a GPU alone. Prompts are read eagerly, since each length would be compiled.

    torchao: its int8 weights, one scale a row, in place of ours.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import transformers

        from toolkit.infer.engine.cpu_door import load_target

        names = ("revision", "dtype", "quantization")
        target = load_target(settings["target"], **{name: settings[name] for name in names})
        self._model, self._lookup, compiled = target.model, settings["lookup"], settings["torch_compile"]
        weights = f"{settings['quantization']} weights" if settings["quantization"] else None
        self.weight_bits = target.weight_bits
        if settings.get("torchao"):
            weights, self.weight_bits = quantised_by_torchao(target.model)
        # transformers: "assisted generate is only supported for batch_size = 1".
        self.most = None if self._lookup is None else 1
        # `generate` fills gaps of its settings from here: without this the target's stop ids would come back.
        static: dict[str, Any] = {}
        if compiled:
            everywhere = transformers.CompileConfig(mode="default")
            everywhere._compile_all_devices = True
            static = {"cache_implementation": "static", "max_cache_len": settings["context_length"]}
            static["compile_config"] = everywhere
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0, **static)
        self.version = transformers.__version__
        self.settings = in_words(
            settings,
            str(target.dtype).removeprefix("torch."),
            weights,
            "torch.compile with a static cache" if compiled else "eager with a dynamic cache",
            f"prompt lookup of {self._lookup}" if self._lookup else None,
            f"attention {self._model.config._attn_implementation}",
        )

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        import torch

        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        more = {} if self._lookup is None else {"prompt_lookup_num_tokens": self._lookup}
        written = self._model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **more)
        return {"output_ids": written[:, longest:].tolist()}


def quantised_by_torchao(model: Any) -> tuple[str, float]:
    """Store the linear layers of a model, the output matrix among them, as torchao's int8. Returns that in words, and
    the bits per weight."""
    import torchao
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def stored_bytes(tensor: Any) -> int:
        """Of a tensor, or of those that a quantised one consists of."""
        if not hasattr(tensor, "__tensor_flatten__"):
            return int(tensor.nbytes)
        return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])

    count = sum(one.numel() for one in model.parameters())
    quantize_(model, Int8WeightOnlyConfig())
    bits = 8 * sum(stored_bytes(one) for one in model.parameters()) / count
    return f"int8 weights of torchao {torchao.__version__}", bits


ENGINES = {"ours": Ours, "hugging-face": HuggingFace, "vllm": Vllm, "eagle": EagleOwn, "llama.cpp": llama_cpp}


def peak_memory_bytes() -> int | None:
    """Largest resident size of this process so far; None where /proc does not say (getrusage counts the parent's)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def main() -> int:
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the engines print must not get between the replies

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine = ENGINES[settings["engine"]](settings)
    except Exception as error:  # process edge: the table says why this engine has no row
        reply({"error": f"{type(error).__name__}: {error}"})
        raise
    reply({name: getattr(engine, name) for name in ("version", "weight_bits", "most", "settings")})
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        told = engine.answer(asked["prompt_ids"], asked["max_tokens"])
        seconds = time.perf_counter() - began
        reply({"seconds": seconds, "peak_memory_bytes": peak_memory_bytes(), **told})
    return 0


if __name__ == "__main__":
    sys.exit(main())
