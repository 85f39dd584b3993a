"""A tiny random target with a tokenizer trained here, and an untrained draft head for it: no downloads, no GPU."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toolkit.checkpoint.draft_dir import DraftCheckpoint, save_draft
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import default_aux_layer_ids
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the quick brown fox jumps over the lazy dog while seven wizards count apples and write short stories about "
    "rivers, trains, numbers 0 1 2 3 4 5 6 7 8 9 and the weather in spring; system user assistant You are helpful."
)
DRAFT_VOCAB = 160
PLAIN = "not (process or compile or soak or slow or gpu or peers)"  # the tier of `pytest` alone

# Files that are about an optional package; without it they are not collected, and the header says so.
ABOUT = {
    "accelerate": ["benchmarks/test_training.py", "train/test_heads.py", "train/test_nodes.py"],
    "deepspeed": ["benchmarks/test_training.py", "train/test_loop.py", "train/test_nodes.py"],
    "fastapi": ["infer/server", "pipeline/test_rollouts_by_servers.py"],
    "gguf": ["checkpoint/test_gguf_head.py"],
    "llguidance": [
        "infer/engine/test_grammar_decoding.py",
        "infer/request/test_grammar.py",
        "infer/server/test_response_format.py",
    ],
    "openai": ["commands/test_search.py", "commands/test_serve.py", "infer/server"],
}
ABSENT = [package for package in ABOUT if importlib.util.find_spec(package) is None]
collect_ignore = sorted({path for package in ABSENT for path in ABOUT[package]})

torch.set_num_threads(1)  # of every worker: two workers share two cores


def pytest_report_header() -> list[str]:
    return [f"not installed: {package}; left out: {', '.join(ABOUT[package])}" for package in ABSENT]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone runs the plain tier in two worker processes. Named paths run every tier, in this process."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    config.option.markexpr = config.option.markexpr or PLAIN
    is_worker = hasattr(config, "workerinput")  # it parses the command line anew and starts no workers of its own
    if not is_worker and config.option.numprocesses is None and not config.option.usepdb:
        config.option.numprocesses, config.option.dist = 2, "worksteal"


def train_tokenizer(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML's specials and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 8, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    wrapped.chat_template = CHATML
    return wrapped


def build_target(layers: int = 7, seed: int = 0) -> Target:
    """A random fp32 Llama (hidden 64, 4 heads, 2 kv heads) with the tokenizer above."""
    tokenizer = train_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    return Target(model=LlamaForCausalLM(config), tokenizer=tokenizer, name="tiny", revision=None)


def build_draft(target: Target, draft_vocab_size: int = DRAFT_VOCAB, seed: int = 1) -> DraftCheckpoint:
    """An untrained head; its draft vocabulary is a random subset that holds the stop ids."""
    torch.manual_seed(seed)
    config = Eagle3Config.from_target_config(
        target.config,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=default_aux_layer_ids(target.n_layers),
    )
    head = Eagle3Head(config).eval().requires_grad_(False)
    forced = sorted(target.stop_ids)
    others = [token for token in torch.randperm(target.vocab_size).tolist() if token not in target.stop_ids]
    token_map = TokenMap.from_ids(forced + others[: draft_vocab_size - len(forced)], target.vocab_size)
    return DraftCheckpoint(head=head, token_map=token_map)


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    return build_target()


@pytest.fixture(scope="session")
def tiny_draft(tiny_target: Target) -> DraftCheckpoint:
    return build_draft(tiny_target)


@pytest.fixture(scope="session")
def tiny_target_directory(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory):
    """The tiny target as a Hugging Face directory on disk."""
    directory = tmp_path_factory.mktemp("tiny-target")
    tiny_target.model.save_pretrained(directory)
    tiny_target.tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_draft_directory(tiny_target, tiny_draft, tiny_target_directory, tmp_path_factory):
    """The tiny draft as `toolkit run` leaves one on disk; it names the tiny target's directory as its target."""
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    directory = tmp_path_factory.mktemp("tiny-draft")
    return save_draft(directory, tiny_draft.head.state_dict(), tiny_draft.head.config, tiny_draft.token_map, meta)
