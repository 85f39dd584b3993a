"""The int8 layer is a float layer of rounded weights, and a row's result does not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.infer.cpu import int8_linear
from toolkit.infer.cpu.int8_linear import DTYPES, Int8Linear

# Widths that no vector register divides too.
SIZES = [(33, 7), (64, 24), (576, 192)]


@pytest.fixture(autouse=True)
def torch_products(monkeypatch):
    """By PyTorch's products, also where our own take the layer (see test_blocked_product.py)."""
    monkeypatch.setattr(int8_linear, "takes", lambda _weight: False)


def build(width: int, outputs: int, dtype: torch.dtype, bias: bool = True) -> Int8Linear:
    torch.manual_seed(0)
    return Int8Linear(nn.Linear(width, outputs, bias=bias).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "outputs"), SIZES)
def test_equals_a_float_layer_of_the_same_weights(width, outputs, dtype):
    """To the rounding of the dtype; an outlier of 100 in a row must not drown the rest of it."""
    layer = build(width, outputs, dtype)
    inputs = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs[0, 1, 3] = 100.0
    exact = inputs.double() @ (layer.qweight.double() * layer.scale.double()[:, None]).T + layer.bias.double()
    got = layer(inputs)
    assert got.dtype == dtype and got.shape == (2, 5, outputs)
    error = ((got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


def test_weights_are_rounded_to_the_nearest_of_255():
    linear = nn.Linear(64, 8)
    error = (Int8Linear(linear).weight - linear.weight).abs()
    assert (error <= 0.501 * linear.weight.abs().amax(1, keepdim=True) / 127).all()


@pytest.mark.parametrize("width", [33, 576])
def test_a_row_does_not_depend_on_its_neighbours(width):
    """Bit for bit in fp32: a verify step must say what a plain step says. A step per tensor would fail by 1e-3."""
    layer = build(width, 40, torch.float32)
    rows = torch.randn(33, width, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 33)[:, None]
    whole = layer(rows)
    for first, count in [(0, 1), (32, 1), (5, 4), (7, 16), (0, 32)]:
        assert torch.equal(layer(rows[first : first + count]), whole[first : first + count])


def test_no_rows():
    assert build(64, 8, torch.float32)(torch.zeros(1, 0, 64)).shape == (1, 0, 8)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        Int8Linear(nn.Linear(8, 8).half())
