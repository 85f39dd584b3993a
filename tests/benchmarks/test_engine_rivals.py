"""Workers of other engines with stand-ins for their packages: what each is asked, and how its answers are converted."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

PROMPTS = [[5, 6, 7], [8, 9]]
SETTINGS = {"directory": "target", "revision": None, "dtype": "bfloat16"}
SETTINGS |= {"context_length": 64, "max_running_requests": 2, "threads": 1}


def counted(prompt: list[int], count: int) -> list[int]:
    """The answer that every stand-in gives: it counts on from the prompt's last id."""
    return [prompt[-1] + at for at in range(1, count + 1)]


@pytest.fixture
def installed(monkeypatch):
    """Puts a module of these contents where `import` finds it."""

    def install(name: str, **contents: object) -> None:
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    return install


class FakeVllm:
    """vllm.LLM: accepts one of three drafts in each of two steps a prompt, and counts over all calls as vLLM does."""

    made: dict

    def __init__(self, **options: object) -> None:
        FakeVllm.made, self.prompts_so_far = options, 0
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))

    def generate(self, prompts, params, use_tqdm):
        assert (params.temperature, params.ignore_eos) == (0.0, True)
        self.prompts_so_far += len(prompts)
        answers = [tuple(counted(prompt["prompt_token_ids"], params.max_tokens)) for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]) for answer in answers]

    def get_metrics(self):
        if self.made["speculative_config"] is None:
            return [SimpleNamespace(name="vllm:num_requests_running", value=0)]
        steps = 2 * self.prompts_so_far
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=float(steps)),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=float(steps)),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[steps, 0, 0]),
        ]


@pytest.mark.parametrize("draft", [None, "head", "ngram"])
def test_vllm(script, installed, draft) -> None:
    """Counters that run over all calls, a stop id that ends an answer, or a prefix that is kept would each falsify a
    row; drafts are counted by call."""
    installed("vllm", LLM=FakeVllm, SamplingParams=SimpleNamespace, __version__="1.2")
    engine = script("engine_rivals").Vllm({**SETTINGS, "draft": draft, "num_steps": 3, "ngram": [2, 4]})
    head = {
        "head": {"method": "eagle3", "model": "head", "num_speculative_tokens": 3},
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    }.get(draft)
    assert FakeVllm.made["speculative_config"] == head and FakeVllm.made["enable_prefix_caching"] is False
    assert (FakeVllm.made["model"], FakeVllm.made["max_model_len"], FakeVllm.made["max_num_seqs"]) == ("target", 64, 2)
    assert (engine.version, engine.weight_bits, engine.most) == ("1.2", 16, None)
    engine.answer(PROMPTS, 4)
    told = json.loads(json.dumps(engine.answer(PROMPTS[:1], 4)))
    counts = {"verify_steps": 2, "accepted": 2, "accepted_by_depth": [2, 0, 0]}
    plain = {"verify_steps": 0, "accepted": 0, "accepted_by_depth": []}
    assert told == {"output_ids": [[8, 9, 10, 11]], **(counts if draft else plain)}


class FakeEagle:
    """EaModel: runs of three tokens until more than `max_new_tokens` are written, as EAGLE's code does."""

    made: dict

    @classmethod
    def from_pretrained(cls, **options: object):
        FakeEagle.made = options
        model = cls()
        model.base_model = SimpleNamespace(dtype=torch.float32)
        return model

    def eval(self):
        return self

    def eagenerate(self, ids, max_new_tokens, max_length, log):
        assert log and max_length >= ids.shape[1] + max_new_tokens
        prompt, steps = ids[0].tolist(), 0
        while 3 * steps <= max_new_tokens:
            steps += 1
        return torch.tensor([prompt + counted(prompt, 3 * steps)]), torch.tensor(3 * steps), steps - 1


