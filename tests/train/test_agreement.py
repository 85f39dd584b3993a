"""Two processes on a file system that shows the second one each file late: both take the same branches."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import build_target
from toolkit.errors import TrainError
from toolkit.train import agreement
from toolkit.train.agreement import from_main, wait_for_files
from toolkit.train.engine_client import FreshRollouts
from toolkit.train.state import POSITION_FILE, Position, restore_state
from toolkit.train.training_data import Data, offline_features
from toolkit.train_settings import HeadSettings, TrainSettings
from toolkit.weights import write_json

LATE_S = 1.5


def see_late() -> None:
    """Files and folders that are younger than LATE_S are not there for this process."""
    is_file, glob = Path.is_file, Path.glob
    visible = lambda path: path.stat().st_ctime < time.time() - LATE_S  # noqa: E731
    Path.is_file = lambda path: is_file(path) and visible(path)  # type: ignore[method-assign]
    Path.glob = lambda path, pattern: (one for one in glob(path, pattern) if visible(one))  # type: ignore[method-assign]


def in_two_processes(work, folder: Path) -> list:
    """What `work(accelerator, folder)` returns in each of two processes, as JSON; the second one sees files late."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_process, (work, folder, port), nprocs=2)
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


def _process(rank: int, work, folder: Path, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    if rank:
        see_late()
    accelerator = SimpleNamespace(
        process_index=rank,
        num_processes=2,
        is_main_process=rank == 0,
        wait_for_everyone=torch.distributed.barrier,
        load_state=lambda path: None,
    )
    found = work(accelerator, folder)
    (folder / f"result-{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def resumed_and_stored(accelerator, folder: Path) -> list:
    """The step that a state is resumed from, the features that are stored, and the statistics of fresh rollouts."""
    if accelerator.is_main_process:
        write_json(folder / "state-000004" / POSITION_FILE, {"step": 4, "fingerprint": "f", "processes": 2})
    torch.distributed.barrier()
    engine = SimpleNamespace(zero_optimization_stage=lambda: 2)
    position = restore_state(accelerator, engine, folder, "f", lambda position: False)
    assert isinstance(position, Position)

    texts = [SimpleNamespace(input_ids=list(range(3, 9 + index))) for index in range(5)]
    data = Data(texts, held_out=[], plan=None, pad_id=0)
    settings = TrainSettings(head=HeadSettings(kind="eagle2"))
    source = offline_features(settings, build_target(), None, data, folder / "features", accelerator)

    fresh = object.__new__(FreshRollouts)
    fresh.folder, fresh.accelerator = folder / "fresh", accelerator
    fresh.prompts = lambda step: ([None] * 3, {})
    fresh._share_head = lambda step, model: None
    fresh._write_shares = lambda step, draft: _write_share(fresh._share_path(step, accelerator.process_index))
    stats = fresh.write(2, None)
    again = fresh.write(2, None)  # the second process has not seen the file yet
    rows = fresh.path(2).read_text().splitlines()
    return [position.step, len(source.store), stats["rollouts"], again == stats, len(rows)]


def _write_share(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drafting = {"verify_steps": 1, "accepted": 1}
    path.write_text(json.dumps({"id": path.stem, "response_spans": [[1, 3]], "drafting": drafting}) + "\n")
    stats = {"rollouts": 1, "skipped": {}, "last_run": {"seconds": 1.0, "tokens": 2}}
    write_json(path.with_name(f"{path.stem}_stats.json"), stats)


@pytest.mark.process
def test_processes_that_see_files_late_agree(tmp_path):
    """A process that branched by its own view would start at step 0, compute other features, or answer prompts that
    the other one has read: each is a collective that one of them misses, so this test would hang or fail."""
    assert in_two_processes(resumed_and_stored, tmp_path) == [[4, 5, 2, True, 2]] * 2


def failing(accelerator, folder: Path) -> str:
    try:
        from_main(accelerator, lambda: (folder / "none").read_text())
    except FileNotFoundError as error:
        return type(error).__name__
    return "no error"


@pytest.mark.process
def test_an_error_of_the_main_process_is_raised_on_all(tmp_path):
    """The others would wait for it until the timeout of collectives, two hours."""
    assert in_two_processes(failing, tmp_path) == ["FileNotFoundError"] * 2


def test_a_folder_that_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.0)
    with pytest.raises(TrainError, match="does not see .*absent, .*file system that all processes share"):
        wait_for_files(tmp_path / "absent")
