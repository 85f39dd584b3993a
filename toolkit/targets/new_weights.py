"""Copies new weights into a model that an engine has opened: in place, also into packed and quantised layers.

Addresses stay the same, so recorded rounds and compiled programs run with the new weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from toolkit.targets.fixed_linear import FixedLinear
from toolkit.targets.target import Target
from toolkit.weights import WeightsError, check_fits


def check_weights(module: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise `WeightsError`, with all names, unless `tensors` has a value for every weight of `module`: those of its
    state dict before it was packed or quantised. where: names the source of the tensors in the error."""
    wanted = _weights(module)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            what = "a tensor without values (meta)" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise WeightsError(f"{where}: {name} is {what}; a tensor with values is needed")
    check_fits({name: _shape(one) for name, one in wanted.items()}, tensors, where, module)
    other = [
        f"{name} {tensors[name].dtype}" for name, one in wanted.items() if not _takes_dtype(one, tensors[name].dtype)
    ]
    if other:
        raise WeightsError(
            f"{where} does not fit {type(module).__name__}: dtype of {', '.join(other)}; give the weights unquantised, "
            "in float32, bfloat16 or float16"
        )


@torch.no_grad()
def copy_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy checked `tensors` into `module`, in the dtype and format of each of its weights.

    They are moved to the weights' devices first, so that one that cannot be moved changes nothing. Memory: a copy of
    those on another device or of another dtype.
    """
    wanted = _weights(module)
    moved = {name: _moved_to(tensors[name], one) for name, one in wanted.items()}
    for name, one in wanted.items():
        if isinstance(one, Tensor):
            one.copy_(moved[name])
    for name, one in wanted.items():  # after their biases
        if isinstance(one, FixedLinear):
            one.set_weight(moved[name])


def _moved_to(given: Tensor, weight: Tensor | FixedLinear) -> Tensor:
    """`given` on the device of `weight`, and in its dtype, which a packed or quantised one chooses itself."""
    if isinstance(weight, FixedLinear):
        return given.to(next(weight.buffers()).device)
    return given.to(weight.device, weight.dtype)


def with_tied(target: Target, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """`tensors` with every name of the target's tied weights, of which one suffices. Raises `WeightsError` if tied
    weights have different values."""
    found = dict(tensors)
    for one, other in target.model.all_tied_weights_keys.items():
        if one in found and other in found:
            if not torch.equal(found[one], found[other].to(found[one])):
                raise WeightsError(
                    f"{where}: {one} and {other} differ, but {type(target.model).__name__} ties them; give one of them"
                )
        elif one in found or other in found:
            found[one] = found[other] = found[one if one in found else other]
    return found


def _weights(module: nn.Module) -> dict[str, Tensor | FixedLinear]:
    """By name in the state dict of the unpacked module: the tensor itself, or the layer that holds the weight."""
    found: dict[str, Tensor | FixedLinear] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(part, FixedLinear):
            found[f"{prefix}weight"] = part
            if part.bias is not None:
                found[f"{prefix}bias"] = part.bias
        else:
            part._save_to_state_dict(found, prefix, True)  # of this module alone: the tensors, not copies
    return found


def _shape(weight: Tensor | FixedLinear) -> tuple[int, ...]:
    return (weight.out_features, weight.in_features) if isinstance(weight, FixedLinear) else tuple(weight.shape)


def _takes_dtype(weight: Tensor | FixedLinear, given: torch.dtype) -> bool:
    """Whether a copy only rounds. A weight in a quantised format takes its own dtype alone."""
    plain = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if isinstance(weight, Tensor) and weight.dtype not in plain:
        return given == weight.dtype
    return given in plain
