"""The training processes: the line, the threads, and that they share our fate."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.errors import MissingPackageError
from toolkit.pipeline import launch
from toolkit.pipeline.launch import (
    LaunchError,
    check_packages,
    run_child,
    set_threads,
    training_line,
    training_processes,
)
from toolkit.train_settings import DataSettings, TrackingSettings, TrainSettings

SLEEP = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def wait_for(path: Path, seconds: float = 20.0) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written in {seconds} s")


def alive(pid: int) -> bool:
    """Running, and not merely a zombie that nobody waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_training_line_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed line is what a user copies; from the repository it has no absolute paths. Each kind of head has its
    script."""
    monkeypatch.chdir(launch.REPOSITORY)
    line = training_line("recipes/smollm2-135m.yaml", ["train.max_steps=3"], 2, None, "mtp")
    assert " ".join(line) == (
        "accelerate launch --config_file recipes/accelerate/zero2.yaml --num_processes 2 --main_process_port 0 "
        "toolkit/train/mtp.py --recipe recipes/smollm2-135m.yaml train.max_steps=3"
    )


def test_training_line_refuses_what_cannot_start(tmp_path: Path) -> None:
    """accelerate would fail later, with a traceback."""
    with pytest.raises(LaunchError, match="at least 1"):
        training_processes(0, TrainSettings())
    with pytest.raises(FileNotFoundError, match="absent.yaml"):
        training_line("r.yaml", [], 1, tmp_path / "absent.yaml", "eagle3")


@pytest.mark.parametrize(
    ("gpus", "split_rows", "wanted"), [(0, 1, 1), (0, 2, 2), (8, 1, 6), (8, 4, 8), (7, 2, 6), (8, 5, 5)]
)
def test_processes_by_default_share_batch_and_rows(monkeypatch, gpus: int, split_rows: int, wanted: int) -> None:
    """Six sequences: over groups of processes that hold rows together."""
    monkeypatch.setattr(launch, "gpus", lambda: gpus)
    settings = TrainSettings(data=DataSettings(global_batch=6, split_rows=split_rows))
    assert training_processes(None, settings) == wanted
    settings.check_processes(wanted)
    monkeypatch.setattr(launch, "gpus", lambda: 1)
    if split_rows > 1:
        with pytest.raises(LaunchError, match=f"split_rows is {split_rows}.* has 1 GPU"):
            training_processes(None, settings)


def test_a_missing_package_is_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training would find it after the days of rollouts. A tracker that nobody asked for is not needed. The error
    passes from one process to another."""
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == "wandb" else name)
    tracked = TrainSettings(tracking=TrackingSettings(wandb=True, tensorboard=True))
    with pytest.raises(MissingPackageError, match="train.tracking.wandb: true needs .*: pip install wandb"):
        check_packages(tracked)
    assert str(pickle.loads(pickle.dumps(MissingPackageError("yaml", "x")))) == str(MissingPackageError("yaml", "x"))
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if "tensorboard" in name else name)
    check_packages(TrainSettings())


def test_threads_are_shared_out_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with all threads each spin at every barrier, ten times slower."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launch, "_USERS_THREADS", None)
    monkeypatch.setattr(launch, "physical_cores", lambda: 8)
    assert (set_threads(), set_threads(2), set_threads(99)) == ("8", "4", "1")
    monkeypatch.setattr(launch, "_USERS_THREADS", "3")
    assert set_threads(2) == "3" == os.environ["OMP_NUM_THREADS"]


def test_exit_status_comes_through() -> None:
    """Scripts that call `toolkit train` rely on it; 143 is what a shell says of SIGTERM."""
    assert run_child([sys.executable, "-c", "raise SystemExit(7)"], os.environ) == 7
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run_child([sys.executable, "-c", code], os.environ) == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_child_does_not_outlive_us(tmp_path: Path, number: signal.Signals) -> None:
    """A trainer left behind by a killed run would write into the folder that the next run resumes from."""
    mark = tmp_path / "pid"
    parent_code = (
        "import os, signal, sys; from toolkit.pipeline.launch import run_child; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a background job inherits it ignored
        f"sys.exit(run_child([sys.executable, '-c', {SLEEP!r}, {str(mark)!r}], os.environ))"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], cwd=launch.REPOSITORY, stderr=subprocess.DEVNULL)
    try:
        child = wait_for(mark)
        parent.send_signal(number)
        status = parent.wait(20)
        assert status == (143 if number == signal.SIGTERM else -number)
        end = time.monotonic() + 10
        while alive(child) and time.monotonic() < end:
            time.sleep(0.02)
        assert not alive(child)
    finally:
        parent.kill()
