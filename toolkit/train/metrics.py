"""metrics.jsonl: the rows, the clock that measures a step, and the trackers that show the rows too.

every step                       `step_row`
train.evaluation.eval_every      `evaluation.forecast_row`
train.evaluation.real_every      `evaluation.real_row`
train.on_policy.every            `rollouts_row`
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import optional_package
from toolkit.train.loss import step_weights
from toolkit.train_settings import TrainSettings
from toolkit.weights import atomic_write

# Keys of `step_row` that depend on the machine: two runs of one recipe differ in them.
MACHINE_KEYS = (
    "seconds_per_step",
    "tokens_per_s",
    "seconds_target",
    "seconds_head",
    "seconds_optimizer",
    "peak_memory_bytes",
)


class StepClock:
    """`with clock.part("head"):` adds to the time of a part, without that of parts inside it.

    `clock.part("head")(call)` is `call` with its time measured.

    On a GPU it records CUDA events; `read` waits for them at the end of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._spans: list[tuple[str, str | None, Any, Any]] = []  # part, the part around it, from, to
        self._open: list[str] = []
        self._began = time.perf_counter()

    def restart(self) -> None:
        self._spans.clear()
        self._began = time.perf_counter()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        around = self._open[-1] if self._open else None
        self._open.append(name)
        began = self._mark()
        try:
            yield
        finally:
            self._spans.append((name, around, began, self._mark()))
            self._open.pop()

    def read(self) -> dict[str, float]:
        """Seconds since `restart` (key "step"), and of each part."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        seconds = {"step": time.perf_counter() - self._began}
        for name, around, began, ended in self._spans:
            took = began.elapsed_time(ended) / 1000 if self._on_gpu else ended - began
            seconds[name] = seconds.get(name, 0.0) + took
            if around is not None:
                seconds[around] = seconds.get(around, 0.0) - took
        return seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU the peak of allocated tensors since the step began; elsewhere the peak memory of this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Kilobytes on Linux (getrusage(2)), bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class StepSums:
    """Sums over the global batch of one optimizer step, by step of the unroll [K].

    loss: the mean already. right: right predictions. supervised: supervised predictions. reached: supervised chains
    whose earlier predictions are all right. passed: those of them that are right at this step too.
    """

    loss: torch.Tensor
    right: torch.Tensor
    supervised: torch.Tensor
    reached: torch.Tensor
    passed: torch.Tensor


def step_row(
    sums: StepSums,
    settings: TrainSettings,
    rate_factor: float,
    grad_norm: float | None,
    coverage: float,
    seconds: dict[str, float],
    peak_memory_bytes: int,
) -> dict[str, Any]:
    """The row of one optimizer step.

    loss: sum of `step_weights`[k] * loss_by_step[k]. accuracy_by_step: share of right predictions at step k.
    conditional_accuracy_by_step: the same over chains whose earlier predictions are all right; null without any.
    coverage: share of the supervised tokens that are in the draft vocabulary. seconds: by part of the step. grad_norm:
    null under Muon, because DeepSpeed reports the norm of the orthogonalised updates there, not of the gradients.
    """
    tokens, step_seconds = int(sums.supervised[0]), seconds["step"]
    weights = step_weights(settings.head.kind, settings.unroll.step_decay, len(sums.loss))
    reached, passed = sums.reached.tolist(), sums.passed.tolist()
    muon = settings.optimizer.name == "muon"
    return {
        "seconds_per_step": step_seconds,
        "loss": float((weights * sums.loss).sum()),
        "loss_by_step": sums.loss.tolist(),
        "accuracy_by_step": (sums.right / sums.supervised.clamp(min=1)).tolist(),
        "conditional_accuracy_by_step": [
            right / count if count else None for right, count in zip(passed, reached, strict=True)
        ],
        "token_map_coverage": coverage,
        "learning_rate": rate_factor * settings.optimizer.learning_rate,
        "muon_learning_rate": rate_factor * settings.optimizer.muon_learning_rate if muon else None,
        "grad_norm": None if muon else grad_norm,
        "supervised_tokens": tokens,
        "tokens_per_s": tokens / step_seconds,
        **{f"seconds_{part}": seconds.get(part, 0.0) for part in ("target", "head", "optimizer")},
        "peak_memory_bytes": peak_memory_bytes,
    }


def rollouts_row(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics of the fresh rollouts that the engine wrote with the head of this step as drafter."""
    names = {"rollouts": "rollouts", "skipped": "rollouts_skipped"}
    return {names.get(name, f"rollout_{name}"): value for name, value in stats.items()}


def flat_row(row: dict[str, Any]) -> dict[str, float]:
    """The row as scalars, for trackers. Each entry of a list becomes a series, named by its "name" or its index."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            inside: Any = value.items()
        elif isinstance(value, list):
            inside = ((one["name"] if isinstance(one, dict) else at, one) for at, one in enumerate(value))
        else:
            if isinstance(value, int | float) and not isinstance(value, bool):
                flat[name] = value
            continue
        for key, one in inside:
            flat.update(flat_row({f"{name}/{key}": one}))
    return flat


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
                project=os.environ.get("WANDB_PROJECT", "toolkit"),
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
