"""Facts about a target from its configuration and the headers of its files, without loading weights.

Shapes: V = rows of the output embedding, H = hidden size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedTokenizerBase

from toolkit.errors import TargetError
from toolkit.targets.load import NAMED_MTP, full_name, load_config, load_tokenizer, split_revision, stated_quantization
from toolkit.targets.target import stated_context, stop_ids_of
from toolkit.weights import read_json

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$")
NATIVE_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # their number, in config.json


@dataclass(frozen=True)
class TargetFacts:
    """source: the directory or hub id (with `revision`) of the files. config: that of the text model. quantization: of
    the weights in the files (`stated_quantization`)."""

    name: str
    source: str
    revision: str | None
    architecture: str
    model_type: str
    n_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int | None
    dtype: str | None
    config: Any
    quantization: Any = None


def target_facts(name: str | Path, revision: str | None = None) -> TargetFacts:
    """Facts of a target; takes the same names as `read_target`. Raises `TargetError`."""
    full, source, resolved = load_config(name, revision)
    if Path(source).is_dir():
        source = str(Path(source).resolve())
    return facts_of(full, full_name(str(name)), source, resolved)


def facts_of(full: Any, name: str, source: str = "", revision: str | None = None) -> TargetFacts:
    """Facts of a target of this configuration. source, revision: where its files are."""
    config = full.get_text_config(decoder=True)
    dtype = getattr(full, "dtype", None) or getattr(config, "dtype", None)
    return TargetFacts(
        name=name,
        source=source,
        revision=revision,
        architecture=(full.architectures or ["unnamed"])[0],
        model_type=full.model_type,
        n_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=getattr(config, "max_position_embeddings", None),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        config=config,
        quantization=stated_quantization(full),
    )


def bare_facts(name: str, revision: str | None = None) -> TargetFacts:
    """Facts from config.json only, for a directory or hub id whose family is not in transformers; `config` is None.
    Raises `TargetError`."""
    stated = stated_config(name, revision)
    lacking = [
        key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if not isinstance(stated.get(key), int)
    ]
    if lacking:
        raise TargetError(f"the config.json of target {name} lacks {', '.join(lacking)}; add the missing keys")
    dtype = stated.get("dtype") or stated.get("torch_dtype")
    return TargetFacts(
        name=full_name(name),
        source=name,
        revision=revision,
        architecture=(stated.get("architectures") or ["unnamed"])[0],
        model_type=str(stated.get("model_type")),
        n_layers=stated["num_hidden_layers"],
        hidden_size=stated["hidden_size"],
        vocab_size=stated["vocab_size"],
        max_context=stated.get("max_position_embeddings"),
        dtype=dtype,
        config=None,
    )


def is_sharded(facts: TargetFacts) -> bool:
    """Whether the safetensors weights have an index. Raises `TargetError` when the hub cannot be reached."""
    return target_file(facts.source, facts.revision, INDEX) is not None


def tensor_names(facts: TargetFacts) -> dict[str, str]:
    """Name -> file of each tensor of the target's safetensors weights. Raises `TargetError` without such weights."""
    index = target_file(facts.source, facts.revision, INDEX)
    if index is not None:
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, TypeError, KeyError) as error:
            raise TargetError(f"{index} has no weight_map of tensor names to files; get it again") from error
    single = target_file(facts.source, facts.revision, SINGLE)
    if single is None:
        raise TargetError(f"target {facts.name} has neither {SINGLE} nor {INDEX}; safetensors weights are needed")
    with _opened(single) as weights:
        return dict.fromkeys(weights.keys(), SINGLE)


def target_embedding(facts: TargetFacts) -> torch.Tensor:
    """The token embedding [V, H] in its stored dtype; no other tensor is read. Raises `TargetError`."""
    found = [name for name in tensor_names(facts) if EMBEDDING.search(name) and not NAMED_MTP.search(name)]
    if len(found) != 1:
        raise TargetError(
            f"target {facts.name} has {len(found)} tensors with a name of a token embedding "
            f"({', '.join(found) or 'none'}); exactly one is needed"
        )
    return read_tensors(facts, found)[found[0]]


def target_output(facts: TargetFacts) -> torch.Tensor:
    """The output matrix [V, H] in its stored dtype; the embedding where none is stored. Raises `TargetError`."""
    found = [name for name in tensor_names(facts) if name.endswith("lm_head.weight") and not NAMED_MTP.search(name)]
    return read_tensors(facts, found)[found[0]] if len(found) == 1 else target_embedding(facts)


def read_tensors(facts: TargetFacts, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The named tensors of the target's safetensors weights, in their stored dtype; no other tensor is read.

    Raises `TargetError` when a file is absent or damaged."""
    files = tensor_names(facts)
    found: dict[str, torch.Tensor] = {}
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for file, own in by_file.items():
        path = target_file(facts.source, facts.revision, file)
        if path is None:
            raise TargetError(f"target {facts.name} lacks {file}, which its index lists; download it again")
        with _opened(path) as weights:
            found |= {name: weights.get_tensor(name) for name in own}
    return found


def stated_config(name: str, revision: str | None = None) -> dict[str, Any]:
    """The text model's part of config.json, without the defaults of transformers. Raises `TargetError`."""
    path = target_file(name, revision, CONFIG)
    if path is None:
        raise TargetError(f"target {name} has no {CONFIG}; a Hugging Face model directory or hub id is needed")
    stated = read_json(path)
    return {**stated, **(stated.get("text_config") or {})}


def target_file(source: str, revision: str | None, name: str) -> Path | None:
    """The path of a target's file, downloaded if `source` is a hub id; None when the target has no such file."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except EntryNotFoundError:  # the hub, or in offline mode the cache, has no such file
        return None
    except (HfHubHTTPError, OSError) as error:
        raise TargetError(f"{name} of target {source} cannot be downloaded ({error})") from error


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise TargetError(f"{path} cannot be read as safetensors ({error}); download it again") from error


@dataclass(frozen=True)
class ServedTarget:
    """servers: URLs, or files that list some. served_model: the target's name there; None: its own.

    max_context: of the target's config, in tokens; None if it states none.
    """

    facts: TargetFacts
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    max_context: int | None
    servers: tuple[str, ...]
    served_model: str | None = None

    @property
    def name(self) -> str:
        return self.facts.name


def served_target(
    name: str,
    revision: str | None,
    servers: tuple[str, ...],
    served_model: str | None = None,
    chat_template: str | None = None,
) -> ServedTarget:
    """Read a target's configuration and tokenizer; takes the same names as `read_target`. Raises `TargetError`."""
    name, revision = split_revision(name, revision)
    facts, tokenizer = target_facts(name, revision), load_tokenizer(name, revision, chat_template)
    try:
        generation = GenerationConfig.from_pretrained(facts.source, revision=facts.revision or "main")
    except OSError:  # it has none
        generation = None
    stop_ids = stop_ids_of(generation, facts.config, tokenizer, facts.vocab_size)
    return ServedTarget(facts, tokenizer, stop_ids, stated_context(facts.config), servers, served_model)