def test_eagle(script, installed, monkeypatch) -> None:
    """It writes whole runs, past the end: only the tokens asked for count, but every step and what it accepted."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for name in ("eagle", "eagle.model"):
        installed(name, __path__=[])
    installed("eagle.model.ea_model", EaModel=FakeEagle)
    shape = {"num_steps": 4, "top_k": 2, "num_draft_tokens": 8}
    settings = {**SETTINGS, **shape, "draft": "head", "eagle3": True, "torch_dtype": "auto"}
    engine = script("engine_rivals").EagleOwn(settings)
    made = FakeEagle.made
    assert (made["base_model_path"], made["ea_model_path"], made["use_eagle3"]) == ("target", "head", True)
    assert (made["depth"], made["top_k"], made["total_token"]) == (3, 2, 8), "its depth lacks the first level"
    assert engine._model.tokenizer.eos_token_id == -1, "a stop id would end its answers early"
    assert (engine.weight_bits, engine.most) == (32, 1)
    assert engine.answer(PROMPTS[:1], 7) == {"output_ids": [counted([7], 7)], "verify_steps": 3, "accepted": 6}


def test_llama_cpp_python(script, installed, tmp_path, monkeypatch) -> None:
    """Its cache is emptied before each prompt, decoding is greedy, and ends with the last token asked for."""
    (tmp_path / "x.gguf").write_bytes(b"0" * 1000)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)  # not installed, whatever this machine has
    asked: list = []

    class Llama:
        def __init__(self, path, **options):
            asked.append((path, options["n_ctx"], options["n_threads"]))
            self.model = "weights"

        def reset(self):
            asked.append("reset")

        def generate(self, prompt, temp, repeat_penalty):
            asked.append((temp, repeat_penalty))
            yield from torch.tensor(counted(prompt, 1000))

    installed("llama_cpp", Llama=Llama, llama_model_n_params=lambda model: 2000, __version__="0.3")
    engine = script("engine_rivals").llama_cpp({**SETTINGS, "gguf": str(tmp_path / "x.gguf")})
    assert (engine.weight_bits, engine.most, engine.version) == (4.0, 1, "llama-cpp-python 0.3")
    assert json.dumps(engine.answer([[5, 6]], 4)) == '{"output_ids": [[7, 8, 9, 10]]}'
    assert asked == [(str(tmp_path / "x.gguf"), 64, 1), "reset", (0.0, 1.0)]


class LlamaServer(http.server.BaseHTTPRequestHandler):
    """llama.cpp's server as far as the worker asks it: it answers several prompts in any order, one without a list."""

    asked: list[dict] = []

    def do_GET(self) -> None:
        self._reply({"data": [{"meta": {"n_params": 2000}}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        told = [{"index": at, "tokens": counted(one, body["n_predict"])} for at, one in enumerate(body["prompt"])]
        self._reply(told[::-1] if len(told) > 1 else told[0])

    def _reply(self, message: object) -> None:
        data = json.dumps(message).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address():
    """Where a LlamaServer listens."""
    server = http.server.HTTPServer(("127.0.0.1", 0), LlamaServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_llama_cpp_server(script, installed, tmp_path, address) -> None:
    """Answers come back in the order of the prompts; every slot has the whole context; no prompt is remembered."""
    (tmp_path / "x.gguf").write_bytes(b"0" * 1000)

    class CommonParams:
        def __init__(self):
            self.model, self.cpuparams, self.cpuparams_batch = (SimpleNamespace() for _ in range(3))

    made: list[CommonParams] = []
    installed(
        "xllamacpp",
        CommonParams=CommonParams,
        Server=lambda params: made.append(params) or SimpleNamespace(listening_address=address),
        get_system_info=lambda: "AVX2 = 1 | F16C = 1 | ",
        __version__="0.9",
    )
    engine = script("engine_rivals").llama_cpp({**SETTINGS, "gguf": str(tmp_path / "x.gguf")})
    assert (engine.weight_bits, engine.most, engine.version) == (4.0, None, "xllamacpp 0.9 (AVX2 F16C)")
    assert (made[0].n_parallel, made[0].n_ctx, made[0].cache_prompt) == (2, 128, False)
    assert engine.answer(PROMPTS, 3) == {"output_ids": [[8, 9, 10], [10, 11, 12]]}
    assert engine.answer(PROMPTS[:1], 3) == {"output_ids": [[8, 9, 10]]}
    for body in LlamaServer.asked:
        assert body["ignore_eos"] is True and body["temperature"] == 0.0 and body["cache_prompt"] is False


BINARY = """#!{python}
import http.server, json, os, sys
if "--version" in sys.argv:
    print("version: 9 (build 1)", file=sys.stderr)
    sys.exit()
open({words!r}, "w").write(json.dumps(sys.argv[1:]))
class Handler(http.server.BaseHTTPRequestHandler):
    loading = 2
    def do_GET(self):
        Handler.loading -= self.path == "/health"
        self.reply(503 if Handler.loading > 0 else 200, {{"data": [{{"meta": {{"n_params": 2000}}}}]}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        drafted = {{"draft_n": 6, "draft_n_accepted": 2}} if "--spec-type" in sys.argv else {{}}
        told = [{{"index": at, "tokens": [one[-1] + 1 + i for i in range(body["n_predict"])], "timings": drafted}}
                for at, one in enumerate(body["prompt"])]
        self.reply(200, told)
    def reply(self, status, message):
        data = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("draft", [None, "head.gguf", "ngram"])
def test_llama_cpps_binary(script, tmp_path, draft) -> None:
    """Waits until the model is loaded, tells the server's memory, and counts steps: one token each beside the
    accepted ones, after the prefill's."""
    words, binary = tmp_path / "words", tmp_path / "llama-server"
    binary.write_text(BINARY.format(python=sys.executable, words=str(words)))
    binary.chmod(0o755)
    (tmp_path / "x.gguf").write_bytes(b"0" * 1000)
    asked = {
        "binary": str(binary),
        "gguf": str(tmp_path / "x.gguf"),
        "draft": draft,
        "num_steps": 3,
        "least_probability": 0.6,
        "ngram": 2,
    }
    engine = script("engine_rivals").llama_cpp({**SETTINGS, **asked})
    try:
        assert (engine.weight_bits, engine.most, engine.version) == (4.0, None, "version: 9")
        told = engine.answer(PROMPTS, 5)
    finally:
        engine._process.terminate()
        engine._process.wait()
    assert told.pop("peak_memory_bytes") > 0
    counts = {"accepted": 4, "verify_steps": 4} if draft else {}
    assert told == {"output_ids": [[8, 9, 10, 11, 12], [10, 11, 12, 13, 14]], **counts}
    given = " ".join(json.loads(words.read_text()))
    assert "-t 1 -np 2 -c 128 --cache-ram 0" in given
    drafting = {
        "head.gguf": "-md head.gguf --spec-type draft-eagle3 --spec-draft-n-max 3 --spec-draft-p-min 0.6",
        "ngram": "--spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 3",
    }
    assert given.partition("--cache-ram 0 ")[2] == drafting.get(draft, "")


def test_a_server_that_ends_at_once(script, tmp_path) -> None:
    asked = {"binary": "/bin/false", "gguf": "x.gguf", "draft": None}
    with pytest.raises((RuntimeError, subprocess.CalledProcessError)):
        script("engine_rivals").llama_cpp({**SETTINGS, **asked})


@pytest.mark.compile
def test_hugging_face_compiled(script, tiny_target_directory, tmp_path) -> None:
    """A static cache that grows from answer to answer would compile within the timing, and could answer otherwise."""
    worker = script("engine_worker")
    asked = {**SETTINGS, "target": str(tiny_target_directory), "dtype": "float32", "quantization": None, "lookup": None}
    plain, compiled = (worker.HuggingFace({**asked, "torch_compile": compiled}) for compiled in (False, True))
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    assert compiled.answer(prompts, 4) == plain.answer(prompts, 4)
    programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert programs, "nothing was compiled"
    for long in (prompts, [[8, 9, 10, 11, 12], [5]]):
        assert compiled.answer(long, 12) == plain.answer(long, 12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == programs
    assert compiled.settings.startswith("threads: 1, float32, torch.compile with a static cache")
