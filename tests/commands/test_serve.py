"""`toolkit serve` as it is typed, and when something goes wrong: each fault, with what was promised for it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest

from toolkit.cli import main
from toolkit.commands.serve import announcement
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.load.llm import LLM
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.server.completions import Served
from toolkit.weights import load_tensors, save_tensors

BODY = {"messages": [{"role": "user", "content": "apples"}], "temperature": 0, "max_tokens": 24}


@contextlib.contextmanager
def serving(directory, *flags):
    """A server process with a chain of 4; yields it with its address once it is ready, and kills it after the test."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "toolkit", "serve", "--draft", str(directory), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    url, pipes = f"http://127.0.0.1:{port}", {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--shape", "4,1,5", *flags], text=True, env=environment, **pipes) as process:
        try:
            wait_until_ready(process, url)
            yield process, url
        finally:
            process.kill()


def wait_until_ready(process, url):
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, f"the server ended: {process.stderr.read()}"
        assert time.monotonic() < deadline, "the server did not start"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.05)


@pytest.mark.process
def test_served_draft_writes_what_the_plain_target_writes(tiny_draft_directory):
    """The whole way: HTTP, thread, engine, draft head; greedy speculative text equals plain text, streamed or not. The
    printed curl line works: a new user copies it."""
    with serving(tiny_draft_directory, "--speculative-algorithm", "EAGLE3") as (process, url):
        lines = list(itertools.takewhile(lambda line: not line.startswith("Ctrl-C"), process.stdout))
        assert "chain 4 (4,1,5)" in "".join(lines)
        _, address, _, _, _, body = shlex.split(next(line for line in lines if "curl" in line))
        answer = httpx.post(address, content=body, headers={"Content-Type": "application/json"}, timeout=60)
        assert answer.status_code == 200 and address.startswith(url), answer.text
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        fields = {"model": client.models.list().data[0].id, **BODY}
        drafted = client.chat.completions.create(**fields, extra_body={"return_acceptance": True})
        plain = client.chat.completions.create(**fields, extra_body={"speculative": False})
        streamed = client.chat.completions.create(**fields, stream=True)
        assert drafted.choices[0].message.content == plain.choices[0].message.content
        assert plain.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in streamed)
        told = drafted.choices[0].acceptance
        assert told["verify_steps"] == sum(told["histogram"]) == drafted.usage.speculative["verify_steps"] > 0
        assert min(told["seconds"][part] for part in ("queue", "prefill", "draft", "verify")) > 0
        assert not hasattr(plain.usage, "speculative")
        sampled = [client.chat.completions.create(**{**fields, "temperature": 1, "seed": s}) for s in (1, 1, 2)]
        texts = [answer.choices[0].message.content for answer in sampled]
        assert texts[0] == texts[1] != texts[2]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_head_of_nan(tiny_draft_directory, tmp_path, monkeypatch, caplog):
    """The log says that the head is broken; the answers are those of plain decoding. Drafts that are drawn by it do not
    end a request."""
    directory = shutil.copytree(tiny_draft_directory, tmp_path / "ckpt")
    tensors = load_tensors(directory / "model.safetensors")
    tensors["fc.weight"].fill_(math.nan)
    save_tensors(directory / "model.safetensors", tensors)
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    settings = [SamplingParams(max_tokens=24, temperature=t, seed=s) for t, s in ((0.0, None), (1.0, 4), (1.0, None))]
    with LLM(draft=str(directory), shape="4,1,5", device="cpu") as llm:
        asked = ["apples"] * len(settings)
        drafted, plain = (llm.generate(asked, settings, speculative=drafts) for drafts in (True, False))
    assert "fc.weight hold values that are not finite" in caplog.text
    assert [one.token_ids for one in drafted[:2]] == [one.token_ids for one in plain[:2]]
    assert drafted[2].finish_reason in ("stop", "length")


def test_check_passes_on_what_it_needs(monkeypatch, tmp_path):
    """The head and target that are served are those that are checked; a failure ends the start."""
    commands = []

    def check(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", check)
    flags = ["--draft", str(tmp_path), "--target", "x", "--device", "cpu", "--chat-template", "none", "--port", "0"]
    assert main(["serve", *flags, "--max-running-requests", "3", "--check"]) == 1
    assert commands[0][1:] == ["-m", "toolkit", "check", "--quick", *flags[:8]]


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_a_broken_draft_directory(tiny_draft_directory, tmp_path, capsys, broken):
    """Status 2 and a message that names the file, without a traceback."""
    directory = shutil.copytree(tiny_draft_directory, tmp_path / "ckpt")
    (directory / broken).write_text("{")
    assert main(["serve", "--draft", str(directory), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "toolkit: error:" in error and broken in error and "Traceback" not in error


def test_what_to_try_with_a_base_model(tiny_draft_directory):
    """It takes no chats: the printed line would get a 400."""
    loaded = load_engine(EngineConfig(draft=tiny_draft_directory, chat_template="none"))
    served = Served("tiny", loaded.target.tokenizer, loaded.engine, 64, "fp", None)
    text = announcement(loaded, served, "127.0.0.1", 80)
    loaded.engine.close()
    assert "curl http://127.0.0.1:80/v1/completions" in text and '"prompt"' in text
