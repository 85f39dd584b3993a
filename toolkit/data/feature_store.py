"""Hidden states of the target on disk, found by the text they belong to.

`<folder>/manifest.json` says what they were made with. Beside it lie shards: safetensors files with one matrix
"features", the positions of one text after another. Which text lies where stands in the shard's own header, so a shard
is there whole or not at all, and a killed writer loses only what it had not written yet. A text is known by the hash of
its ids: other rollouts, or others cut elsewhere, are not found, and whatever is not found can be added.

A text of L ids has features of its first L-1 positions: the last one supervises nothing, no root stands on it (see
supervision.py), and an engine that writes the text never computes it.

Shapes: B sequences, L ids of a text, P positions of a shard, A stored layers, H target hidden size, W = (A+1)*H: the
inputs of the layers side by side, then the last hidden state after the final norm.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.log import get_logger
from toolkit.targets.target import Target
from toolkit.weights import WeightsError, read_json, save_tensors, write_json

log = get_logger(__name__)

MANIFEST, SHARDS = "manifest.json", "shard-*.safetensors"
SHARD_BYTES = 64 << 20  # what a kill costs at most
FORMAT = 1


class FeatureStoreError(ValueError):
    """Features that do not fit the target, are absent, or find no room on the disk."""


@dataclass(frozen=True)
class FeatureSpec:
    """What the features of a folder were made with. layer_ids: indices into HF `hidden_states`, ascending."""

    target: str
    revision: str | None
    template_sha256: str
    dtype: str
    quantization: str | None
    layer_ids: tuple[int, ...]
    hidden_size: int

    @classmethod
    def of(cls, target: Target, layer_ids: Iterable[int]) -> FeatureSpec:
        """Of this target as it is loaded."""
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
        """W."""
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
        """With the layers of another manifest, where those are all of these and more: what lies there serves."""
        layers = tuple(stored.get("layer_ids", ()))
        return replace(self, layer_ids=layers) if set(self.layer_ids) <= set(layers) else self

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """What another manifest says differently, key by key."""
        mine = self.to_json()
        keys = sorted(mine.keys() | stored.keys())
        return [f"{key} {stored.get(key)!r}, now {mine.get(key)!r}" for key in keys if stored.get(key) != mine.get(key)]


def text_key(ids: Sequence[int] | torch.Tensor) -> str:
    """32 hex digits over the ids of a text [L]."""
    plain = torch.as_tensor(ids, dtype=torch.int64, device="cpu").contiguous()
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:32]


@dataclass(frozen=True)
class _Place:
    shard: Path
    start: int
    positions: int


class FeatureStore:
    """The features in a folder. `start` begins or continues one, `read` finds a text's features (memory-mapped).

    Several processes may add to one folder, and read it; `refresh` shows what others have added.
    """

    def __init__(self, folder: Path, spec: FeatureSpec) -> None:
        path = folder / MANIFEST
        self.folder, self.spec = folder, spec.within(_manifest(path)) if path.is_file() else spec
        self._places: dict[str, _Place] = {}
        self._shards: dict[Path, torch.Tensor] = {}
        self.refresh()

    @classmethod
    def start(cls, folder: Path, spec: FeatureSpec, positions: int = 0) -> FeatureStore:
        """The store of `spec` in this folder, ready to be added to. Not while another process adds to it.

        positions: so many it will hold. Features of another spec are removed, after a word on what differs, if these
        then find room (else `FeatureStoreError`, and nothing is lost); so is what killed writers left half done.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        stale = spec.within(_manifest(path)).differences(_manifest(path)) if path.is_file() else []
        if stale:
            _check_room(folder, spec, positions, freed=sum(shard.stat().st_size for shard in folder.glob(SHARDS)))
            log.warning("%s: features of other settings are made anew (%s)", folder, "; ".join(stale))
        if stale or not path.is_file():
            path.unlink(missing_ok=True)  # first, so that a kill here leaves no shards that seem to belong
            for shard in folder.glob(SHARDS):
                shard.unlink()
            write_json(path, spec.to_json())
        for leftover in (*folder.glob(".*.part"), *folder.glob(".tmp*")):
            leftover.unlink()
        return cls(folder, spec)

    def refresh(self) -> None:
        """Read what the shards hold. Raises `FeatureStoreError` where the manifest is absent or differs."""
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FeatureStoreError(f"{self.folder} has no {MANIFEST}: no features were written there")
        differs = self.spec.differences(_manifest(path))
        if differs:
            raise FeatureStoreError(
                f"the features in {self.folder} were made with other settings ({'; '.join(differs)}); delete the "
                "folder to make them anew"
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
            log.warning("%s cannot be read (%s); its features are made anew", shard, error)
            return {}
        assert shape == [sum(positions for _, positions in texts), self.spec.width], f"{shard} holds {shape}"
        places, start = {}, 0
        for key, positions in texts:
            places[key] = _Place(shard, start, positions)
            start += positions
        return places

    @property
    def tokens(self) -> int:
        """Positions stored."""
        return sum(place.positions for place in self._places.values())

    def __len__(self) -> int:
        """Texts stored."""
        return len(self._places)

    def __contains__(self, ids: Sequence[int] | torch.Tensor) -> bool:
        return text_key(ids) in self._places

    def read(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """[L-1, W] of the text `ids` [L], a view of the file. Raises `FeatureStoreError` when it is not stored."""
        place = self._places.get(text_key(ids))
        if place is None:
            raise FeatureStoreError(f"{self.folder} has no features of a text of {len(ids)} ids; start training again")
        if place.shard not in self._shards:
            with safe_open(place.shard, "pt") as handle:
                self._shards[place.shard] = handle.get_tensor("features")
        return self._shards[place.shard][place.start : place.start + place.positions]

    def columns(self, layer_id: int) -> slice:
        """Where the input of a layer stands in W. Raises `FeatureStoreError` when it is not stored."""
        if layer_id not in self.spec.layer_ids:
            raise FeatureStoreError(f"{self.folder} holds layers {list(self.spec.layer_ids)}, {layer_id} is needed")
        at = self.spec.layer_ids.index(layer_id) * self.spec.hidden_size
        return slice(at, at + self.spec.hidden_size)

    @property
    def last_columns(self) -> slice:
        """Where the last hidden state stands in W."""
        return slice(self.spec.width - self.spec.hidden_size, self.spec.width)

    def check_room(self, tokens: int, qualifier: str = "") -> None:
        """Announce what `tokens` positions more will take. Raises `FeatureStoreError` when the disk has less free."""
        _check_room(self.folder, self.spec, tokens, qualifier)


def _check_room(folder: Path, spec: FeatureSpec, tokens: int, qualifier: str = "", freed: int = 0) -> None:
    each, free = spec.bytes_per_token, shutil.disk_usage(folder).free + freed
    need = f"{qualifier}{_size(each * tokens)} ({each} bytes a token x {tokens} tokens)"
    where = f"{folder}, where {_size(free)} are free" + (" without those of other settings" if freed else "")
    if each * tokens > free:
        raise FeatureStoreError(
            f"features need {need} in {where}; free some room, lower train.data.max_length, or set "
            "train.data.features: online (and rollouts.keep_features: false)"
        )
    if not freed:
        log.info("features: %s in %s", need, where)


class FeatureWriter:
    """Adds texts to a store, a shard at a time. A context manager: what waits is written at its end."""

    def __init__(self, store: FeatureStore) -> None:
        self.store = store
        self._waiting: dict[str, torch.Tensor] = {}
        self._positions = 0

    def add(self, ids: Sequence[int], features: torch.Tensor) -> None:
        """features [L-1, W] of the text `ids` [L]; a text that is there already is left as it is."""
        spec, key = self.store.spec, text_key(ids)
        assert features.shape == (len(ids) - 1, spec.width), f"{tuple(features.shape)} for {len(ids)} ids"
        if key in self._waiting or key in self.store._places:
            return
        self._waiting[key] = features.detach().to("cpu", spec.torch_dtype)
        self._positions += len(features)
        if self._positions * spec.bytes_per_token >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard, named by what it holds. Raises `FeatureStoreError` when the disk is full."""
        if not self._waiting:
            return
        waiting, self._waiting, self._positions = self._waiting, {}, 0
        texts = [[key, len(features)] for key, features in waiting.items()]
        name = hashlib.sha256("".join(waiting).encode()).hexdigest()[:16]
        shard = self.store.folder / f"shard-{name}.safetensors"
        matrix = torch.cat(list(waiting.values()))
        try:
            save_tensors(shard, {"features": matrix}, {"texts": json.dumps(texts)})
        except (OSError, SafetensorError) as error:
            if not _disk_is_full(error):
                raise
            raise FeatureStoreError(
                f"the disk of {self.store.folder} is full: a shard of {_size(matrix.nbytes)} found "
                f"{_size(shutil.disk_usage(self.store.folder).free)} free. Free some room and start again: what is "
                f"written ({self.store.tokens} tokens) is kept"
            ) from error
        self.store._places |= self.store._read_header(shard)

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, FeatureStoreError):
            self.flush()


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except WeightsError as error:
        raise FeatureStoreError(str(error)) from error
    return found if isinstance(found, dict) else {}


def _disk_is_full(error: BaseException) -> bool:
    # safetensors wraps the system's error, its number in the text.
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or any(f"(os error {number})" in str(error) for number in full)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"
