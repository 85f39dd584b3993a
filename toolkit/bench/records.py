"""Records: the common JSON format of all stored measurements."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from toolkit import __version__
from toolkit.threads import cpu_flags, cpu_info
from toolkit.weights import atomic_write, read_json

RECORD_KEYS = ("what", "date", "commit", "hardware", "versions", "command", "settings", "rows")
PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed", "safetensors", "datasets")


class RecordError(ValueError):
    """A record lacks a required key, or is of another kind than requested."""


def make_record(
    what: str,
    command: str | Sequence[str],
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> dict[str, Any]:
    """Make a record of kind `what` ("acceptance", "training", ...) on this machine, now. `more` adds top-level keys."""
    return {
        "what": what,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "hardware": hardware(),
        "versions": versions(),
        "command": command if isinstance(command, str) else " ".join(command),
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
        **more,
    }


def command_line() -> str:
    """Return the command line without the folder of the program, since records are published, and without --note, which
    a record has beside it."""
    words = sys.argv[1:]
    if "--note" in words:
        at = words.index("--note")
        words = words[:at] + words[at + 2 :]
    return shlex.join([Path(sys.argv[0]).name, *words])


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, atomically: one line for each row, answer, cell or setting.

    Raises `RecordError` when a required key is missing.
    """
    _check(record, str(path))
    with atomic_write(path) as temporary:
        temporary.write_text(_text(record), encoding="utf-8")


def read_record(path: str | Path, what: str | None = None) -> dict[str, Any]:
    """Read a record.

    Raises `RecordError` for a missing key or another kind than `what`, `WeightsError` when the file is no JSON, and
    FileNotFoundError.
    """
    record = read_json(path)
    _check(record, str(path))
    if what is not None and record["what"] != what:
        raise RecordError(f"{path} is a record of {record['what']!r}; expected a record of {what!r}")
    return record


def _text(record: Mapping[str, Any]) -> str:
    """Return a record as JSON text. Entries of its lists and objects have a line each."""
    parts = []
    for key, value in record.items():
        if isinstance(value, Mapping) and value:
            entries = [f"{_line(name)}: {_line(entry)}" for name, entry in value.items()]
            text = "{\n    " + ",\n    ".join(entries) + "\n  }"
        elif isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(map(_line, value)) + "\n  ]"
        else:
            text = _line(value)
        parts.append(f"  {_line(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check(record: Any, where: str) -> None:
    missing = [key for key in RECORD_KEYS if key not in record] if isinstance(record, Mapping) else list(RECORD_KEYS)
    if missing:
        raise RecordError(f"{where} is not a record: {', '.join(missing)} missing; build it with `make_record`")


def git_commit() -> str | None:
    """Return the commit of this package's checkout, None if it has none; "+changes" marks changed tracked files."""
    root = Path(__file__).resolve().parents[2]
    # An installed copy may be inside another repository, whose commit must not be recorded.
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """Return CPU model, its flags (`cpu_flags`), usable cores, torch threads, memory in bytes, and names of GPUs."""
    cpu = cpu_info()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_flags": cpu_flags(cpu),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def machine_name(hardware: Mapping[str, Any]) -> str:
    """Return the machine of a record's hardware as part of a file name: its GPU, else its CPU.

    The same CPU name can stand for machines of different speed, so the widest instructions are part of the name:
    amd-epyc-avx2, amd-epyc-avx512, intel-xeon-amx. Records of before 2026-11-24 have no flags, and no such part.
    """
    if hardware["gpus"]:
        return _file_name(hardware["gpus"][0])
    cpu = re.sub(r"\((r|tm)\)|\bprocessor\b|\bcpu\b|@.*", " ", hardware["cpu"].lower())
    flags = hardware.get("cpu_flags", ())
    widest = (("amx_tile", "amx"), ("avx512f", "avx512"), ("avx2", "avx2"))
    return _file_name(" ".join([cpu, *(name for flag, name in widest if flag in flags)][:2]))


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, this package, CUDA as PyTorch was built for it, and the main dependencies.

    A package that is not installed has None, CUDA in a build of PyTorch for CPUs.
    """
    return {
        "python": platform.python_version(),
        "toolkit": __version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
