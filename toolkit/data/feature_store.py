"""Hidden states of the target on disk, looked up by text.

`<folder>/manifest.json` records the settings that produced them. Next to it are shards: safetensors files with one
matrix "features" that concatenates the positions of several texts. The header of each shard lists its texts, so a shard
is either complete or absent, and a killed writer loses only unwritten data. The key of a text is the hash of its ids:
other rollouts, or the same ones truncated elsewhere, are not found, and can be added.

A text of L ids has features at its first L-1 positions. The last position supervises nothing, is never a root (see
target_side.py), and is never computed by the engine that writes the text.

Shapes: L ids of a text, A stored layers, H target hidden size, W = (A+1)*H: the inputs of the stored layers
concatenated, then the last hidden state after the final norm.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.log import get_logger
from toolkit.targets.target import Target
from toolkit.weights import read_json, save_tensors, write_json

log = get_logger(__name__)

MANIFEST, SHARDS = "manifest.json", "shard-*.safetensors"
SHARD_BYTES = 64 << 20  # the most that a kill can lose
FORMAT = 1


class FeatureStoreError(ValueError):
    """The features do not match the target, are missing, or do not fit on the disk."""


@dataclass(frozen=True)
class FeatureSpec:
    """The settings that produced the features of a folder. layer_ids: indices into HF `hidden_states`, ascending."""

    target: str
    revision: str | None
    template_sha256: str
    dtype: str
    quantization: str | None
    layer_ids: tuple[int, ...]
    hidden_size: int

    @classmethod
    def of(cls, target: Target, layer_ids: Iterable[int]) -> FeatureSpec:
        """Describe the features of a loaded target."""
        return cls(
            target=target.fingerprint,
            revision=target.revision,
            template_sha256=target.template_sha256,
            dtype=str(target.dtype).removeprefix("torch."),
            quantization=target.quantization,
            layer_ids=tuple(sorted(set(layer_ids))),
            hidden_size=target.hidden_size,
        )

    @property
    def width(self) -> int:
        """W, the number of columns."""
        return (len(self.layer_ids) + 1) * self.hidden_size

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.torch_dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "layer_ids": list(self.layer_ids)}

    def within(self, stored: dict[str, Any]) -> FeatureSpec:
        """Return this spec with the layers of another manifest if they include its own, so that its features fit."""
        layers = tuple(stored.get("layer_ids", ()))
        return replace(self, layer_ids=layers) if set(self.layer_ids) <= set(layers) else self

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """List the keys whose values differ in another manifest."""
        mine = self.to_json()
        keys = sorted(mine.keys() | stored.keys())
        return [f"{key} {stored.get(key)!r}, now {mine.get(key)!r}" for key in keys if stored.get(key) != mine.get(key)]


def text_key(ids: Sequence[int] | torch.Tensor) -> str:
    """Return 32 hex digits, a hash of the ids of a text [L]."""
    plain = torch.as_tensor(ids, dtype=torch.int64, device="cpu").contiguous()
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:32]


@dataclass(frozen=True)
class _Place:
    shard: Path
    start: int
    positions: int


class FeatureStore:
    """The features in a folder. `start` creates or continues a store; `read` returns a text's features, memory-mapped.

    Several processes may write to and read from one folder; `refresh` finds what other processes have added.
    """

    def __init__(self, folder: Path, spec: FeatureSpec) -> None:
        path = folder / MANIFEST
        self.folder, self.spec = folder, spec.within(read_json(path)) if path.is_file() else spec
        self._places: dict[str, _Place] = {}
        self._shards: dict[Path, torch.Tensor] = {}
        self.refresh()

    @classmethod
    def start(cls, folder: Path, spec: FeatureSpec, positions: int = 0) -> FeatureStore:
        """Open the store of `spec` in this folder for writing. No other process may write to it during this call.

        positions: the number it will hold. Features of another spec move to `replaced/<time>` beside the folder, with a
        warning that lists the differences; if the new ones would not fit, `FeatureStoreError` is raised and nothing
        moves. Incomplete files of killed writers are removed.
        """
        path = folder / MANIFEST
        stale = spec.within(read_json(path)).differences(read_json(path)) if path.is_file() else []
        if not path.is_file() and any(folder.glob(SHARDS)):
            stale = [f"unknown, without {MANIFEST}"]
        if stale:
            _check_room(folder, spec, positions)
            attic = folder.parent / "replaced" / datetime.now().strftime("%Y%m%d-%H%M%S-%f") / folder.name
            attic.parent.mkdir(parents=True)
            folder.rename(attic)
            log.warning("%s: features of other settings (%s) are now in %s", folder, "; ".join(stale), attic)
        if not path.is_file():
            write_json(path, spec.to_json())
        for leftover in (*folder.glob(".*.part"), *folder.glob(".tmp*")):
            leftover.unlink()
        return cls(folder, spec)

    def refresh(self) -> None:
        """Read the headers of new shards. Raises `FeatureStoreError` when the manifest is missing or differs."""
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FeatureStoreError(f"{self.folder} has no {MANIFEST}: it holds no features; write them first")
        differs = self.spec.differences(read_json(path))
        if differs:
            raise FeatureStoreError(
                f"the features in {self.folder} were computed with other settings ({'; '.join(differs)}); move the "
                "folder away to compute them again"
            )
        known = {place.shard for place in self._places.values()}
        for shard in sorted(self.folder.glob(SHARDS)):
            if shard not in known:
                self._places |= self._read_header(shard)

    def _read_header(self, shard: Path) -> dict[str, _Place]:
        try:
            with safe_open(shard, "pt") as handle:
                texts = json.loads(handle.metadata()["texts"])
                shape = handle.get_slice("features").get_shape()
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            log.warning("%s cannot be read (%s); its features are computed again", shard, error)
            return {}
        assert shape == [sum(positions for _, positions in texts), self.spec.width], f"{shard} holds {shape}"
        places, start = {}, 0
        for key, positions in texts:
            places[key] = _Place(shard, start, positions)
            start += positions
        return places

    @property
    def tokens(self) -> int:
        """Number of stored positions."""
        return sum(place.positions for place in self._places.values())

    def __len__(self) -> int:
        """Number of stored texts."""
        return len(self._places)

    def __contains__(self, ids: Sequence[int] | torch.Tensor) -> bool:
        return text_key(ids) in self._places

    def read(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Return [L-1, W] of the text `ids` [L], a view of the file. Raises `FeatureStoreError` if it is not stored."""
        place = self._places.get(text_key(ids))
        if place is None:
            raise FeatureStoreError(f"{self.folder} lacks the features of a text of {len(ids)} ids; restart training")
        if place.shard not in self._shards:
            with safe_open(place.shard, "pt") as handle:
                self._shards[place.shard] = handle.get_tensor("features")
        return self._shards[place.shard][place.start : place.start + place.positions]

    def columns(self, layer_id: int) -> slice:
        """Return the columns of a layer's input. Raises `FeatureStoreError` when the layer is not stored."""
        if layer_id not in self.spec.layer_ids:
            raise FeatureStoreError(
                f"{self.folder} holds layers {list(self.spec.layer_ids)}, but layer {layer_id} is needed; move the "
                "folder away to compute them again"
            )
        at = self.spec.layer_ids.index(layer_id) * self.spec.hidden_size
        return slice(at, at + self.spec.hidden_size)

    @property
    def last_columns(self) -> slice:
        """The columns of the last hidden state."""
        return slice(self.spec.width - self.spec.hidden_size, self.spec.width)

    def check_room(self, tokens: int, qualifier: str = "") -> None:
        """Log the disk space that `tokens` more positions need. Raises `FeatureStoreError` when less is free."""
        _check_room(self.folder, self.spec, tokens, qualifier)


