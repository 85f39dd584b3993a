"""The target of a training: replicated in every process, or with sharded layers (`train.target`)."""

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
from toolkit.targets.load import layer_bytes, shard_layers
from toolkit.targets.target import Target

log = get_logger(__name__)


def frozen_target(recipe: Recipe, device: str, accelerator: Accelerator) -> Target:
    """The recipe's target on this process's device. All processes must call this. Raises `TargetError`."""
    # ZeRO-3 is for the head. The Accelerator has registered it with transformers, which would shard the target too.
    unset_hf_deepspeed_config()
    processes = accelerator.num_processes
    if recipe.train.target == "sharded" and processes == 1:
        log.warning("train.target=sharded has no effect with one process; launch more processes")
    if recipe.train.target == "replicated" or processes == 1:
        return _load(recipe, device, device)
    mesh = init_device_mesh(device.partition(":")[0], (processes,))
    with _one_process_at_a_time():
        target = _load(recipe, device, "cpu")
        shard_layers(target, mesh)
    local, total = layer_bytes(target)
    log.info(
        "the target's layers are sharded over %d processes: this process holds %d of %d bytes", processes, local, total
    )
    return target


def _load(recipe: Recipe, device: str, place: str) -> Target:
    """place: the device that the weights are loaded to, before they move to `device`."""
    settings = recipe.target
    return load_target(
        settings.model,
        dtype=settings.dtype,
        revision=settings.revision,
        device=place,
        quantization=settings.quantization,
        chat_template=settings.chat_template,
        use="training",
        runs_on=device,
    )


@contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """The processes of a machine take turns, because its memory may hold only one full target."""
    path = Path(tempfile.gettempdir()) / f"toolkit-target-{os.getuid()}.lock"
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
