"""A target with sharded layers: each of N processes holds a part of every layer's weights, and a layer's full weights
exist only while it runs. Embeddings, final norm and output matrix are replicated.

Uses torch's FSDP2 (`fully_shard`; PyTorch FSDP, arXiv 2304.11277), forward only. Every forward is a collective: all
processes must run the same number of forwards, each with its own batch. FSDP keeps about 50 bytes a layer of each
forward for a backward that is never called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from toolkit.errors import TargetError
from toolkit.targets.target import Target


def shard_layers(target: Target, mesh: DeviceMesh) -> None:
    """Move this process's part of every layer, and all other weights, to the mesh's device. Not a collective.

    It goes layer by layer, so that the device never holds more than one full layer, and frees the full weights.
    Raises `TargetError` for layers that FSDP cannot shard.
    """
    try:
        for layer in target.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    except (NotImplementedError, ValueError) as error:
        raise TargetError(
            f"the layers of {type(target.model).__name__} ({target.name}) cannot be sharded: "
            f"{str(error).splitlines()[0]}; set train.target=replicated"
        ) from error
    others = [parameter for parameter in target.model.parameters() if not isinstance(parameter, DTensor)]
    device = next(target.layers.parameters()).device
    # Device only: a dtype here would also cast the rotary frequencies.
    for tensor in (*others, *target.model.buffers()):
        tensor.data = tensor.data.to(device)
    # A root over all layers, without parameters, lets FSDP gather a layer while the one before it runs.
    fully_shard(target.body, mesh=mesh, ignored_params=set(others))


@contextmanager
def unsharded(layer: nn.Module) -> Iterator[None]:
    """Gather a sharded layer's full parameters, to read them outside of its forward. All processes must call this. Does
    nothing if the layer is not sharded."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def layer_bytes(target: Target) -> tuple[int, int]:
    """Bytes of a sharded target's layers: those that this process holds, and those of all processes."""
    parts = [parameter for parameter in target.layers.parameters() if isinstance(parameter, DTensor)]
    local = sum(part.to_local().untyped_storage().nbytes() for part in parts)
    return local, sum(part.numel() * part.element_size() for part in parts)
