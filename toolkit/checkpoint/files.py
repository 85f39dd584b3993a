"""The files of a checkpoint, found by path or hub id. Nothing in them is executed.

Weights may be safetensors (one file, or shards with an index) or a pickle, which is read with weights_only=True. A
GGUF file is a whole checkpoint.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from toolkit.checkpoint.gguf_head import gguf_file, is_gguf_head, read_gguf
from toolkit.errors import DraftDirError, ExportError
from toolkit.targets.gguf_file import DEMO_NAME
from toolkit.weights import WeightsError, load_tensors, read_json, sha256_file, sha256_json

# Prefixes of trainers and engines that wrap the head in a module of their own.
WRAPPERS = ("draft_model.", "eagle_module.", "model.")
CONFIG = "config.json"
SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX = {SAFETENSORS: "model.safetensors.index.json", PICKLE: "pytorch_model.bin.index.json"}
HUB_ID = re.compile(r"^(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?$")
DRAFT_KEYS = {
    "toolkit", "draft_vocab_size", "speculators_model_type", "eagle_config", "dflash_config", "target_layer_ids",
}  # fmt: skip
# Code in a repository is never run, so it is never downloaded.
MASK_EMBEDDING = "mask_embedding.pt"  # beside some DFlash checkpoints
WANTED = ["*.json", "*.safetensors", "*.bin", "*.md", MASK_EMBEDDING]


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes of modules around the head."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def is_whole_model(names: Iterable[str]) -> bool:
    """Whether tensors are those of a language model of two layers or more: heads join what they read by an `fc`."""
    plain = {plain_name(name) for name in names}
    layers = {found[1] for name in plain if (found := re.match(r"layers\.(\d+)\.", name))}
    has_rows = not plain.isdisjoint({"lm_head.weight", "embed_tokens.weight"})
    return has_rows and len(layers) > 1 and "fc.weight" not in plain


@dataclass(frozen=True)
class CheckpointFiles:
    """Settings and all tensors of a directory. `weights`: the names of the files they came from."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    weights: tuple[str, ...]


def locate(name: str | Path) -> Path:
    """The directory or GGUF file of a checkpoint: a path, or a hub id with an optional revision (org/name@revision).

    A hub id is fetched once into huggingface_hub's cache; HF_HUB_OFFLINE=1 keeps to that. Raises `DraftDirError`.
    """
    path = Path(name).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    hub, revision, config = _on_hub(name)
    if looks_like_target(config):  # checked before gigabytes are downloaded
        raise DraftDirError(f"{name} is a whole language model, no draft head; use it as `target`")
    return Path(_from_hub(name, lambda: snapshot_download(hub, revision=revision, allow_patterns=WANTED)))


def _on_hub(name: str | Path) -> tuple[str, str | None, Any]:
    """org/name, its revision and its config.json.

    Raises `DraftDirError` for what can only be a path: a mistyped folder must not be looked for on a hub."""
    found, path = HUB_ID.match(str(name)), Path(name).expanduser()
    if found is None or path.exists() or path.parent.is_dir():
        raise DraftDirError(
            f"{name} is no draft directory: no such folder. A directory that `toolkit train` or `toolkit run` wrote "
            "(runs/NAME/ckpt), one of another project's, or a hub id (org/name, org/name@revision) is needed"
        )
    hub, revision = found["id"], found["revision"]
    return hub, revision, _from_hub(name, lambda: read_json(hf_hub_download(hub, CONFIG, revision=revision)))


def _from_hub(name: str | Path, fetch: Callable[[], Any]) -> Any:
    try:
        return fetch()
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise DraftDirError(
            f"{name} is no draft directory: no such folder here, and it could not be fetched from the hub ({first})"
        ) from error


def looks_like_target(config: Any) -> bool:
    """Whether a config.json, without its weights, is that of a whole language model."""
    if not isinstance(config, dict) or DRAFT_KEYS & config.keys():
        return False
    text = config.get("text_config") or config
    layers = (text.get("num_hidden_layers") or text.get("n_layer")) if isinstance(text, dict) else None
    return isinstance(layers, int) and layers > 2


def target_named(name: str) -> tuple[str, str | None] | None:
    """`name` as a target with its revision; None for a draft head. No weights are read.

    Raises `DraftDirError` when it is neither here nor on the hub.
    """
    path = Path(name).expanduser()
    file = gguf_file(path)
    if file is not None and file.is_file() and is_gguf_head(file):
        return None
    if name == DEMO_NAME or path.suffix == ".gguf":
        return name, None
    if path.is_dir():
        config, names = read_config(path), _names(path)
        # A config of two layers may be a head's: the weights decide.
        whole = is_whole_model(names) if not looks_like_target(config) else "fc.weight" not in names
        whole = whole and not DRAFT_KEYS & config.keys()
        return (name, None) if whole else None
    hub, revision, config = _on_hub(name)
    return (hub, revision) if looks_like_target(config) else None


