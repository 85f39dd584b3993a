"""The training processes: their `accelerate launch` line, threads, signals and exit status; and the launcher itself,
which runs as a child: `python -m toolkit.pipeline.launch ARGUMENTS`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import MissingPackageError
from toolkit.recipe import REPOSITORY
from toolkit.recipe_fields import HeadName
from toolkit.threads import physical_cores
from toolkit.train_settings import TrainSettings

ACCELERATE_CONFIG = REPOSITORY / "recipes" / "accelerate" / "zero2.yaml"
TRAIN_SCRIPTS = REPOSITORY / "toolkit" / "train"  # one for each kind of head
# Set for training processes that `toolkit run` and `toolkit train` start: the stages before training are up to date
# and the run folder is locked.
STAGES_DONE = "TOOLKIT_STAGES_DONE"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_USERS_THREADS = os.environ.get("OMP_NUM_THREADS")


class LaunchError(ValueError):
    """A launch line that cannot work."""


def set_threads(processes: int = 1) -> str:
    """Give each of so many processes its share of the cores, by OMP_NUM_THREADS, unless the user set it; returns it.

    Holds for children, and for this process when called before torch loads.
    """
    os.environ["OMP_NUM_THREADS"] = _USERS_THREADS or str(max(1, physical_cores() // processes))
    return os.environ["OMP_NUM_THREADS"]


def gpus() -> int:
    """GPUs of this machine; importing torch takes a moment."""
    import torch

    return torch.cuda.device_count()


def training_processes(asked: int | None, settings: TrainSettings) -> int:
    """How many processes train: as asked, else one a GPU as far as they can share the global batch, else as many as
    hold a row.

    Raises `LaunchError` below 1, and where rows are split over more GPUs than there are.
    """
    if asked is not None and asked < 1:
        raise LaunchError(f"the number of training processes is {asked}; at least 1 is needed")
    group, batch = settings.data.split_rows, settings.data.global_batch
    if asked is None and 0 < gpus() < group:
        raise LaunchError(f"train.data.split_rows is {group}, and this machine has {gpus()} GPU(s): set at most that")
    return asked or max(n for n in range(group, max(group, gpus()) + 1, group) if batch % (n // group) == 0)


def check_packages(settings: TrainSettings) -> None:
    """Raise `MissingPackageError` for a package that training needs, before the stages that take days."""
    tracking = settings.tracking
    for package, needed_by, used in (
        ("accelerate", "training", True),
        ("deepspeed", "training", True),
        ("wandb", "train.tracking.wandb: true", tracking.wandb),
        ("tensorboard", "train.tracking.tensorboard: true", tracking.tensorboard),
    ):
        if used and importlib.util.find_spec(package) is None:
            raise MissingPackageError(package, needed_by)


def training_line(
    recipe: str | Path, overrides: Sequence[str], processes: int, config_file: Path | None, head: HeadName
) -> list[str]:
    """The command that trains a head of this kind. Raises FileNotFoundError for absent files."""
    config, script = config_file or ACCELERATE_CONFIG, TRAIN_SCRIPTS / f"{head}.py"
    for needed in (config, script):
        if not needed.is_file():
            raise FileNotFoundError(f"no {needed}; training starts from a clone of the repository (`pip install -e .`)")
    line = ["accelerate", "launch", "--config_file", _short(config), "--num_processes", str(processes)]
    # Port 0 lets accelerate choose a free one, so that two trainings can share a machine.
    return [*line, "--main_process_port", "0", _short(script), "--recipe", str(recipe), *overrides]


def zero_stage(config_file: Path | None) -> int:
    """The stage of DeepSpeed's ZeRO in an accelerate configuration; None: the default one."""
    if config_file is None:
        return 2
    try:
        stated = yaml.safe_load(config_file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise LaunchError(f"{config_file} cannot be read as an accelerate configuration: {error}") from error
    return (stated.get("deepspeed_config") or {}).get("zero_stage", 2)


def run_training(line: Sequence[str]) -> int:
    """Print `line`, run it, and return its exit status (128 + signal number when a signal ended it)."""
    print(f"$ OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} {shlex.join(line)}", file=sys.stderr, flush=True)
    environment = {**os.environ, STAGES_DONE: "1"}
    if not gpus():
        environment.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn, in each process, that it sees no GPU
    # The same interpreter's accelerate, wherever the PATH points. toolkit need not be installed; -P keeps the working
    # directory from hiding other modules.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return run_child([sys.executable, "-P", "-m", "toolkit.pipeline.launch", *line[2:]], environment)


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a child that gets our SIGTERM and does not outlive us; returns its exit status as a shell would.

    It has a process group of its own: Ctrl-C reaches us alone, and we end the child before KeyboardInterrupt goes on.
    """
    child = subprocess.Popen(command, env=dict(environment), preexec_fn=_die_with_parent(), process_group=0)

    def pass_on(number: int, frame: Any) -> None:
        child.send_signal(number)

    former = signal.signal(signal.SIGTERM, pass_on)
    try:
        status = child.wait()
    finally:
        signal.signal(signal.SIGTERM, former)
        if child.poll() is None:
            _end(child)
    return status if status >= 0 else 128 - status


def _end(child: subprocess.Popen[bytes], patience_s: float = 30.0) -> None:
    for stop in (child.terminate, child.kill):
        stop()
        try:
            child.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            continue


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux the kernel sends the launcher SIGTERM when we vanish, and it takes its workers along.

    Otherwise a SIGKILLed `toolkit run` would leave a trainer that writes into the folder the next run resumes from.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arrange() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # we vanished between fork and prctl
            os._exit(1)

    return arrange


def _short(path: Path) -> str:
    """`path` from the working directory where it lies below it, so that the printed line can be typed."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> int:
    """Launch with the arguments of the command line; returns the exit status a shell would show, without a traceback of
    torch's launcher: the workers have printed what was wrong, or were told to end."""
    from accelerate.commands.launch import main as launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch()
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status >= 0 else 128 - status
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
