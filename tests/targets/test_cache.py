import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toolkit.errors import TargetError
from toolkit.targets.cache import build_once, cache_root


def test_cache_place(monkeypatch, tmp_path):
    """Machines with a small home folder set TOOLKIT_CACHE; an empty value must not mean the working directory."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("TOOLKIT_CACHE", "")
    assert cache_root() == Path.home() / ".cache" / "toolkit"


def test_built_once_by_many_at_the_same_time(tmp_path):
    """Two training processes start together; both need the model, one makes it. Each thread locks its own handle."""
    calls = []

    def build(into: Path) -> None:
        calls.append(threading.get_ident())
        time.sleep(0.05)
        (into / "file").write_text("whole")

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: build_once(tmp_path / "a" / "made", build), range(4)))
    assert len(calls) == 1
    assert all((path / "file").read_text() == "whole" for path in results)


def test_a_failed_build_leaves_no_folder_and_can_be_repeated(tmp_path):
    """A half built model that looks finished would fail in every later run."""

    def fail(into: Path) -> None:
        (into / "file").write_text("half")
        raise TargetError("no")

    with pytest.raises(TargetError):
        build_once(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]
    assert build_once(tmp_path / "made", lambda into: None).is_dir()


def test_what_a_killed_process_left_is_cleared(tmp_path):
    """SIGKILL runs no cleanup; hundreds of megabytes would stay for good."""
    left = tmp_path / ".made.part-killed"
    left.mkdir()
    (left / "file").write_text("half")
    build_once(tmp_path / "made", lambda into: (into / "file").write_text("whole"))
    assert not left.exists() and (tmp_path / "made" / "file").read_text() == "whole"


def test_the_result_is_readable_by_others(tmp_path):
    """safetensors writes private files; a cache shared by a group needs them readable."""

    def build(into: Path) -> None:
        (into / "file").write_text("x")
        (into / "file").chmod(0o600)

    made = build_once(tmp_path / "made", build)
    assert made.stat().st_mode & 0o777 == 0o755 and (made / "file").stat().st_mode & 0o777 == 0o644


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path, monkeypatch):
    """Containers often mount the home folder read-only. (The error is raised by hand: root may write anywhere.)"""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(TargetError, match="set TOOLKIT_CACHE"):
        build_once(tmp_path / "no" / "made", lambda into: None)
