"""metrics.jsonl always, Weights & Biases when asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import wandb


class Metrics:
    """Appends rows to `metrics.jsonl`, one JSON object a line, and mirrors them to wandb.

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
                id=settings["fingerprint"][:16],
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
        self.path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it must hold `step`."""
        if not self.main:
            return
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
        if self._run is not None:
            self._run.log(_flat(row), step=row["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _flat(row: dict[str, Any]) -> dict[str, float]:
    """Lists become one series an entry: wandb draws scalars."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, list):
            flat.update({f"{name}/{index}": entry for index, entry in enumerate(value)})
        elif isinstance(value, int | float):
            flat[name] = value
    return flat
