"""The target of a training: whole in every process, or its layers shared out among them (`train.target`)."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from toolkit.infer.engine.cpu_door import load_target
from toolkit.log import get_logger
from toolkit.recipe import Recipe
from toolkit.targets.load import Target
from toolkit.targets.sharding import layer_bytes, share_out

log = get_logger(__name__)


def frozen_target(recipe: Recipe, device: str, accelerator: Accelerator) -> Target:
    """The recipe's target, on this process's device. All processes must call this. Raises `TargetError`."""
    # The Accelerator told transformers of ZeRO-3, which is the head's: a model loaded under it would be in pieces.
    unset_hf_deepspeed_config()
    processes = accelerator.num_processes
    if recipe.train.target == "sharded" and processes == 1:
        log.warning("train.target=sharded with one process: the whole target is here; launch more of them")
    if recipe.train.target == "replicated" or processes == 1:
        return _load(recipe, device, device)
    mesh = init_device_mesh(device.partition(":")[0], (processes,))
    with _turn_of_the_node():
        target = _load(recipe, device, "cpu")
        share_out(target, mesh)
    here, everywhere = layer_bytes(target)
    log.info(
        "the target's layers are shared out among %d processes: %d of %d bytes are here", processes, here, everywhere
    )
    return target


def _load(recipe: Recipe, device: str, place: str) -> Target:
    """place: where its weights are read to. The dtype is that for `device`."""
    settings = recipe.target
    return load_target(
        settings.model,
        dtype=settings.dtype,
        revision=settings.revision,
        device=place,
        quantization=settings.quantization,
        use="training" if device == "cpu" else "serving",  # `place` may be a CPU that multiplies nothing
    )


@contextmanager
def _turn_of_the_node() -> Iterator[None]:
    """One process of a machine after the other: its memory holds one whole target at a time."""
    path = Path(tempfile.gettempdir()) / f"toolkit-target-{os.getuid()}.lock"
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
