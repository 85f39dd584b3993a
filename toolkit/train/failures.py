"""Ends of a training that have a name: the loss is no number, or a process of the group is gone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator

from toolkit.train.errors import TrainError
from toolkit.train.state import stored_states

# What gloo and NCCL say when another process has gone; torch has no type for it.
GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited", "timed out")


class DivergedError(TrainError):
    """The loss or the gradient is no finite number: what follows would be worthless."""


class LostProcessError(TrainError):
    """Another process of the group has ended or cannot be reached."""


def check_finite(step: int, loss: float, grad_norm: float | None, directory: Path) -> None:
    """Raise `DivergedError` where step `step` found no finite numbers; all processes hold the same two."""
    if math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm)):
        return
    what = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        what = f"the gradient's norm at step {step} is {grad_norm}"
    raise _diverged(what, directory)


def check_weights(accelerator: Accelerator, model: torch.nn.Module, step: int, directory: Path) -> None:
    """Raise `DivergedError` before the head of step `step` is judged or stored; all processes must call this.

    The loss of a step is that of the weights before it, and under Muon nothing says what the gradient's norm was.
    """
    held = [_own_part(one, accelerator.process_index) for one in model.parameters() if one.requires_grad]
    broken = sum((~torch.isfinite(one.detach()).all()).long() for one in held)
    if int(accelerator.reduce(torch.as_tensor(broken, device=accelerator.device), "sum")):
        raise _diverged(f"step {step} left weights that are no finite numbers", directory)


def _own_part(parameter: torch.Tensor, rank: int) -> torch.Tensor:
    """ZeRO-3: what this process holds of it, without the padding behind its last number, which nobody writes. Nothing
    while it is offloaded to a disk."""
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter
    return part.flatten()[: max(0, parameter.ds_numel - rank * part.numel())]  # type: ignore[attr-defined]


def _diverged(what: str, directory: Path) -> DivergedError:
    return DivergedError(
        f"{what}, so training stops; {_newest(directory)}. Its learning rate is the usual cause: train with a lower "
        "train.optimizer.learning_rate (and muon_learning_rate) or a longer train.optimizer.warmup_ratio into "
        "another run_dir, or with train.precision=fp32"
    )


@contextmanager
def lost_process_named(directory: Path) -> Iterator[None]:
    """Raise `LostProcessError` for the error of a collective whose other process is gone; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).lower()
        of_the_group = isinstance(error, torch.distributed.DistError) or "gloo" in said or "nccl" in said
        if not of_the_group or not any(words in said for words in GONE):
            raise
        raise LostProcessError(
            f"another training process ended or cannot be reached ({str(error).splitlines()[0][:200]}); its own "
            f"message, if any, stands above. {_newest(directory)}; start the same command again to go on from there"
        ) from error


def _newest(directory: Path) -> str:
    states = stored_states(directory)
    return f"the newest state is {states[-1]}" if states else "no state was stored yet"
