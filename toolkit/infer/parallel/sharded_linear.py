"""Column- and row-parallel linear layers: styles for torch's parallelize_module.

DTensor shards the weights. The matmuls run on plain tensors, because DTensor dispatch costs more than a decoding step.

    column   rows of the weight [out/N, in]: whole input -> this rank's part of the output (heads, MLP width)
    row      columns of the weight [out, in/N]: this rank's part of the input -> all-reduced sum

Shapes: N ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from toolkit.infer.parallel.ranks import ParallelError


class Column(ParallelStyle):
    """Column-parallel. gather: all-gather the output, so that every rank has all of it, with the same bits."""

    def __init__(self, *, gather: bool = False) -> None:
        super().__init__()
        self.gather = gather

    @staticmethod
    def divided(linear: nn.Linear) -> int:
        """The sharded width."""
        return linear.out_features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = _part(module.weight, device_mesh, 0)
        if module.bias is not None:
            module.bias = _part(module.bias, device_mesh, 0)
        if self.gather:
            module.register_forward_hook(_gathered)
        return module


class Row(ParallelStyle):
    """Row-parallel. split: the input is whole, and each rank selects its part."""

    def __init__(self, *, split: bool = False) -> None:
        super().__init__()
        self.split = split

    @staticmethod
    def divided(linear: nn.Linear) -> int:
        """The sharded width."""
        return linear.in_features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = _part(module.weight, device_mesh, 1)
        if dist.get_rank():  # only rank 0 adds the bias
            module.register_parameter("bias", None)
        if self.split:
            module.register_forward_pre_hook(_own_part)
        module.register_forward_hook(_summed)
        return module


def check_divides(path: str, module: nn.Module, style: Column | Row, size: int) -> None:
    """Raise ParallelError unless `module` is a linear layer that `size` ranks can divide evenly."""
    if not isinstance(module, nn.Linear):
        raise ParallelError(f"{path} is {type(module).__name__}; only linear layers can be divided among ranks")
    width = style.divided(module)
    if width % size:
        raise ParallelError(
            f"{path} is {width} wide, which {size} ranks cannot divide evenly; choose a tensor parallel size that "
            f"divides {width}"
        )


def _part(whole: Any, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard as a copy, so that the whole weight can be freed."""
    part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None).to_local()
    return nn.Parameter(part.clone().to(whole.device), requires_grad=False)


def _summed(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


def _gathered(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    """All-gather of [..., width/N] -> [..., width]."""
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, output.contiguous())
    return torch.cat(parts, dim=-1)


def _own_part(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.chunk(args[0], dist.get_world_size(), dim=-1)[dist.get_rank()], *args[1:])
