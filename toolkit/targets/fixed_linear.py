"""A linear layer for inference only, whose weight is packed for this CPU or quantised.

Such a weight is not a parameter and not in the state dict. So copying, saving and loading raise an error here; torch
would drop the weights silently or fail inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.errors import TargetError


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

    def rows_of(self, ids: Tensor) -> nn.Module:
        """A layer with only the output rows ids [M]: [..., K] -> [..., M]."""
        return self.like(linear_rows(self.weight, self.bias, ids))

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
