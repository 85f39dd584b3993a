"""Features on disk: complete shards survive a kill, settings are never mixed, and a full disk gives a clear error."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from toolkit.data import feature_store
from toolkit.data.feature_store import FeatureSpec, FeatureStore, FeatureStoreError, FeatureWriter

SPEC = FeatureSpec("f00d", "main", "ab12", "bfloat16", None, (1, 2, 5), 8)
TEXTS = [list(range(index, index + 4 + index % 3)) for index in range(12)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    """Of two texts or three."""
    monkeypatch.setattr(feature_store, "SHARD_BYTES", 10 * SPEC.bytes_per_token)


def features_of(text: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(text[0])
    return torch.randn(len(text) - 1, SPEC.width, generator=generator).bfloat16()


def write(store: FeatureStore, texts: list[list[int]]) -> None:
    with FeatureWriter(store) as writer:
        for text in texts:
            writer.add(text, features_of(text))


def check(store: FeatureStore, texts: list[list[int]]) -> None:
    for text in texts:
        assert torch.equal(store.read(torch.tensor(text)), features_of(text))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Features are read back by this store and by another one of the folder; stored texts are not written twice."""
    store = FeatureStore.start(tmp_path, SPEC)
    write(store, TEXTS[:7])
    write(store, TEXTS)
    assert len(list(tmp_path.glob("shard-*"))) > 2 and store.tokens == sum(len(text) - 1 for text in TEXTS)
    for one in (store, FeatureStore(tmp_path, SPEC)):
        check(one, TEXTS)
        assert TEXTS[3][:-1] not in one and len(one) == len(TEXTS)
    assert SPEC.bytes_per_token == 2 * 4 * 8
    with pytest.raises(FeatureStoreError, match="text of 3 ids"):
        store.read([1, 2, 3])
    assert store.columns(2) == slice(8, 16) and store.last_columns == slice(24, 32)
    with pytest.raises(FeatureStoreError, match=r"\[1, 2, 5\], but layer 3 is needed"):
        store.columns(3)


def test_what_a_kill_leaves(tmp_path: Path) -> None:
    """Incomplete files are removed, a truncated shard counts as missing, and complete shards stay."""
    write(FeatureStore.start(tmp_path, SPEC), TEXTS)
    torn = sorted(tmp_path.glob("shard-*"))[1]
    torn.write_bytes(torn.read_bytes()[:-40])
    (tmp_path / ".shard-00.safetensors.abc.part").write_bytes(b"half")
    (tmp_path / ".tmpA1b2").write_bytes(b"half")
    store = FeatureStore.start(tmp_path, SPEC)
    missing = [text for text in TEXTS if text not in store]
    assert 0 < len(missing) < len(TEXTS) and not list(tmp_path.glob(".*"))
    write(store, missing)
    check(FeatureStore(tmp_path, SPEC), TEXTS)


@pytest.mark.parametrize(("key", "other"), [("target", "beef"), ("layer_ids", (1, 2, 4))])
def test_features_of_other_settings(tmp_path: Path, caplog, monkeypatch, key: str, other: object) -> None:
    """If any key of the manifest differs, a reader refuses, a writer moves them aside, and both name the key."""
    folder = tmp_path / "features"
    monkeypatch.setattr(feature_store.log.parent, "propagate", True)
    write(FeatureStore.start(folder, SPEC), TEXTS)
    changed = replace(SPEC, **{key: other})
    with pytest.raises(FeatureStoreError, match=f"other settings.*{key} .*now"):
        FeatureStore(folder, changed)
    assert len(FeatureStore.start(folder, SPEC)) == len(TEXTS)
    store = FeatureStore.start(folder, changed)
    assert len(store) == 0 and not list(folder.glob("shard-*")) and f"other settings ({key} " in caplog.text
    (aside,) = tmp_path.glob("replaced/*/features")
    check(FeatureStore(aside, SPEC), TEXTS)


def test_a_lack_of_space_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    store = FeatureStore.start(tmp_path, SPEC)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=63_000_000))
    store.check_room(900_000)
    with pytest.raises(
        FeatureStoreError, match=r"0\.06 GB \(64 bytes per token x 1000000 tokens\).*where 0\.06 GB are"
    ):
        store.check_room(1_000_000)
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch) -> None:
    """The disk is full within the third shard. Complete shards stay, the incomplete one is removed; later the rest is
    added."""
    save, calls = safetensors.torch.save_file, []

    def filling(tensors, path, metadata=None):
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half a shard")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(tensors, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", filling)
    store = FeatureStore.start(tmp_path, SPEC)
    with pytest.raises(SafetensorError, match="No space left"):
        write(store, TEXTS)
    assert len(calls) == 3 and len(list(tmp_path.glob("shard-*"))) == 2 and not list(tmp_path.glob(".*"))
    store = FeatureStore.start(tmp_path, SPEC)
    kept = [text for text in TEXTS if text in store]
    assert 0 < len(kept) < len(TEXTS)
    check(store, kept)
    write(store, TEXTS)
    check(store, TEXTS)
