"""The Hugging Face target: loaded by name, checked once, and reached by the same words in every model family.

Shapes: T = tokens, H = hidden size, V = rows of the output embedding.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from toolkit.log import get_logger
from toolkit.target.demo import DEMO_NAME, demo_directory
from toolkit.target.errors import TargetError
from toolkit.target.gguf_file import converted_gguf
from toolkit.weights import sha256_json

__all__ = ["DTYPES", "Target", "TargetError", "load_target", "load_tokenizer"]

log = get_logger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LAYER_NAMES = ("layers", "h", "blocks")
FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
# Where a family multiplies or divides its logits after the output matrix.
LOGIT_FACTORS = {"logit_scale": 1, "logits_scaling": -1}
SENTINEL = "Zebra7Quartz"


@dataclass(eq=False)
class Target:
    """A frozen causal LM with its tokenizer. Built by `load_target`, or from in-memory parts.

    Raises `TargetError` when the model is not a decoder stack with token embeddings, a final norm and a linear output
    embedding, or when the tokenizer has ids the embedding lacks.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.model.eval()
        self.model.requires_grad_(False)
        if self.dtype is None:
            self.dtype = next(self.model.parameters()).dtype
        # Touch every part now, so that a foreign architecture fails here and not in the middle of a run.
        parts = (self.body, self.layers, self.final_norm, self.embed_tokens, self.lm_head, self.max_context)
        assert all(part is not None for part in parts), "a target part was resolved to None"
        if len(self.tokenizer) > self.vocab_size:
            raise TargetError(
                f"the tokenizer of {self.name} has {len(self.tokenizer)} ids and the model {self.vocab_size} embedding rows; "
                "every id needs a row: use the tokenizer that was published with the model"
            )

    @property
    def config(self) -> PretrainedConfig:
        """The text model's config."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
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
        """The inner model whose forward gives the last hidden state, after the final norm."""
        body = self.model.get_decoder() if hasattr(self.model, "get_decoder") else None
        if body is None or body is self.model:
            raise self._unsupported("no inner decoder (get_decoder)")
        return body

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
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

    @cached_property
    def lm_head(self) -> nn.Linear:
        """Output embedding: hidden [T, H] -> raw scores [T, V]; `logits` adds the family's own scaling."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise self._unsupported(f"its output embedding is {type(head).__name__}, not nn.Linear")
        return head

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of final-normed hidden states [..., H], with the family's logit factor and soft cap."""
        scores = self.lm_head(hidden)
        for name, power in LOGIT_FACTORS.items():
            factor = getattr(self.config, name, None)
            if factor is not None:
                scores = scores * factor**power
        cap = getattr(self.config, "final_logit_softcapping", None)
        return scores if cap is None else torch.tanh(scores / cap) * cap

    @cached_property
    def max_context(self) -> int:
        """Number of positions the target was made for."""
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            value = getattr(self.config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        raise self._unsupported("its config states no max_position_embeddings")

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: generation config, config and tokenizer eos, and the template's end of turn."""
        found: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config, self.tokenizer):
            value = getattr(source, "eos_token_id", None)
            found.update([value] if isinstance(value, int) else value or [])
        end_of_turn = end_of_turn_id(self.tokenizer)
        if end_of_turn is not None:
            found.add(end_of_turn)
        return frozenset(token for token in found if 0 <= token < self.vocab_size)

    @cached_property
    def template_sha256(self) -> str:
        """Hex sha256 of the chat template; empty when the tokenizer has none."""
        template = getattr(self.tokenizer, "chat_template", None)
        if not template:
            return ""
        return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else sha256_json(template)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over config, name and revision; the same in every dtype."""
        passing = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
        config = {key: value for key, value in self.config.to_dict().items() if key not in passing}
        return sha256_json([_plain(config), self.name, self.revision])[:16]

    def _unsupported(self, what: str) -> TargetError:
        return TargetError(
            f"{type(self.model).__name__} ({self.name}) cannot be a target: {what}. A decoder-only causal LM with token "
            "embeddings, a list of layers, a final norm and a linear output embedding is needed"
        )


def load_target(
    name: str | Path, *, dtype: str = "auto", device: str | torch.device = "cpu", revision: str | None = None
) -> Target:
    """Load a target by the demo's name, hub id, directory or .gguf path.

    `dtype` "auto" is bfloat16 where the config says so, else float32. `revision` is for hub ids; for the demo and GGUF
    files, whose revision is the file's hash, it must equal that. Raises `TargetError`.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise TargetError(f"dtype {dtype!r} came; one of auto, {', '.join(DTYPES)} is needed")
    source, resolved = _locate(str(name), revision)
    config = _load_config(source, resolved)
    tokenizer = _load_tokenizer(source, resolved)
    wanted = DTYPES.get(dtype) or (torch.bfloat16 if _config_dtype(config) == torch.bfloat16 else torch.float32)
    model = _load_model(source, resolved, config, wanted)
    if str(device) != "cpu":
        model.to(device)  # device only: a dtype here would also cast the rotary frequencies
    if not Path(source).is_dir():
        resolved = getattr(config, "_commit_hash", None) or resolved
    target = Target(model=model, tokenizer=tokenizer, name=str(name), revision=resolved, dtype=wanted)
    _check_logits(target)
    return target


