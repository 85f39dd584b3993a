"""llama.cpp drafts with a GLM-4.5 module as our engine does: the same tokens, and as many accepted drafts, prompt by
prompt.

Opt-in: TOOLKIT_LLAMA_SERVER names its `llama-server`, built from the source in llama-cpp-python 0.3.36 or a newer one.
The target is tiny and random.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch

from tests.checkpoint.native_targets import change_module, write_native_target
from tests.targets.glm_gguf import write_glm_gguf
from toolkit import LLM, SamplingParams
from toolkit.checkpoint.draft_dir import save_draft
from toolkit.checkpoint.native_mtp import load_native, native_of
from toolkit.cli import main
from toolkit.targets.load import load_target

PROMPTS, MAX_TOKENS = 8, 48
# As exact as ours: float32 keys and values, no other layout of weights, no fused attention.
EXACT = "-t 1 --no-repack -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32 --no-warmup --fit off".split()
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif("TOOLKIT_LLAMA_SERVER" not in os.environ, reason="TOOLKIT_LLAMA_SERVER names no llama-server"),
]


@pytest.fixture
def target(tiny_target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    directory = write_native_target(tmp_path / "glm", "glm", tiny_target.tokenizer, agreeing=True)
    change_module(directory, uneven)
    return write_glm_gguf(tmp_path / "glm.gguf", directory)


def uneven(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drafts that depend on the hidden state: it weighs more, and is another one before the last norm than after it."""
    joined, last = (f"model.layers.4.{name}.weight" for name in ("eh_proj", "shared_head.norm"))
    scale = torch.rand(64, generator=torch.Generator().manual_seed(5)) + 0.5
    weight = tensors[joined].clone()
    weight[:, 64:] *= 2
    return {**tensors, joined: weight, last: tensors[last] * scale}


@contextmanager
def llama_server(path: Path, drafts: int, log: Path) -> Iterator[str]:
    """The address of a server with a slot for each prompt: a slot used twice keeps a hidden state of the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["-m", str(path), "--port", port, "-np", str(PROMPTS), "-c", str(PROMPTS * 256)]
    words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(drafts), "--spec-draft-p-min", "0"]
    with log.open("w") as said:
        process = subprocess.Popen([os.environ["TOOLKIT_LLAMA_SERVER"], *words, *EXACT], stdout=said, stderr=said)
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            try:
                urlopen(f"http://127.0.0.1:{port}/health")
                break
            except (URLError, ConnectionError):
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def llamas_answers(path: Path, prompts: list[list[int]], drafts: int, log: Path) -> list[dict[str, Any]]:
    found = []
    with llama_server(path, drafts, log) as address:
        for slot, prompt in enumerate(prompts):
            asked = {"prompt": prompt, "n_predict": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "id_slot": slot}
            asked |= {"return_tokens": True, "cache_prompt": False}
            body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
            with urlopen(Request(f"{address}/completion", body, kind)) as reply:
                said = json.load(reply)
            counts = said["timings"]
            found.append(
                {"output_ids": said["tokens"], "drafted": counts["draft_n"], "accepted": counts["draft_n_accepted"]}
            )
    return found


def our_answers(prompts: list[list[int]], drafts: int, **names: str) -> list[dict[str, Any]]:
    asked = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    found = []
    with LLM(**names, shape=f"{drafts},1,{drafts + 1}", dtype="float32", prefix_cache=False) as llm:
        for prompt in prompts:
            one = llm.generate([prompt], asked)[0]
            drafted = accepted = 0
            left = MAX_TOKENS - 1  # prefill gives the first token
            for event in one.events:
                offered = min(drafts, left - 1)  # llama.cpp drafts no more than it may still return
                drafted, accepted = drafted + offered, accepted + min(event.accepted, offered)
                left -= event.accepted + 1
            found.append({"output_ids": one.token_ids, "drafted": drafted, "accepted": accepted})
    return found


def prompts_of_ids() -> list[list[int]]:
    return [[(17 * place * place + 5 * n) % 380 + 5 for n in range(6 + place)] for place in range(PROMPTS)]


@pytest.mark.parametrize("drafts", [1, 3])
def test_tokens_and_counts(drafts: int, target: Path, tmp_path: Path) -> None:
    """The order of hidden state and embedding, which hidden state is used again, a norm: each changes the counts."""
    mine = our_answers(prompts_of_ids(), drafts, target=str(target), draft="native")
    assert mine == llamas_answers(target, prompts_of_ids(), drafts, tmp_path / "log")
    assert sum(one["accepted"] for one in mine) > 35, "counts near zero would compare nothing"


@torch.no_grad()
def test_a_copy_with_a_tuned_module(target: Path, tmp_path: Path) -> None:
    """What `toolkit export --to native` wrote is served by llama.cpp, and it drafts what our draft directory drafts."""
    loaded = load_target(target)
    draft = load_native(loaded, *native_of(loaded))
    generator = torch.Generator().manual_seed(3)
    state = {
        name: value + 0.02 * torch.randn(value.shape, generator=generator)
        for name, value in draft.head.state_dict().items()
    }
    meta = {"target": {"name": str(target), "revision": loaded.revision}}
    tuned = save_draft(tmp_path / "tuned", state, draft.head.config, None, meta)
    assert main(["export", "--draft", str(tuned), "--to", "native", "--out", str(tmp_path / "copy")]) == 0
    mine = our_answers(prompts_of_ids(), 1, draft=str(tuned))
    assert mine == llamas_answers(tmp_path / "copy" / target.name, prompts_of_ids(), 1, tmp_path / "log")
    assert mine != our_answers(prompts_of_ids(), 1, target=str(target), draft="native"), "the tuning changed nothing"
