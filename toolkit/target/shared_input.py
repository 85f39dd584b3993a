"""Linear layers that read the same input one after the other, as q, k and v do: what they need of it is made once.

Shapes: K input features.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor, nn

# Layers of one module that its forward gives the same tensor, one after the other.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

T = TypeVar("T")
Layer = TypeVar("Layer", bound=nn.Module)


class SharedInput(Generic[T]):
    """make: what every one of `readers` layers needs of an input [..., K].

    An input is known by its identity, until every layer has read it, or one of them reads again.
    """

    def __init__(self, readers: int, make: Callable[[Tensor], T]) -> None:
        self._readers, self._make = readers, make
        self._inputs: weakref.ref[Tensor] | None = None
        self._made: T | None = None
        self._read: set[int] = set()

    def holds(self, inputs: Tensor, reader: nn.Module) -> bool:
        """Whether another layer has made what this one needs."""
        return self._inputs is not None and self._inputs() is inputs and id(reader) not in self._read

    def take(self, inputs: Tensor, reader: nn.Module) -> T:
        """`make(inputs)`, or what another layer made of them."""
        if not self.holds(inputs, reader):
            self._inputs, self._read = weakref.ref(inputs), set()
            self._made = self._make(inputs)
        made = self._made
        assert made is not None, "an input is known without what was made of it"
        self._read.add(id(reader))
        if len(self._read) == self._readers:  # of a long prompt it is megabytes
            self._inputs = self._made = None
        return made


def same_input_layers(parent: nn.Module, kind: type[Layer]) -> list[list[Layer]]:
    """The groups of SAME_INPUT that `parent` has, all of that very class and with equally many input features."""
    groups = []
    for names in SAME_INPUT:
        layers = [getattr(parent, name, None) for name in names]
        found = [layer for layer in layers if type(layer) is kind]
        if len(found) == len(names) and len({layer.in_features for layer in found}) == 1:
            groups.append(found)
    return groups
