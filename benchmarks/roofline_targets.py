"""The targets of engine_gpu.py, rounds_gpu.py and training_gpu.py, each with a head, and prompts for them.

    demo           the target that --draft names (else the demo) with its trained head; without --draft a head that is
                   initialised from the target and not trained. Real prompts, real acceptance.
    llama-3.1-8b   the shape of Llama-3.1-8B, random weights made on the device, and a random EAGLE-3 head over 32000
                   ids. Random prompts, and a FORCED accept_length: only its times mean anything.
    smollm2-135m   the same of SmolLM2-135M's shape (rounds_gpu.py)

With `smoke`, or as `tiny`, they are tiny random models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from toolkit.bench.prompts import builtin_prompts
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.heads.aux_config import default_aux_layer_ids
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.infer.load.load_draft import fit_draft, stated_target
from toolkit.infer.request.chat_prompt import chat_ids
from toolkit.infer.verify.forced import ForcedAcceptance
from toolkit.targets.demo import DEMO_NAME
from toolkit.targets.load import load_target
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.warm_start import initialise_from_target

DRAFT_VOCABULARY, SMALL_DRAFT_VOCABULARY = 32000, 8192
LLAMA: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A target and its head, both on the device. head: what the head is, in words. forced: acceptance by chance;
    None: the target decides. prompts: token ids."""

    name: str
    target: Target
    draft: DraftCheckpoint
    head: str
    forced: ForcedAcceptance | None
    prompts: list[list[int]]

    def group(self, batch: int, repeat: int) -> list[list[int]]:
        """The prompts of one repeat, others than those of the last where there are enough."""
        return [self.prompts[(repeat * batch + i) % len(self.prompts)] for i in range(batch)]

    @property
    def acceptance(self) -> str:
        """For the title of every table."""
        if self.forced_length is None:
            return "acceptance as the target decides"
        return f"forced accept_length {self.forced_length:.2f}"

    @property
    def forced_length(self) -> float | None:
        return None if self.forced is None else self.forced.accept_length


def demo_subject(name: str | None, draft: Path | None, device: torch.device) -> Subject:
    """Raises what load_draft and load_target raise."""
    head = None if draft is None else load_draft(draft)
    asked, revision = (name or DEMO_NAME, None) if name is not None or head is None else stated_target(head)
    target = load_target(asked, revision=revision, device=device)
    prompts = [chat_ids(target.tokenizer, [{"role": "user", "content": one.turns[0]}]) for one in builtin_prompts()]
    if head is None:
        said = "initialised from the target, not trained"
        fitted = fit_draft(_untrained(target), target)
    else:
        said, fitted = f"trained ({head.kind}, {head.path})", fit_draft(head, target)
    assert isinstance(fitted, DraftCheckpoint)
    return Subject(asked, target, fitted, said, None, prompts)


def shaped_subject(device: torch.device, context: int, forced: ForcedAcceptance) -> Subject:
    """Llama-3.1-8B's shape in bfloat16."""
    config = LlamaConfig(**LLAMA, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    target = _random_target("llama-3.1-8b-shaped, random weights", config, torch.bfloat16, device)
    return _forced_subject(target, DRAFT_VOCABULARY, context, forced)


def small_subject(device: torch.device, context: int, forced: ForcedAcceptance) -> Subject:
    """SmolLM2-135M's shape in bfloat16."""
    config = LlamaConfig(**SMALL, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)
    target = _random_target("smollm2-135m-shaped, random weights", config, torch.bfloat16, device)
    return _forced_subject(target, SMALL_DRAFT_VOCABULARY, context, forced)


def tiny_subject(device: torch.device, context: int, forced: ForcedAcceptance) -> Subject:
    return tiny_subjects(device, context, forced)[1]


def tiny_subjects(device: torch.device, context: int, forced: ForcedAcceptance) -> tuple[Subject, Subject]:
    """In the places of both, in seconds."""
    config = LlamaConfig(**TINY, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    first, second = (_random_target(f"tiny-{one}", config, torch.float32, device) for one in ("demo", "llama"))
    fitted = fit_draft(_untrained(first), first)
    assert isinstance(fitted, DraftCheckpoint)
    demo = Subject(first.name, first, fitted, "initialised from the target, not trained", None, _random(first, context))
    return demo, _forced_subject(second, 128, context, forced)


def _random_target(name: str, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> Target:
    """Made where it will lie: 8B parameters are not carried over."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    words = {"<s>": 0, "</s>": 1, "<unk>": 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), name, dtype=dtype)


def _forced_subject(target: Target, draft_vocabulary: int, context: int, forced: ForcedAcceptance) -> Subject:
    head = _head(target, draft_vocabulary)
    fitted = fit_draft(DraftCheckpoint(head=head, token_map=_some_ids(target, draft_vocabulary)), target)
    assert isinstance(fitted, DraftCheckpoint)
    prompts = _random(target, context)
    return Subject(target.name, target, fitted, "random EAGLE-3 head", forced, prompts)


def _untrained(target: Target) -> DraftCheckpoint:
    size = min(DRAFT_VOCABULARY, target.vocab_size // 2)
    token_map = TokenMap.from_ids(sorted({*range(size), *target.stop_ids}), target.vocab_size)
    head = _head(target, token_map.size).to(target.dtype)
    initialise_from_target(head, target, token_map, [], seed=0)
    return DraftCheckpoint(head=head, token_map=token_map)


def _head(target: Target, draft_vocabulary: int) -> Eagle3Head:
    config = Eagle3Config.from_target_config(
        target.config,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocabulary,
        aux_layer_ids=default_aux_layer_ids(target.n_layers),
    )
    with target.device:
        return Eagle3Head(config).eval().requires_grad_(False)


def _some_ids(target: Target, count: int) -> TokenMap:
    """Ids from all over the vocabulary, the ends of turns among them."""
    ids = [number * target.vocab_size // count for number in range(count)]
    return TokenMap.from_ids(sorted({*ids[len(target.stop_ids - set(ids)) :], *target.stop_ids}), target.vocab_size)


def _random(target: Target, context: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, target.vocab_size, (64, context), generator=generator).tolist()


# Targets of random weights, by the names that scripts take.
FORCED = {"llama": shaped_subject, "small": small_subject, "tiny": tiny_subject}