def _check_room(folder: Path, spec: FeatureSpec, tokens: int, qualifier: str = "") -> None:
    each, free = spec.bytes_per_token, shutil.disk_usage(folder).free
    need = f"{qualifier}{_size(each * tokens)} ({each} bytes per token x {tokens} tokens)"
    if each * tokens > free:
        raise FeatureStoreError(
            f"features need {need} in {folder}, where {_size(free)} are free; free some space, lower "
            "train.data.max_length, or set train.data.features: online (and rollouts.keep_features: false)"
        )
    log.info("features: %s in %s, where %s are free", need, folder, _size(free))


class FeatureWriter:
    """Add texts to a store, one shard at a time. Use as a context manager: its end writes the last shard."""

    def __init__(self, store: FeatureStore) -> None:
        self.store = store
        self._waiting: dict[str, torch.Tensor] = {}
        self._positions = 0

    def add(self, ids: Sequence[int], features: torch.Tensor) -> None:
        """Add features [L-1, W] of the text `ids` [L]; does nothing when the text is already stored."""
        spec, key = self.store.spec, text_key(ids)
        assert features.shape == (len(ids) - 1, spec.width), f"{tuple(features.shape)} for {len(ids)} ids"
        if key in self._waiting or key in self.store._places:
            return
        self._waiting[key] = features.detach().to("cpu", spec.torch_dtype)
        self._positions += len(features)
        if self._positions * spec.bytes_per_token >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the added texts as a shard named by their hash. On a full disk what is complete stays."""
        if not self._waiting:
            return
        waiting, self._waiting, self._positions = self._waiting, {}, 0
        texts = [[key, len(features)] for key, features in waiting.items()]
        name = hashlib.sha256("".join(waiting).encode()).hexdigest()[:16]
        shard = self.store.folder / f"shard-{name}.safetensors"
        save_tensors(shard, {"features": torch.cat(list(waiting.values()))}, {"texts": json.dumps(texts)})
        self.store._places |= self.store._read_header(shard)

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"
