"""llama.cpp drafts with a GLM-4.5 module as our engine does: the same tokens, and as many accepted drafts, prompt by
prompt.

Opt-in: TOOLKIT_LLAMA_SERVER names its `llama-server`, built from the source in llama-cpp-python 0.3.36 or a newer one.
The target is tiny and random.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.checkpoint.native_targets import change_module, write_native_target
from tests.peers.llama_server import llamas_answers, our_answers
from tests.targets.glm_gguf import write_glm_gguf
from toolkit.checkpoint.draft_dir import save_draft
from toolkit.checkpoint.native_mtp import load_native, native_of
from toolkit.cli import main
from toolkit.targets.load import load_target

PROMPTS, MTP = 8, ("--spec-type", "draft-mtp")
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


def prompts_of_ids() -> list[list[int]]:
    return [[(17 * place * place + 5 * n) % 380 + 5 for n in range(6 + place)] for place in range(PROMPTS)]


@pytest.mark.parametrize("drafts", [1, 3])
def test_tokens_and_counts(drafts: int, target: Path, tmp_path: Path) -> None:
    """The order of hidden state and embedding, which hidden state is used again, a norm: each changes the counts."""
    mine = our_answers(prompts_of_ids(), drafts, target=str(target), draft="native")
    assert mine == llamas_answers(target, prompts_of_ids(), drafts, tmp_path / "log", *MTP)
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
    assert mine == llamas_answers(tmp_path / "copy" / target.name, prompts_of_ids(), 1, tmp_path / "log", *MTP)
    assert mine != our_answers(prompts_of_ids(), 1, target=str(target), draft="native"), "the tuning changed nothing"
