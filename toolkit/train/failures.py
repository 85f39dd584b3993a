"""Errors that end a running training: it diverged, or another process of the group was lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator

from toolkit.errors import TrainError
from toolkit.train.state import stored_states

# Messages of gloo and NCCL after another process has ended; torch has no error type for it.
LOST_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "timed out",
)


class DivergedError(TrainError):
    """The loss, the gradient or the weights are not finite."""


class LostProcessError(TrainError):
    """Another process of the group has ended or cannot be reached."""


def check_finite(step: int, loss: float, grad_norm: float | None, directory: Path) -> None:
    """Raise `DivergedError` if the loss or the gradient norm of the step is not finite. All processes have the same
    values."""
    if math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm)):
        return
    what = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        what = f"the gradient norm of step {step} is {grad_norm}"
    raise _diverged(what, directory)


def check_weights(accelerator: Accelerator, model: torch.nn.Module, step: int, directory: Path) -> None:
    """Raise `DivergedError` if the weights after the step are not finite. All processes must call this, before the head
    is evaluated or stored: the loss of a step is computed before its update, and Muon gives no gradient norm.
    """
    parts = [_own_part(one, accelerator.process_index) for one in model.parameters() if one.requires_grad]
    broken = sum((~torch.isfinite(one.detach()).all()).long() for one in parts)
    if int(accelerator.reduce(torch.as_tensor(broken, device=accelerator.device), "sum")):
        raise _diverged(f"the weights after step {step} are not finite", directory)


def _own_part(parameter: torch.Tensor, rank: int) -> torch.Tensor:
    """The part of a parameter that this process holds under ZeRO-3, without the uninitialised padding after its last
    element; empty while the parameter is offloaded to a disk."""
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter
    return part.flatten()[: max(0, parameter.ds_numel - rank * part.numel())]  # type: ignore[attr-defined]


def _diverged(what: str, directory: Path) -> DivergedError:
    return DivergedError(
        f"{what}, so training stops; {_newest(directory)}. The usual cause is the learning rate: lower "
        "train.optimizer.learning_rate (and muon_learning_rate), raise train.optimizer.warmup_ratio, or set "
        "train.precision=fp32, and train into another run_dir"
    )


@contextmanager
def lost_process_named(directory: Path) -> Iterator[None]:
    """Convert the error of a collective with a lost process to `LostProcessError`; other errors are raised as they
    are."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).lower()
        of_the_group = isinstance(error, torch.distributed.DistError) or "gloo" in message or "nccl" in message
        if not of_the_group or not any(words in message for words in LOST_MESSAGES):
            raise
        raise LostProcessError(
            f"another training process ended or cannot be reached ({str(error).splitlines()[0][:200]}); see its own "
            f"message above, if any. {_newest(directory)}; run the same command again to resume from it"
        ) from error


def _newest(directory: Path) -> str:
    states = stored_states(directory)
    return f"the newest state is {states[-1]}" if states else "no state was stored yet"
