"""Training states on disk: everything a killed run needs to go on as if it had not been."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator

from toolkit.log import get_logger
from toolkit.train.errors import ResumeError, TrainError
from toolkit.weights import read_json, write_json

log = get_logger(__name__)

POSITION_FILE = "position.json"


@dataclass
class Position:
    """Where training stands: `step` done, and the next batch (`epoch`, `index`). Totals are of the whole run.

    rollouts_of_step: 0 while it trains on the stored rollouts, else the step at which the present ones were written.
    best_real: the engine's accept_length of the best head, if measured. stale: see `best_head.update_best`.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_forecast: float | None = None
    best_real: float | None = None
    stale: int = 0
    rollouts_of_step: int = 0
    fingerprint: str = ""
    processes: int = 1


def save_state(accelerator: Accelerator, directory: Path, position: Position, keep: int) -> None:
    """Write `state-<step>` (all processes take part), whole or not at all, and drop all but the newest `keep`."""
    final = directory / f"state-{position.step:06d}"
    part = final.with_suffix(".part")
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(part / POSITION_FILE, asdict(position))
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in stored_states(directory)[:-keep]:
            shutil.rmtree(old)
        drop_unneeded_bests(directory)
    accelerator.wait_for_everyone()


def best_path(directory: Path, step: int) -> Path:
    """The weights of the best head so far, which was that of `step`."""
    return directory / f"best-{step:06d}.safetensors"


def drop_unneeded_bests(directory: Path) -> None:
    """Remove heads that no stored state calls its best. A kill between a head and its state loses neither."""
    needed = {read_json(state / POSITION_FILE)["best_step"] for state in stored_states(directory)}
    for path in directory.glob("best-*.safetensors"):
        if path not in {best_path(directory, step) for step in needed}:
            path.unlink()


@contextmanager
def sole_trainer(directory: Path) -> Iterator[None]:
    """One training at a time in a folder; the kernel frees the lock when the process ends, however it ends.

    Raises `TrainError` when another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainError(f"another training works in {directory}; wait for it, or choose another run_dir") from None
        yield


def stored_states(directory: Path) -> list[Path]:
    """Complete states, oldest first."""
    found = [path for path in directory.glob("state-*") if re.fullmatch(r"state-\d{6,}", path.name)]
    # By number: as text, step 1000000 would come before 999999.
    return sorted(found, key=lambda path: int(path.name.removeprefix("state-")))


def restore_state(accelerator: Accelerator, directory: Path, fingerprint: str) -> Position:
    """Load the newest state into the prepared objects; a fresh `Position` when there is none.

    Raises `ResumeError` when it was written by other settings or another number of processes.
    """
    states = stored_states(directory)
    if not states:
        return Position(fingerprint=fingerprint, processes=accelerator.num_processes)
    newest = states[-1]
    position = Position(**read_json(newest / POSITION_FILE))
    if position.fingerprint != fingerprint:
        raise ResumeError(
            f"{newest} was written with other settings or data than these; train into another run_dir, "
            f"or delete {directory} to start over"
        )
    if position.processes != accelerator.num_processes:
        raise ResumeError(
            f"{newest} was written by {position.processes} processes and {accelerator.num_processes} are running: "
            f"a ZeRO state is sharded by process. Launch {position.processes} again, or delete {directory}"
        )
    accelerator.load_state(str(newest))
    # States lie between optimizer steps. accelerate goes on counting micro-batches from the stored number, which with
    # another micro_batch would put its boundaries into the middle of our global batches.
    accelerator.step = 0
    log.info("resumed from %s", newest)
    return position
