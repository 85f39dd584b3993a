"""A trainer that is launched by hand sees to the stages before it, once for all processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.pipeline import train_entry
from toolkit.pipeline.train_entry import bring_up_to_date, stage_environment

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def calls(monkeypatch):
    """Command lines that would be run; their exit status is `calls.status`."""
    seen = SimpleNamespace(lines=[], status=0)

    def run(line, env, check):
        seen.lines.append(line[2:])
        return SimpleNamespace(returncode=seen.status)

    for name in ("TOOLKIT_STAGES_DONE", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train_entry.subprocess, "run", run)
    return seen


def _folder(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_absent_files_are_made(calls, tmp_path):
    """One of two is not enough. Both without a manifest were put there by hand: the stages would set them aside."""
    bring_up_to_date(_folder(tmp_path, "rollouts/rollouts.jsonl"), "r.yaml", ["seed=1"])
    assert calls.lines == [["toolkit", "prepare-data", "--recipe", "r.yaml", "seed=1"]]
    bring_up_to_date(_folder(tmp_path, "token_map/token_map.safetensors"), "r.yaml", [])
    assert len(calls.lines) == 1


def test_overrides_of_prerequisites_count(calls, tmp_path, monkeypatch):
    """With `target.model=other` the old rollouts lie there still; training on them would ignore the user's word."""
    made = _folder(tmp_path, "rollouts/rollouts.jsonl", "rollouts/manifest.json", "token_map/token_map.safetensors")
    bring_up_to_date(made, "r.yaml", ["target.model=other"])
    assert calls.lines == [["toolkit", "prepare-data", "--recipe", "r.yaml", "target.model=other"]]
    # `toolkit run` itself has just done so, and holds the folder's lock.
    monkeypatch.setenv("TOOLKIT_STAGES_DONE", "1")
    bring_up_to_date(made, "r.yaml", ["target.model=other"])
    assert len(calls.lines) == 1


def test_the_stages_do_not_see_the_launcher(monkeypatch):
    """They would think themselves one of several workers, and run on the one thread that it gives to each."""
    for name in ("RANK", "LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(train_entry, "users_threads", lambda: None)
    environment = stage_environment()
    assert not {"RANK", "LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED", "TORCHELASTIC_RUN_ID"} & environment.keys()
    assert "OMP_NUM_THREADS" not in environment and environment["PYTHONPATH"].split(os.pathsep)[0] == str(REPOSITORY)
    monkeypatch.setattr(train_entry, "users_threads", lambda: "3")
    assert stage_environment()["OMP_NUM_THREADS"] == "3"


WORKER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from toolkit.pipeline import train_entry
folder = Path(sys.argv[1])
def run(line, env, check):
    time.sleep(1.5)
    (folder / "made").write_text("new")
    return SimpleNamespace(returncode=0)
train_entry.subprocess.run = run
train_entry.bring_up_to_date(folder, "r.yaml", [])
print((folder / "made").read_text())
time.sleep(1.0)
"""


@pytest.mark.process
def test_processes_wait_for_the_first_one_s_files(tmp_path):
    """The old files lie there while new ones are made: whoever looked for files alone would train on those."""
    (tmp_path / "made").write_text("old")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    workers = []
    for rank in ("1", "0"):
        environment = {**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank}
        line = [sys.executable, "-c", WORKER, str(tmp_path)]
        workers.append(subprocess.Popen(line, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True))
        time.sleep(0.2)
    assert [worker.communicate(timeout=60)[0].strip() for worker in workers] == ["new", "new"]
