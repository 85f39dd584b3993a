import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from toolkit.errors import TargetError
from toolkit.targets import cache
from toolkit.targets.cache import build_once


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
    """A half built model that looks finished would fail in every later run; what a killed process left is cleared, and
    the result, which safetensors makes private, can be read by others."""

    def fail(into: Path) -> None:
        (into / "file").write_text("half")
        raise TargetError("no")

    with pytest.raises(TargetError):
        build_once(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]
    (tmp_path / ".made.part-killed").mkdir()
    made = build_once(tmp_path / "made", lambda into: (into / "file").touch(0o600))
    assert not (tmp_path / ".made.part-killed").exists()
    assert made.stat().st_mode & 0o777 == 0o755 and (made / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("speedup, expected", [(1.6, torch.float32), (1.0, torch.bfloat16)])
def test_the_faster_dtype_is_measured_once(monkeypatch, own_cache, speedup, expected):
    """A second process must not measure again and come to another answer: stages would not fit each other."""

    def in_a_new_process(speed):
        taken = []
        monkeypatch.setattr(cache, "_measure", lambda: taken.append(speed) or {"float32_speedup": speed})
        return cache.fastest_cpu_dtype.__wrapped__(), len(taken)

    assert in_a_new_process(speedup) == (expected, 1) and in_a_new_process(2.6 - speedup) == (expected, 0)
    assert len(json.loads((own_cache / "cpu_products.json").read_text())) == 1
    (own_cache / "cpu_products.json").write_text("{")  # damage costs a measurement, not the run
    assert in_a_new_process(2.0) == (torch.float32, 1)
    monkeypatch.setenv("TOOLKIT_CACHE", "/proc/nowhere")
    assert in_a_new_process(2.0) == (torch.float32, 1)