def _names(directory: Path) -> set[str]:
    path = directory / SAFETENSORS
    if not path.is_file():
        return set()
    try:
        with safe_open(path, framework="pt") as weights:
            return set(weights.keys())
    except (SafetensorError, OSError):
        return set()  # reading the weights reports the damage


def read_config(directory: Path) -> dict[str, Any]:
    """config.json as a mapping. Raises `DraftDirError` when absent, `WeightsError` when it is no JSON."""
    path = directory / CONFIG
    if not path.is_file():
        raise DraftDirError(
            f"{directory} is no draft directory: it has no config.json. A directory that `toolkit train` or "
            "`toolkit run` wrote (runs/NAME/ckpt), or one of another project's with a config.json, is needed"
        )
    config = read_json(path)
    if not isinstance(config, dict):
        raise DraftDirError(f"{path} holds {type(config).__name__}; a mapping of settings is needed")
    return config


def read_checkpoint(directory: Path) -> CheckpointFiles:
    """Config and every tensor of a directory or GGUF file. Raises `DraftDirError`, or `WeightsError` when weights are
    absent or damaged."""
    file = gguf_file(directory)
    if file is not None:
        config, tensors = read_gguf(file)
        return CheckpointFiles(file.parent, config, tensors, (file.name,))
    config, tensors = read_config(directory), {}
    names = weight_files(directory)
    for name in names:
        part = load_tensors(directory / name) if name.endswith(".safetensors") else load_pickle(directory / name)
        tensors |= part
    if (mask := directory / MASK_EMBEDDING).is_file():
        tensors |= load_pickle(mask, alone=mask.stem)
    return CheckpointFiles(directory, config, tensors, names)


def weight_files(directory: Path) -> tuple[str, ...]:
    """Names of the weight files: safetensors before a pickle of the same weights. Raises `WeightsError`."""
    for single in (SAFETENSORS, PICKLE):
        index = directory / INDEX[single]
        if index.is_file():
            content = read_json(index)
            shards = content.get("weight_map") if isinstance(content, dict) else None
            if not shards or not isinstance(shards, dict) or not all(isinstance(one, str) for one in shards.values()):
                raise WeightsError(f"{index} has no weight_map of tensor names to files; export the weights again")
            return tuple(sorted(set(shards.values())))
        if (directory / single).is_file():
            return (single,)
    found = sorted(path.name for path in (*directory.glob("*.safetensors"), *directory.glob("*.bin")))
    if len(found) != 1:
        raise WeightsError(
            f"{directory} has no {SAFETENSORS} and no {PICKLE} ({', '.join(found) or 'no weights at all'}); one "
            "file of weights, or shards with their index, is needed"
        )
    return (found[0],)


def weights_sha256(directory: Path, names: Sequence[str]) -> str:
    """Hex sha256 of the files `names` of weights: that of the file, or of the hashes of shards."""
    hashes = {name: sha256_file(directory / name) for name in names}
    return next(iter(hashes.values())) if len(hashes) == 1 else sha256_json(hashes)


def load_pickle(path: Path, alone: str | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a torch.save file; `alone`: the name of a tensor that is no mapping, or stands in one as `embedding`
    beside numbers, as vLLM reads mask embeddings. weights_only: a pickle may hold any code, and none of it runs."""
    if not path.is_file():
        raise WeightsError(f"{path} does not exist; a file of weights is needed there")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as tensors: {first}. The file is truncated, or holds "
            "other objects than tensors, which are never loaded"
        ) from error
    if alone is not None and isinstance(stored, dict):
        stored = stored.get("embedding", stored)
    if alone is not None and isinstance(stored, torch.Tensor):
        stored = {alone: stored}
    if not isinstance(stored, dict) or not all(isinstance(value, torch.Tensor) for value in stored.values()):
        raise WeightsError(f"{path} holds {type(stored).__name__}; a flat mapping of names to tensors is needed")
    return stored


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` when the block ends; it is deleted on errors.

    Raises `ExportError` if `out` exists."""
    if out.exists():
        raise ExportError(f"{out} exists; give a new folder, or move this one away")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.part-"))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes private folders
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
