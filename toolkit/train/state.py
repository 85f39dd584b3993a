"""Training states on disk: everything that a killed run needs to resume with the same results."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from toolkit.errors import ResumeError, TrainError
from toolkit.log import get_logger
from toolkit.train.convert_state import converted_state, is_of_other_layout
from toolkit.weights import read_json, write_json

log = get_logger(__name__)

POSITION_FILE = "position.json"


@dataclass
class Position:
    """The progress of a training: completed optimizer steps (`step`), the next batch (`epoch`, `index`), and totals.

    rollouts_of_step: the step at which the current rollouts were written; 0 for the stored rollouts. best_real: the
    engine's accept_length of the best head, if measured. initial_forecast, initial_real: those of train.init before the
    first step. stale: see `evaluation.update_best`.
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
    initial_forecast: float | None = None
    initial_real: float | None = None
    fingerprint: str = ""
    processes: int = 1


def save_state(accelerator: Accelerator, directory: Path, position: Position, keep: int) -> None:
    """Write `state-<step>` atomically and delete all but the newest `keep` states. All processes must call this."""
    final = directory / f"state-{position.step:06d}"
    part = final.with_suffix(".part")
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(part))
    except BaseException:  # a full disk: nothing reads an incomplete state
        shutil.rmtree(part, ignore_errors=True)
        raise
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
    """The file with the weights of the head of `step`, the best so far."""
    return directory / f"best-{step:06d}.safetensors"


def drop_unneeded_bests(directory: Path) -> None:
    """Delete the heads that are not the best of a stored state. A kill between saving a head and its state loses no
    head that a stored state needs."""
    needed = {read_json(state / POSITION_FILE)["best_step"] for state in stored_states(directory)}
    for path in directory.glob("best-*.safetensors"):
        if path not in {best_path(directory, step) for step in needed}:
            path.unlink()


@contextmanager
def sole_trainer(directory: Path) -> Iterator[None]:
    """Lock a training folder. The kernel releases the lock when the process ends, also after a kill.

    Raises `TrainError` when another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainError(f"another training uses {directory}; wait for it, or choose another run_dir") from None
        yield


def stored_states(directory: Path) -> list[Path]:
    """Complete states, oldest first."""
    found = [path for path in directory.glob("state-*") if re.fullmatch(r"state-\d{6,}", path.name)]
    # By number: as text, 1000000 sorts before 999999.
    return sorted(found, key=lambda path: int(path.name.removeprefix("state-")))


def restore_state(
    accelerator: Accelerator, engine: Any, directory: Path, fingerprint: str, is_finished: Callable[[Position], bool]
) -> Position:
    """Load the newest state into the prepared objects and return its position; a new `Position` without a state.

    engine: the DeepSpeed engine of the head. A finished training is not loaded: its best head is in a file. A state of
    another number of processes is converted. All processes must call this.
    Raises `ResumeError` when the state was written with other settings, or cannot be converted.
    """
    states = stored_states(directory)
    if not states:
        return Position(fingerprint=fingerprint, processes=accelerator.num_processes)
    newest = states[-1]
    position = Position(**read_json(newest / POSITION_FILE))
    if position.fingerprint != fingerprint:
        raise ResumeError(
            f"{newest} was written with other settings or data; choose another run_dir, or use the settings of before"
        )
    if is_finished(position):
        return position
    converted = newest
    if is_of_other_layout(accelerator, engine, newest, position.processes):
        converted = converted_state(accelerator, engine, newest, position.processes)
    accelerator.load_state(str(converted))
    # States are saved between optimizer steps. accelerate would continue its count of micro-batches from the state;
    # with another micro_batch its optimizer steps would then fall inside our global batches.
    accelerator.step = 0
    accelerator.wait_for_everyone()
    if converted != newest and accelerator.is_main_process:
        shutil.rmtree(converted)
    log.info("resumed from %s", newest)
    return position
