"""Linear layers that read the same input one after the other, as q, k and v do: what they need of it is made once.

Shapes: K input features, N output features.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from toolkit.targets.fixed_linear import FixedLinear

# Layers of one module that its forward gives the same tensor, one after the other.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

T = TypeVar("T")
Layer = TypeVar("Layer", bound=nn.Module)


@dataclass
class _Known(Generic[T]):
    """An input, what was made of it, and who has read that."""

    inputs: weakref.ref[Tensor]
    made: T
    readers: set[int] = field(default_factory=set)


class SharedInput(Generic[T]):
    """make: what every one of `readers` layers needs of an input [..., K].

    An input is known by its identity, until every layer has read it, or one of them reads again: nobody may write to it
    between the first layer and the last. Threads that share a model may make something twice, never another's.
    """

    def __init__(self, readers: int, make: Callable[[Tensor], T]) -> None:
        self._readers, self._make = readers, make
        self._known: _Known[T] | None = None

    def holds(self, inputs: Tensor, reader: nn.Module) -> bool:
        """Whether another layer has made what this one needs."""
        return self._found(inputs, reader) is not None

    def take(self, inputs: Tensor, reader: nn.Module) -> T:
        """`make(inputs)`, or what another layer made of them."""
        known = self._found(inputs, reader)
        if known is None:
            known = self._known = _Known(weakref.ref(inputs), self._make(inputs))
        known.readers.add(id(reader))
        if len(known.readers) == self._readers and self._known is known:  # of a long prompt it is megabytes
            self._known = None
        return known.made

    def _found(self, inputs: Tensor, reader: nn.Module) -> _Known[T] | None:
        known = self._known  # read once: another thread may replace it
        if known is None or known.inputs() is not inputs or id(reader) in known.readers:
            return None
        return known


class JoinedLinear(FixedLinear, ABC):
    """A linear layer for inference whose weight can lie together with those of layers that read the same input.

    One large product is faster than several small ones. `product`, a subclass's, multiplies by all that lies together.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.rows = slice(0, self.out_features)  # its own, of all that lie together
        self._products: SharedInput[Tensor] | None = None

    @abstractmethod
    def product(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N of all layers that lie together], biases added."""

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the inputs' dtype."""
        if self._products is None:
            return self.product(inputs)
        # A traced program cannot know an input again; equal products are merged in its graph.
        tracing = torch.compiler.is_exporting()
        return (self.product(inputs) if tracing else self._products.take(inputs, self))[..., self.rows]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def join(layers: Sequence[JoinedLinear]) -> None:
    """Layers that all hold the same weight, of which each owns the next rows: their product is made once an input."""
    products, first = SharedInput(len(layers), layers[0].product), 0
    for layer in layers:
        layer._products, layer.rows = products, slice(first, first + layer.out_features)
        first += layer.out_features


def biases_of(linears: Sequence[nn.Linear] | Sequence[JoinedLinear]) -> Tensor | None:
    """The biases below each other; None where there are none. All or none of the layers have one."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return torch.cat(biases) if biases else None


def same_input_layers(parent: nn.Module, kind: type[Layer]) -> list[list[Layer]]:
    """The groups of SAME_INPUT that `parent` has: of that very class, as wide, all or none with a bias."""
    groups = []
    for names in SAME_INPUT:
        layers = [getattr(parent, name, None) for name in names]
        found = [layer for layer in layers if type(layer) is kind]
        if len(found) == len(names) and len({(layer.in_features, layer.bias is None) for layer in found}) == 1:
            groups.append(found)
    return groups
