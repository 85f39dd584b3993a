"""The scripts of benchmarks/ as modules, and tiny directories for them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from toolkit.checkpoint.draft_dir import save_draft

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Imports a script by its name, the way Python does when it is run by path: from its own folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def draft_directory(tiny_target_directory, tiny_draft, tmp_path_factory) -> Path:
    """The tiny head, which names the tiny target."""
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    directory = tmp_path_factory.mktemp("draft")
    return save_draft(directory, tiny_draft.head.state_dict(), tiny_draft.head.config, tiny_draft.token_map, meta)
