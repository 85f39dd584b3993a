"""What the judges said, as one record: TOOLKIT_JUDGES_RECORD names the file, else nothing is written. A target that
vLLM serves on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import train_tokenizer
from toolkit.bench.records import make_record, write_record

COMMAND = "TOOLKIT_VLLM_PYTHON=PYTHON TOOLKIT_PEERS_DRAFT=DIR TOOLKIT_JUDGES_RECORD=FILE pytest -m peers"


@pytest.fixture(scope="session")
def verdicts() -> Iterator[list[dict[str, Any]]]:
    """Rows with `judge`, `head` and what was compared; a test adds its own before it asserts."""
    rows: list[dict[str, Any]] = []
    yield rows
    if rows and os.environ.get("TOOLKIT_JUDGES_RECORD"):
        write_record(os.environ["TOOLKIT_JUDGES_RECORD"], make_record("judges", COMMAND, {}, rows))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """As the tiny target, with heads of 32: vLLM's attention on a CPU has none of 16."""
    tokenizer = train_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"
