"""Writes metrics.jsonl, and Weights & Biases and TensorBoard if the recipe asks. `metric_rows.py` defines the rows."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import Any

from toolkit.errors import optional_package
from toolkit.train.metric_rows import flat_row
from toolkit.train_settings import TrainSettings
from toolkit.weights import atomic_write


class Metrics:
    """Appends rows to `metrics.jsonl`, one JSON object a line, and sends them to the trackers of the settings.

    Numbers that are not finite become null. The file `wandb_id` in the same folder holds the id of the wandb run, so
    that a resumed training continues its run. WANDB_MODE (online, offline, disabled) is wandb's own setting; offline
    needs no account. TensorBoard's events are in `tensorboard/` in the same folder. Only the main process writes; on
    the others every call does nothing.
    """

    def __init__(
        self, path: Path, *, main: bool, settings: TrainSettings, run_name: str, config: dict[str, Any]
    ) -> None:
        """config: the run's settings, for wandb."""
        self.path = path
        self.main = main
        self._run: Any = None
        self._board: Any = None
        self._wants_board = main and settings.tracking.tensorboard
        if main:
            path.parent.mkdir(parents=True, exist_ok=True)
        if main and settings.tracking.wandb:
            self._run = optional_package("wandb", "train.tracking.wandb: true").init(
                project=settings.tracking.wandb_project,
                name=run_name,
                config=config,
                dir=str(path.parent),
                resume="allow",
                id=_run_id(path.parent / "wandb_id"),
            )

    def rewind(self, step: int, rollouts_of_step: int = 0) -> None:
        """Delete the rows after `step` and an incomplete last line, which a resumed run writes again. Also delete the
        row of the fresh rollouts of `step`, unless training had already switched to them (rollouts_of_step)."""
        if not self.main:
            return
        if self._wants_board:
            self._board = _open_board(self.path.parent / "tensorboard", step)
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["step"] <= (rollouts_of_step if "rollouts" in row else step):
                kept.append(line)
        with atomic_write(self.path) as temporary:
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it must hold `step`."""
        if not self.main:
            return
        row = _finite(row)
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row, allow_nan=False) + "\n")
        if self._run is not None:
            self._run.log(flat_row(row), step=row["step"])
        if self._board is not None:
            for name, value in flat_row(row).items():
                if name != "step":
                    self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
        if self._board is not None:
            self._board.close()


def _open_board(directory: Path, step: int) -> Any:
    """A writer that hides the events after `step` of an interrupted run."""
    from torch.utils.tensorboard import SummaryWriter  # needs the optional package tensorboard

    return SummaryWriter(str(directory), purge_step=step + 1)


def _run_id(path: Path) -> str:
    if not path.is_file():
        with atomic_write(path) as temporary:
            temporary.write_text(uuid.uuid4().hex[:16], encoding="ascii")
    return path.read_text(encoding="ascii").strip()


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
