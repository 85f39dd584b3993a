"""metrics.jsonl always, Weights & Biases when asked."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import Any

import wandb

from toolkit.weights import atomic_write


class Metrics:
    """Appends rows to `metrics.jsonl`, one JSON object a line, and mirrors them to wandb.

    What is no finite number is written as null. The wandb run's id lies beside the file, in `wandb_id`: a resumed
    training goes on in its run, a new one in the same settings gets its own.
    Only the main process writes; on the others every call is a no-op. wandb's mode (online, offline, disabled) is its
    own WANDB_MODE; offline works without an account.
    """

    def __init__(self, path: Path, *, main: bool, project: str | None, run_name: str, settings: dict[str, Any]) -> None:
        self.path = path
        self.main = main
        self._run = None
        if main:
            path.parent.mkdir(parents=True, exist_ok=True)
        if main and project is not None:
            self._run = wandb.init(
                project=project,
                name=run_name,
                config=settings,
                dir=str(path.parent),
                resume="allow",
                id=_run_id(path.parent / "wandb_id"),
            )

    def rewind(self, step: int) -> None:
        """Drop rows after `step`, and a torn last line: a resumed run writes them anew."""
        if not self.main or not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["step"] <= step:
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
            self._run.log(_flat(row), step=row["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _run_id(path: Path) -> str:
    if not path.is_file():
        with atomic_write(path) as temporary:
            temporary.write_text(uuid.uuid4().hex[:16], encoding="ascii")
    return path.read_text(encoding="ascii").strip()


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(row: dict[str, Any]) -> dict[str, float]:
    """Lists become one series an entry: wandb draws scalars."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat.update(
            {f"{name}/{index}": entry for index, entry in enumerate(value)}
            if isinstance(value, list)
            else {name: value}
        )
    return {name: value for name, value in flat.items() if isinstance(value, int | float)}
