"""A linear layer for inference only, whose weight is packed for this CPU or quantised.

Such a weight is not a parameter and not in the state dict. So copying, saving and loading raise an error here; torch
would drop the weights silently or fail inside.

And new weights for a model that an engine has opened: copied in place, also into packed and quantised layers, so that
recorded rounds and compiled programs run with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from toolkit.errors import TargetError
from toolkit.weights import WeightsError, check_fits


class FixedLinear(nn.Module, ABC):
    """Base class of linear layers for inference that cannot be copied, pickled, saved, or loaded into.

    quantization: the format of a quantised weight, or None. batch_invariant: whether a row of `product` has the same
    bits whatever rows are beside it. Shapes: K = in_features, N = out_features.
    """

    quantization: str | None = None
    batch_invariant = False

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The weight [N, K] of the equivalent plain layer; may be computed at every call."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight; 0 if the weight is also a parameter of the model and counted there."""

    @abstractmethod
    def product(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the inputs' dtype, with the bias added."""

    @abstractmethod
    def set_weight(self, weight: Tensor) -> None:
        """Replace the weight by `weight` [N, K] of any float dtype, packed or quantised as the first one was.

        `bias` has its new values already. What a compiled program reads keeps its address."""

    @abstractmethod
    def like(self, linear: nn.Linear) -> nn.Module:
        """`linear` packed or quantised in the same way as this layer."""

    def forward(self, inputs: Tensor, project: Callable[[Tensor, Tensor], Any] = F.linear) -> Any:
        """`product`; another `project` is called with the plain weight (see `OutputMatrix`)."""
        return self.product(inputs) if project is F.linear else project(inputs, self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def __reduce_ex__(self, protocol: Any) -> Any:  # called by copy, deepcopy and pickle
        raise self._refusal("copied or pickled")

    def _save_to_state_dict(self, *given: Any, **named: Any) -> None:
        raise self._refusal("saved")

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        raise self._refusal("loaded into")

    def _refusal(self, what: str) -> TargetError:
        return TargetError(
            f"a model with a {type(self).__name__} ({self.extra_repr()}) cannot be {what}: its weights are packed for "
            "this CPU or quantised. Load the target again without quantization, and copy or save it before an engine "
            "opens it (the engine packs the weights)"
        )


def quantization_of(model: nn.Module) -> str | None:
    """The format of the quantised linear layers of a draft head; None if there are none."""
    linears = (module for module in model.modules() if isinstance(module, FixedLinear))
    return next((module.quantization for module in linears if module.quantization is not None), None)


def linear_rows(weight: Tensor, bias: Tensor | None, ids: Tensor) -> nn.Linear:
    """A plain layer with the rows `ids` [M] of weight [N, K] and bias [N]."""
    rows = nn.Linear(weight.shape[1], len(ids), bias is not None, device="meta").requires_grad_(False)
    rows.weight = nn.Parameter(weight[ids], requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias[ids], requires_grad=False)
    return rows


def check_weights(module: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise `WeightsError`, with all names, unless `tensors` has a value for every weight of `module`: those of its
    state dict before it was packed or quantised. where: names the source of the tensors in the error."""
    wanted = weights_of(module)
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
    wanted = weights_of(module)
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


def with_tied(model: PreTrainedModel, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """`tensors` with every name of the model's tied weights, of which one suffices. Raises `WeightsError` if tied
    weights have different values."""
    found = dict(tensors)
    for one, other in model.all_tied_weights_keys.items():
        if one in found and other in found:
            if not torch.equal(found[one], found[other].to(found[one])):
                raise WeightsError(
                    f"{where}: {one} and {other} differ, but {type(model).__name__} ties them; give one of them"
                )
        elif one in found or other in found:
            found[one] = found[other] = found[one if one in found else other]
    return found


def weights_of(module: nn.Module) -> dict[str, Tensor | FixedLinear]:
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
