"""Small targets of several families, and heads for them, on disk: ranks load them by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from toolkit.checkpoint.draft_dir import save_draft
from toolkit.heads.draft_head import build_head
from toolkit.heads.dspark import DSparkConfig
from toolkit.heads.eagle2 import Eagle2Config
from toolkit.heads.eagle3 import Eagle3Config
from toolkit.heads.mtp import MtpConfig
from toolkit.targets.load import load_config
from toolkit.tokenmap.token_map import TokenMap

VOCABULARY = 24  # few tokens: an untrained head is right now and then
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},  # a bias behind a sum over ranks counts once
    "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "olmo2": {},
    "mixtral": {"num_local_experts": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama-odd": {"vocab_size": VOCABULARY + 1},
}


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a random target of a family."""
    made: dict[str, str] = {}

    def directory(name: str) -> str:
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(name))
            sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, max_position_embeddings=256)
            sizes |= dict(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2)
            ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
            config = AutoConfig.for_model(name.partition("-")[0], **{**sizes, **ids, **FAMILIES[name]})
            config.initializer_range = 0.4
            torch.manual_seed(11)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():  # biases and norms are 0 or 1 in a new model, and hide mistakes
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, mean=1.0, std=0.4)
            if config.tie_word_embeddings:  # else every token is followed by itself
                model.get_input_embeddings().weight.data.mul_(0.1)
            model.save_pretrained(made[name])
            words = {f"w{i}": i for i in range(VOCABULARY)}
            tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(made[name])
        return made[name]

    return directory


@pytest.fixture(scope="session")
def head_for(family: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The directory of an untrained head for a family's target. sizes: fields of its config to change."""

    def directory(kind: str, name: str, **sizes: int) -> str:
        target = load_config(family(name))[0]
        torch.manual_seed(4)
        if kind in ("eagle3", "dspark"):
            kept = sizes.pop("draft_vocab_size", 20)
            own = {"target_hidden_size": target.hidden_size, "draft_vocab_size": kept, "aux_layer_ids": (0, 1, 2)}
            of_kind: Any = {"eagle3": Eagle3Config, "dspark": DSparkConfig}[kind]
            config: Any = of_kind.from_target_config(target, vocab_size=target.vocab_size, **own)
            ids = [0, 1, 2, *range(target.vocab_size - kept + 3, target.vocab_size)]
            token_map = TokenMap.from_ids(ids, target.vocab_size)
        else:
            config = {"eagle2": Eagle2Config, "mtp": MtpConfig}[kind].from_target_config(
                target, vocab_size=target.vocab_size
            )
            token_map = None
        config = dataclasses.replace(config, **sizes)
        head = build_head(config)
        path = tmp_path_factory.mktemp(f"{kind}-{name}")
        meta = {"target": {"name": family(name), "revision": None}}
        return str(save_draft(path, head.state_dict(), config, token_map, meta))

    return directory


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """A ragged four; the first is run alone too."""
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (9, 5, 17, 1)]


@pytest.fixture(scope="session")
def here() -> Path:
    return Path(__file__).parent
