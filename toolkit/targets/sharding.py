"""A target whose layers are shared out: each of N processes keeps its part of every weight of theirs, and a layer is
whole only while it runs. Embeddings, final norm and output matrix stay whole in every process.

By torch's FSDP2 (`fully_shard`; PyTorch FSDP, arXiv 2304.11277), forward only. A forward is then the work of all
processes: each has to run as many, though of its own batches. FSDP notes each one for a backward that never comes,
about 50 bytes a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from toolkit.targets.errors import TargetError
from toolkit.targets.target import Target


def share_out(target: Target, mesh: DeviceMesh) -> None:
    """Keep this process's part of every layer, and all else, on the mesh's device. Not a collective.

    Layer by layer, so that a device never holds more than one whole; the whole weights are let go of.
    Raises `TargetError` for layers that FSDP cannot cut.
    """
    try:
        for layer in target.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    except (NotImplementedError, ValueError) as error:
        raise TargetError(
            f"the layers of {type(target.model).__name__} ({target.name}) cannot be shared out among processes: "
            f"{str(error).splitlines()[0]}; set train.target=replicated"
        ) from error
    others = [parameter for parameter in target.model.parameters() if not isinstance(parameter, DTensor)]
    device = next(target.layers.parameters()).device
    # Device only: a dtype here would also cast the rotary frequencies.
    for tensor in (*others, *target.model.buffers()):
        tensor.data = tensor.data.to(device)
    # One root over all layers, with nothing of its own: under it a layer is gathered while the one before it runs.
    fully_shard(target.body, mesh=mesh, ignored_params=set(others))


@contextmanager
def whole(layer: nn.Module) -> Iterator[None]:
    """A layer's parameters in full, for whoever reads them outside of its forward. All processes must call this where
    the layer is shared out; nothing is done where it is not."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def layer_bytes(target: Target) -> tuple[int, int]:
    """Of a target that is shared out: the bytes of its layers that this process holds, and those of all processes."""
    parts = [parameter for parameter in target.layers.parameters() if isinstance(parameter, DTensor)]
    here = sum(part.to_local().untyped_storage().nbytes() for part in parts)
    return here, sum(part.numel() * part.element_size() for part in parts)
