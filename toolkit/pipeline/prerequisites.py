"""The stages before training, for a trainer that was launched by hand: process 0 brings them up to date.

It does so in a process of its own, `python -m toolkit.pipeline.prerequisites RECIPE [a.b=c ...]`, for two reasons. The
launcher gives its workers one thread each and a rank, and torch and accelerate read both only once. And the memory of
the engine is free again when that process ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from toolkit.errors import exit_status
from toolkit.log import get_logger
from toolkit.pipeline.launch import STAGES_DONE
from toolkit.pipeline.recipe_stages import run_recipe
from toolkit.pipeline.run import ROLLOUTS, TOKEN_MAP, Run
from toolkit.pipeline.stages import PipelineError
from toolkit.recipe import REPOSITORY, load_recipe
from toolkit.threads import users_threads

log = get_logger(__name__)

_STORE_KEY = "toolkit/stages before training"
# Rollouts of a large target take days. If process 0 fails meanwhile, the launcher ends the others.
_PATIENCE = timedelta(days=30)
_kept: list[Any] = []
# The launcher's variables describe its group of processes; the stages run outside of it.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def bring_up_to_date(run_dir: Path, recipe_path: str, overrides: Sequence[str]) -> None:
    """Process 0 brings the stages before training up to date; the others wait for it. All processes must call this.

    Files without a manifest were put there by hand; they are taken as they are.
    Raises `PipelineError` when a stage fails.
    """
    if os.environ.get(STAGES_DONE) == "1":
        return
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        _run_where_needed(run_dir, recipe_path, overrides)
        return
    import torch.distributed

    # The launch's own key-value store: files of an earlier launch could be mistaken for those of this one.
    store, rank, _ = next(iter(torch.distributed.rendezvous("env://")))
    if rank == 0:
        _run_where_needed(run_dir, recipe_path, overrides)
        store.set(_STORE_KEY, "done")
    store.wait([_STORE_KEY], _PATIENCE)
    # Process 0 may be the server of the store. The process group uses the same server while this store is alive.
    _kept.append(store)


def _run_where_needed(run_dir: Path, recipe_path: str, overrides: Sequence[str]) -> None:
    absent = [path for name in (ROLLOUTS, TOKEN_MAP) if not (path := run_dir / name).is_file()]
    if not absent and not (run_dir / "rollouts" / "manifest.json").is_file():
        return
    if absent:
        log.info("no %s yet: the stages before training come first", absent[0])
    line = [sys.executable, "-m", "toolkit.pipeline.prerequisites", recipe_path, *overrides]
    status = subprocess.run(line, env=stage_environment(), check=False).returncode
    if status:
        raise PipelineError(f"the stages before training ended with status {status}; see their message above")


def stage_environment() -> dict[str, str]:
    """Our environment without the launcher's variables for its workers; this checkout can be imported there."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHERS and not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    threads = users_threads()
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return environment


def main(recipe_path: str, *overrides: str) -> int:
    """Bring the stages of a recipe up to date, up to and with the token map. Returns an exit status."""
    run_recipe(Run(load_recipe(recipe_path, overrides), Path(recipe_path), overrides), until="token_map")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(*sys.argv[1:])))
