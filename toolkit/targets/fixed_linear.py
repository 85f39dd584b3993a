"""A linear layer whose weight has a form that only multiplies: packed for this CPU, or quantised.

Such a weight cannot be written to a file or copied. Without the refusals below a model would lose its weights silently
(they are no parameters and stand in no state dict), or fail inside torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.targets.errors import TargetError


class FixedLinear(nn.Module, ABC):
    """Base of linear layers for inference that cannot be copied, pickled, saved, or loaded into.

    quantization: how the weight is rounded; None: it is not. Shapes: K = in_features, N = out_features.
    """

    quantization: str | None = None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """[N, K] as a plain layer would hold it; may be computed at every call."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight; 0 where the weight is also a parameter of the model, which holds the bytes."""

    @abstractmethod
    def product(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the inputs' dtype, with the bias added."""

    @abstractmethod
    def like(self, linear: nn.Linear) -> nn.Module:
        """Another layer in this layer's form: packed or quantised in the same way."""

    def forward(self, inputs: Tensor, project: Callable[[Tensor, Tensor], Any] = F.linear) -> Any:
        """`product`. A product that is handed in gets the plain weight (see `OutputMatrix`)."""
        return self.product(inputs) if project is F.linear else project(inputs, self.weight)

    def rows_of(self, ids: Tensor) -> nn.Module:
        """A layer of these output rows alone; ids [M] -> [..., K] -> [..., M]."""
        return self.like(linear_rows(self.weight, self.bias, ids))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def __reduce_ex__(self, protocol: Any) -> Any:  # what copy, deepcopy and pickle ask
        raise self._refusal("copied or pickled")

    def _save_to_state_dict(self, *given: Any, **named: Any) -> None:
        raise self._refusal("saved")

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        raise self._refusal("loaded into")

    def _refusal(self, what: str) -> TargetError:
        return TargetError(
            f"a model with a {type(self).__name__} ({self.extra_repr()}) cannot be {what}: its weights are packed for "
            "this CPU or quantised. Load the target anew without a quantization, and copy or save it before it is "
            "packed (loading a target does not pack it; opening an engine does)"
        )


def is_int8(model: nn.Module) -> bool:
    """Whether layers of `model` have int8 weights."""
    return any(isinstance(module, FixedLinear) and module.quantization == "int8" for module in model.modules())


def linear_rows(weight: Tensor, bias: Tensor | None, ids: Tensor) -> nn.Linear:
    """A plain layer of the rows `ids` [M] of weight [N, K] and bias [N]."""
    rows = nn.Linear(weight.shape[1], len(ids), bias is not None, device="meta").requires_grad_(False)
    rows.weight = nn.Parameter(weight[ids], requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias[ids], requires_grad=False)
    return rows
