"""`toolkit serve` as it is typed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys

import httpx
import openai
import pytest
import torch

from toolkit.cli import main
from toolkit.weights import load_tensors, save_tensors


def rewrite(change):
    def damage(directory):
        tensors = load_tensors(directory / "model.safetensors")
        change(tensors)
        save_tensors(directory / "model.safetensors", tensors)

    return damage


DAMAGES = {
    "wrong shape": (rewrite(lambda tensors: tensors.update({"fc.weight": torch.zeros(3, 3)})), "fc.weight"),
    "no weights": (lambda directory: (directory / "model.safetensors").unlink(), "model.safetensors"),
    "not JSON": (lambda directory: (directory / "config.json").write_text("{"), "config.json"),
    "no directory": (shutil.rmtree, "no draft directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_draft_directory(tiny_draft_directory, tmp_path, capsys, damage):
    """Status 2 and a message that names the culprit, without a traceback."""
    directory = shutil.copytree(tiny_draft_directory, tmp_path / "ckpt")
    break_it, says = DAMAGES[damage]
    break_it(directory)
    assert main(["serve", "--draft", str(directory), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "toolkit: error:" in error and says in error and "Traceback" not in error


@pytest.fixture(scope="module")
def process(tiny_draft_directory):
    """`python -m toolkit serve --draft DIR` in a process of its own, and the text that it printed when ready."""
    command = [
        sys.executable,
        "-m",
        "toolkit",
        "serve",
        "--draft",
        str(tiny_draft_directory),
        "--port",
        "0",
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-num-steps",
        "4",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        lines = []
        for line in running.stdout:
            lines.append(line)
            if line.startswith("Ctrl-C"):
                break
        try:
            yield running, "".join(lines)
        finally:
            running.kill()


@pytest.mark.process
def test_served_draft_writes_what_the_plain_target_writes(process):
    """The whole way: HTTP, thread, engine, draft head; greedy speculative text equals plain text, streamed or not."""
    running, text = process
    assert running.poll() is None, running.stderr.read()
    assert "chain 4 (4,1,5)" in text
    client = openai.OpenAI(base_url=text.split()[2], api_key="none", max_retries=0, timeout=60)
    name = client.models.list().data[0].id
    fields = {"model": name, "messages": [{"role": "user", "content": "apples"}], "temperature": 0, "max_tokens": 24}
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


@pytest.mark.process
def test_the_printed_curl_line_works(process):
    """The line that a new user copies."""
    line = next(line for line in process[1].splitlines() if "curl" in line)
    _, url, _, _, _, body = shlex.split(line)
    answer = httpx.post(url, content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.process
def test_ctrl_c_ends_the_server_in_order(process):
    """Status 0 and no traceback. Runs last: it ends the module's server."""
    running, _ = process
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=30)
    assert running.returncode == 0, error
    assert "the server has ended" in error and "Traceback" not in error
