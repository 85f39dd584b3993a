"""The Hugging Face target, with the same attributes for every model family.

Shapes: T = tokens, H = hidden size, V = rows of the output embedding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.chat_rows import SENTINEL, TEMPLATE_ERRORS, hides_questions, messages_for
from toolkit.errors import TargetError
from toolkit.targets.fixed_linear import FixedLinear
from toolkit.weights import sha256_json

LAYER_NAMES = ("layers", "h", "blocks")
FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")


@dataclass(eq=False)
class Target:
    """A frozen causal LM with its tokenizer, from `read_target` or from a model in memory.

    tanh: of the logits' soft cap. template: the chat template that the user chose; None: its own. group: the processes
    of a training that hold its layers together by tensor parallel (`features.run_body`); None: every forward is this
    process's own.

    Raises `TargetError` when the model is not a decoder stack with token embeddings, a final norm and a linear output
    embedding, or when the tokenizer has ids without an embedding row.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None = None
    dtype: torch.dtype = None  # type: ignore[assignment]  # None: that of the weights
    quantization: str | None = None
    tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    template: str | None = None
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.model.eval()
        self.model.requires_grad_(False)
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        if capped and self.config._attn_implementation == "sdpa":
            # Older releases of transformers, 5.17 among them, silently leave the cap out there.
            self.model.set_attn_implementation("eager")
        if self.dtype is None:
            self.dtype = next(self.model.parameters()).dtype
        # Find every part now, so that an unsupported architecture fails here and not during a run.
        parts = (self.body, self.layers, self.final_norm, self.embed_tokens, self.lm_head, self.max_context)
        assert all(part is not None for part in parts), "a part of the target is None"
        if len(self.tokenizer) > self.vocab_size:
            raise TargetError(
                f"the tokenizer of {self.name} has {len(self.tokenizer)} ids and the model {self.vocab_size} embedding "
                "rows, but every id needs a row; use the tokenizer that was published with the model"
            )

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def weight_bits(self) -> float:
        return weight_bits(self.model)

    @property
    def precision(self) -> str:
        """Quantization, dtype and bits per weight, for logs and reports."""
        dtype = str(self.dtype).removeprefix("torch.")
        weights = "" if self.quantization is None else f"{self.quantization} weights, "
        return f"{weights}{dtype}, {self.weight_bits:.3g} bits a weight"

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """H, the width of the residual stream."""
        return self.lm_head.in_features

    @property
    def vocab_size(self) -> int:
        """V, rows of the output embedding (may exceed the tokenizer's size)."""
        return self.lm_head.out_features

    @cached_property
    def body(self) -> nn.Module:
        """The inner model; its forward returns the last hidden state, after the final norm."""
        body = self.model.get_decoder() if hasattr(self.model, "get_decoder") else None
        if body is None or body is self.model:
            raise self._unsupported("no inner decoder (get_decoder)")
        return body

    @cached_property
    def layers(self) -> nn.ModuleList:
        for name in LAYER_NAMES:
            layers = getattr(self.body, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) == self.config.num_hidden_layers:
                return layers
        raise self._unsupported(
            f"no list of {self.config.num_hidden_layers} decoder layers under {', '.join(LAYER_NAMES)}"
        )

    @cached_property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer and the output embedding."""
        for name in FINAL_NORM_NAMES:
            norm = getattr(self.body, name, None)
            if isinstance(norm, nn.Module):
                return norm
        raise self._unsupported(f"no final norm under {', '.join(FINAL_NORM_NAMES)}")

    @cached_property
    def embed_tokens(self) -> nn.Embedding:
        """Token embedding [V, H]."""
        embedding = self.model.get_input_embeddings()
        if not isinstance(embedding, nn.Embedding):
            raise self._unsupported(f"its input embedding is {type(embedding).__name__}, not nn.Embedding")
        return embedding

    @property
    def lm_head(self) -> nn.Linear | FixedLinear:
        """Output embedding: hidden [T, H] -> raw scores [T, V]; `logits` adds the family's own scaling."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, (nn.Linear, FixedLinear)):
            raise self._unsupported(f"its output embedding is {type(head).__name__}, not nn.Linear")
        return head

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of final-normed hidden states [..., H], with the family's logit factor and soft cap."""
        return self.finish_scores(self.lm_head(hidden))

    def finish_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Raw scores of the output matrix (any of its columns) -> logits: the family's logit factor and soft cap."""
        config = self.config
        if getattr(config, "logit_scale", None) is not None:  # Cohere
            scores = scores * config.logit_scale
        if getattr(config, "logits_scaling", None) is not None:  # Granite
            scores = scores / config.logits_scaling
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        return scores if cap is None else self.tanh(scores / cap) * cap

    @cached_property
    def max_context(self) -> int:
        """The largest number of positions that the target supports."""
        stated = stated_context(self.config)
        if stated is None:
            raise self._unsupported("its config has no max_position_embeddings")
        return stated

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: eos of generation config, config and tokenizer, and the template's end of turn."""
        generation = getattr(self.model, "generation_config", None)
        return stop_ids_of(generation, self.config, self.tokenizer, self.vocab_size)

    @cached_property
    def template_sha256(self) -> str:
        """Hex sha256 of the chat template; empty when the tokenizer has none."""
        template = getattr(self.tokenizer, "chat_template", None)
        if not template:
            return ""
        return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else sha256_json(template)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over config, name and revision; the same in every dtype and quantization."""
        return self.fingerprint_as(self.name, self.revision)

    def fingerprint_as(self, name: str, revision: str | None) -> str:
        """The fingerprint that this configuration has under another name and revision."""
        return sha256_json([comparable_config(self.config), name, revision])[:16]

    def _unsupported(self, what: str) -> TargetError:
        return TargetError(
            f"{type(self.model).__name__} ({self.name}) cannot be a target: {what}. A target must be a decoder-only "
            "causal LM with token embeddings, a list of layers, a final norm and a linear output embedding"
        )


def describe_target(target: Target) -> dict[str, Any]:
    """The record of a target; it is enough to load it again."""
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint,
        "template_sha256": target.template_sha256,
        **({} if target.template is None else {"chat_template": target.template}),
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.quantization,
    }


def comparable_config(config: PretrainedConfig) -> dict[str, Any]:
    """The settings of a configuration that are the same for every copy of a model, for JSON."""
    # save_pretrained adds `architectures`; saving a target must not change its fingerprint.
    left_out = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}
    plain: dict[str, Any] = _plain({key: value for key, value in config.to_dict().items() if key not in left_out})
    return plain


def weight_bits(model: PreTrainedModel) -> float:
    """Bits of all weights in memory, divided by the number of weights of the published model (tied ones count once).

    An output matrix that was tied before it was quantised takes additional memory, which counts.
    """
    held, weights = 0, 0
    for weight in model.parameters():
        held, weights = held + weight.nbytes, weights + weight.numel()
    fixed = [one for one in model.modules() if isinstance(one, FixedLinear) and one.nbytes() > 0]
    for module in fixed:
        held, weights = held + module.nbytes(), weights + module.in_features * module.out_features
    head = model.get_output_embeddings()
    if head in fixed and getattr(model.config, "tie_word_embeddings", False):
        weights -= head.in_features * head.out_features
    return 8 * held / weights


def stated_context(config: PretrainedConfig) -> int | None:
    """The largest number of positions that the config of a text model states."""
    values = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def stop_ids_of(
    generation: GenerationConfig | None, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> frozenset[int]:
    """Ids that end an answer: eos of generation config, config and tokenizer, and the template's end of turn."""
    found: set[int] = set()
    for source in (generation, config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, int))
    end_of_turn = end_of_turn_id(tokenizer)
    if end_of_turn is not None:
        found.add(end_of_turn)
    return frozenset(token for token in found if 0 <= token < vocab_size)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts right after an assistant's answer, or None.

    Raises `TargetError` when the template cannot render a question and its answer, or hides the question.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    if hides_questions(tokenizer):
        raise TargetError("the chat template leaves the text of a user's message out; correct the template")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": SENTINEL}]
    try:
        rendered = str(tokenizer.apply_chat_template(messages_for(tokenizer, messages), tokenize=False))
    except TEMPLATE_ERRORS as error:
        raise TargetError(
            f"the chat template cannot render a question and its answer ({error}); correct the template"
        ) from error
    after = rendered.rpartition(SENTINEL)[2].strip() if SENTINEL in rendered else ""
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return ids[0] if ids and ids[0] in special | set(tokenizer.all_special_ids) else None


def _plain(value: Any) -> Any:
    """A config value for JSON; other types (dtypes, sets) become their text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