def load_tokenizer(name: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, by the same names as `load_target`. Raises `TargetError`."""
    source, resolved = _locate(str(name), revision)
    return _load_tokenizer(source, resolved)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts right after an assistant's words; None without template or token."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": SENTINEL}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    after = rendered.rpartition(SENTINEL)[2].strip()
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return ids[0] if ids and ids[0] in special | set(tokenizer.all_special_ids) else None


def _locate(name: str, revision: str | None) -> tuple[str, str | None]:
    """Where transformers finds `name`, and its revision: None for a directory, the GGUF's hash, or the hub revision."""
    path = Path(name).expanduser()
    if name == DEMO_NAME and not path.exists():
        directory = demo_directory()
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(f"target {name}: no such GGUF file; give the path of an existing .gguf")
        directory = converted_gguf(path)
    elif path.is_dir():
        if revision is not None:
            raise TargetError(
                f"target {name} is a directory, revision {revision!r} came with it; only hub ids have revisions"
            )
        if not (path / "config.json").is_file():
            raise TargetError(f"target directory {name} has no config.json; a Hugging Face model directory is needed")
        return str(path), None
    elif path.exists():
        raise TargetError(
            f"target {name} is a file of an unknown kind; a directory, a .gguf file or a hub id is needed"
        )
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise TargetError(
            f"target {name} does not exist; a directory, a .gguf file, a hub id or {DEMO_NAME!r} is needed"
        )
    else:
        return name, revision
    own = directory.name
    if revision is not None and revision != own:
        raise TargetError(
            f"target {name}: revision {revision!r} was asked for, the file has {own!r}; leave the revision out"
        )
    return str(directory), own


def _load_config(source: str, revision: str | None) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"no model configuration could be had for target {source!r}: {_first_line(error)} A directory, a .gguf file, a hub "
            f"id that can be reached, or the built-in {DEMO_NAME!r} is needed"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise TargetError(
            f"target {source!r} is a {config.model_type} model ({', '.join(config.architectures or ['no architecture'])}); "
            "a decoder-only causal LM that transformers knows is needed"
        )
    return config


def _load_tokenizer(source: str, revision: str | None) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetError(
            f"target {source!r} has no tokenizer that can be loaded: {_first_line(error)} Put tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from error
    if len(tokenizer) == 0:
        raise TargetError(f"target {source!r} has an empty tokenizer; put tokenizer.json beside the weights")
    return tokenizer


def _load_model(source: str, revision: str | None, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise TargetError(f"target {source!r} cannot be loaded as a causal LM: {_first_line(error)}") from error
    missing, mismatched = sorted(info["missing_keys"]), sorted(str(key) for key in info["mismatched_keys"])
    if missing or mismatched:
        raise TargetError(
            f"the weights of target {source!r} do not fill {type(model).__name__}: missing {_some(missing)}; wrong shape "
            f"{_some(mismatched)}. Such a model would answer at random: a complete causal LM checkpoint is needed"
        )
    if info["unexpected_keys"]:
        log.warning("target %s: weights that no layer takes: %s", source, _some(sorted(info["unexpected_keys"])))
    return model


@torch.inference_mode()
def _check_logits(target: Target) -> None:
    """The engine and the teacher read logits off the body; a family whose forward does more than we know is refused."""
    ids = torch.arange(min(4, target.vocab_size), device=target.device)[None]
    ours = target.logits(target.body(input_ids=ids, use_cache=False).last_hidden_state).float()
    theirs = target.model(input_ids=ids, use_cache=False).logits.float()
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item()):
        raise TargetError(
            f"{type(target.model).__name__} ({target.name}) changes its logits in a way that is not known here (largest "
            f"difference {(ours - theirs).abs().max().item():.3g}); it cannot be a target"
        )


def _config_dtype(config: PretrainedConfig) -> torch.dtype | None:
    return getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)


def _plain(value: Any) -> Any:
    """A config value as JSON: what is no JSON (dtypes, tuples, sets) by its text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if text.endswith((".", ";", "!")) else text + "."


def _some(names: list[str], limit: int = 5) -> str:
    return (", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")) or "none"
