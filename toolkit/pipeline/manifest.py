"""What a stage of a run was made from, so that the next run can tell whether it is up to date.

A manifest is `<run>/<stage>/manifest.json`: status ("running" until the stage's last byte is written, then "done"), the
settings that decide the stage's result, marks of its input files, versions, and times. Reading and comparing manifests
imports no torch: a run that is up to date ends in a moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from toolkit.weights import WeightsError, read_json, sha256_file, write_json

FILE_NAME = "manifest.json"
FileMark = dict[str, Any]  # {"sha256", "size" in bytes, "mtime_ns"}


@dataclass
class Manifest:
    """The record of one stage. `seconds` is the time of the session that ended it, `sessions` counts the starts."""

    stage: str
    status: Literal["running", "done"]
    settings: dict[str, Any]
    inputs: dict[str, FileMark]
    versions: dict[str, Any] = field(default_factory=dict)
    started: str = ""
    finished: str | None = None
    seconds: float = 0.0
    sessions: int = 1
    headline: str = ""

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def read_manifest(path: Path) -> Manifest | None:
    """The manifest at `path`; None when there is none. Raises `WeightsError` when the file is no manifest."""
    if not path.is_file():
        return None
    value = read_json(path)
    try:
        return Manifest(**value)
    except TypeError as error:
        raise WeightsError(
            f"{path} is not a manifest of this version ({error}); remove it to redo the stage"
        ) from error


def mark_file(path: Path, known: FileMark | None = None) -> FileMark:
    """Size, time and hash of a file. A file whose size and time equal `known`'s is not read again."""
    stat = path.stat()
    if known and (known["size"], known["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns):
        return known
    return {
        "sha256": _sha256(path.resolve(), stat.st_size, stat.st_mtime_ns),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
    }


@cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    """Hash of a file as it is now, computed once: in one run five stages ask for the same target's files."""
    return sha256_file(path)


def differences(old: Manifest, settings: Mapping[str, Any], inputs: Mapping[str, FileMark]) -> list[str]:
    """Why a stage made with `old` is out of date for these settings and inputs; empty when it is up to date."""
    before, now = flatten(old.settings), flatten(settings)
    found = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            found.append(f"{key} changed from {before.get(key)} to {now.get(key)}")
    for name in sorted(old.inputs.keys() | inputs.keys()):
        if name not in inputs or name not in old.inputs:
            found.append(f"{name} is {'no longer' if name in old.inputs else 'now'} an input")
        elif old.inputs[name]["sha256"] != inputs[name]["sha256"]:
            found.append(f"{name} has other contents")
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat
