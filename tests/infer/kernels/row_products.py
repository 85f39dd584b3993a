"""Triton's interpreter with products that treat all rows of a tile alike, as tensor cores do.

It multiplies by numpy's library, where the bits of a row depend on its place in the tile. Here each number is a sum in
ascending order of the inputs, so that rows can be compared to the bit, and a key at another place of a block shows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch


def row_products() -> AbstractContextManager[Any]:
    """Context manager, for fp32 factors."""
    from triton.runtime.interpreter import InterpreterBuilder

    def create_dot(_builder: Any, a: Any, b: Any, sums: Any, _precision: Any, _most_imprecise: int) -> Any:
        total = sums.data * 0
        for number in range(a.data.shape[1]):
            total = total + a.data[:, number, None] * b.data[None, number]
        return type(sums)(sums.data + total, sums.dtype)

    return patch.object(InterpreterBuilder, "create_dot", create_dot)
