"""The stages before training, for a trainer that was launched by hand: are their files there and up to date?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from toolkit.log import get_logger
from toolkit.threads import users_threads
from toolkit.train.errors import TrainError

log = get_logger(__name__)

# Set for the trainers that `toolkit run` and `toolkit train` start: these have seen to the stages and hold the folder.
DONE_MARK = "TOOLKIT_STAGES_DONE"
_STORE_KEY = "toolkit/stages before training"
# Rollouts of a large target take days; the launcher ends us if process 0 fails before.
_PATIENCE = timedelta(days=30)
_kept: list[Any] = []
# The launcher's variables describe its group of processes; the stages run outside of it.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def bring_up_to_date(run_dir: Path, needed: Sequence[Path], recipe_path: str, overrides: Sequence[str]) -> None:
    """Process 0 runs `toolkit run RECIPE --until token_map`, an instant when all is up to date; the others wait for it.

    Files without a manifest were put there by hand: then there is nothing to run. All processes must call this.
    Raises `TrainError` when a stage fails.
    """
    if os.environ.get(DONE_MARK) == "1":
        return
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        _run_where_needed(run_dir, needed, recipe_path, overrides)
        return
    import torch.distributed

    # The launch's own key-value store: files of an earlier launch could be mistaken for those of this one.
    store, rank, _ = next(iter(torch.distributed.rendezvous("env://")))
    if rank == 0:
        _run_where_needed(run_dir, needed, recipe_path, overrides)
        store.set(_STORE_KEY, "done")
    store.wait([_STORE_KEY], _PATIENCE)
    # Where process 0 is the store's server, the process group's own will share it as long as this one lives.
    _kept.append(store)


def _run_where_needed(run_dir: Path, needed: Sequence[Path], recipe_path: str, overrides: Sequence[str]) -> None:
    absent = [path for path in needed if not path.is_file()]
    if not absent and not (run_dir / "rollouts" / "manifest.json").is_file():
        return
    if absent:
        log.info("no %s yet: the stages before training come first", absent[0])
    line = [sys.executable, "-m", "toolkit", "run", recipe_path, *overrides, "--until", "token_map"]
    status = subprocess.run(line, env=stage_environment(), check=False).returncode
    if status:
        raise TrainError(f"the stages before training ended with status {status}; see their message above")


def stage_environment() -> dict[str, str]:
    """The environment without what the launcher put there for its workers, and with this checkout importable."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHERS and not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    threads = users_threads()
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    repository = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (repository, os.environ.get("PYTHONPATH"))))
    return environment
