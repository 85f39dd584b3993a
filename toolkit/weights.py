"""Atomic writes of files, and strict loading of weights."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

if TYPE_CHECKING:  # the pipeline's skip check uses hashes and JSON, and must not wait for torch
    import torch
    from torch import nn


class WeightsError(ValueError):
    """A weights file is missing or damaged, or does not hold exactly the required tensors."""


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder. It replaces `path` when the block ends, and is deleted on errors."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes private files; the result must have the user's default permissions.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read a JSON file. Raises `WeightsError` when it is no valid JSON, FileNotFoundError when it does not exist."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} is not valid JSON ({error}); write it again or restore it from a copy") from error


def save_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically. Tensors are moved to the CPU and made contiguous."""
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as temporary:
        save_file(plain, temporary, metadata=dict(metadata or {"format": "pt"}))


def load_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file. Raises `WeightsError` when it is missing, truncated or has another format."""
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise WeightsError(f"{path} {what}; expected a safetensors file")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise WeightsError(
            f"{path} ({size} bytes) cannot be read as safetensors: {error}. It is truncated or has another format; "
            "copy or save it again"
        ) from error


def load_strict(module: nn.Module, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Copy `tensors` into `module`; every name and shape must match.

    Raises `WeightsError` with all missing, unexpected and wrongly shaped names, before anything is copied.
    """
    check_fits({name: tuple(one.shape) for name, one in module.state_dict().items()}, tensors, where, module)
    module.load_state_dict(dict(tensors), strict=True)


def check_fits(
    wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], where: str, module: nn.Module
) -> None:
    """Raise `WeightsError` with all missing, unexpected and wrongly shaped names, unless `tensors` has the names and
    shapes of `wanted`, the weights of `module`."""
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - wanted.keys())
    wrong = [
        f"{name} {tuple(tensors[name].shape)} (expected {wanted[name]})"
        for name in sorted(wanted.keys() & tensors.keys())
        if tuple(tensors[name].shape) != wanted[name]
    ]
    parts = [
        f"{title}: {', '.join(names)}"
        for title, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong))
        if names
    ]
    if parts:
        raise WeightsError(f"{where} does not fit {type(module).__name__}: {'; '.join(parts)}")


def sha256_file(path: str | Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the hex sha256 of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
