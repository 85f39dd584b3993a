"""The int8 layer is a float layer of rounded weights, and a row's result does not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.infer.cpu import int8_linear
from toolkit.infer.cpu.int8_linear import PLANES, Int8Linear, integer_product, planes_of, split_planes
from toolkit.infer.cpu.joined_linear import SharedInput

# Widths that no vector register divides, and numbers of rows on both sides of the switch of kernels.
SIZES = [(33, 7), (64, 24), (576, 192)]


@pytest.fixture(autouse=True)
def integers(monkeypatch):
    """By integer products, also where there are others (see test_blocked_product.py)."""
    monkeypatch.setattr(int8_linear, "takes", lambda _weight: False)


def build(width: int, outputs: int, dtype: torch.dtype, bias: bool = True) -> Int8Linear:
    torch.manual_seed(0)
    return Int8Linear(nn.Linear(width, outputs, bias=bias).to(dtype))


@pytest.mark.parametrize("planes", [2, 3])
def test_planes_hold_the_row_to_half_a_step(planes):
    """The largest value of either sign, zeros, and a row a million times smaller; a wrong carry is off by 256 steps.

    Steps of 24 bits are as fine as fp32 itself, whose division adds half a step.
    """
    rows = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    rows[0], rows[1, 3], rows[2, 4] = 0.0, 50.0, -50.0
    rows[3] *= 1e-6
    digits, step = split_planes(rows, planes)
    number = sum(digits.view(planes, 9, 40)[place].double() * 256**place for place in range(planes))
    error = (number * step.double() - rows.double()).abs() / step.double()
    assert error.max() <= (0.51 if planes == 2 else 1.01)
    assert number.abs().max() == 127 * 256 ** (planes - 1)


@pytest.mark.parametrize("dtype", list(PLANES))
@pytest.mark.parametrize(("width", "outputs"), SIZES)
@pytest.mark.parametrize("direct", [0, int8_linear.DIRECT_PRODUCTS])
def test_equals_a_float_layer_of_the_same_weights(width, outputs, dtype, direct, monkeypatch):
    """Both kernels, to the rounding of the dtype; an outlier of 100 in a row must not drown the rest of it."""
    monkeypatch.setattr(int8_linear, "DIRECT_PRODUCTS", direct)
    layer = build(width, outputs, dtype)
    inputs = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs[0, 1, 3] = 100.0
    exact = inputs.double() @ (layer.qweight.double() * layer.scale.double()[:, None]).T + layer.bias.double()
    got = layer(inputs)
    assert got.dtype == dtype and got.shape == (2, 5, outputs)
    error = ((got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


def test_tiles_are_put_together_in_order(monkeypatch):
    """The last tile is shorter than the others."""
    layer = build(64, 70, torch.float32)
    rows = torch.randn(9, 64)
    whole = layer(rows)
    monkeypatch.setattr(int8_linear, "TILE_SUMS", 1)
    monkeypatch.setattr(int8_linear, "LEAST_TILE", 16)
    assert torch.equal(layer(rows), whole)


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


@pytest.mark.parametrize("dtype", list(PLANES))
@pytest.mark.parametrize("rows", [8, 16, 60])
def test_layers_with_one_input_split_it_once(dtype, rows, monkeypatch):
    """The results are those of each layer alone, also when the same tensor comes again with other numbers in it, or
    when only some of the layers read it; a prompt's planes are let go."""
    layers = [build(576, outputs, dtype, bias=False) for outputs in (576, 192, 192)]
    alone = [build(576, outputs, dtype, bias=False) for outputs in (576, 192, 192)]
    shared = SharedInput(len(layers), planes_of)
    for layer in layers:
        layer.shared = shared
    made = []
    monkeypatch.setattr(int8_linear, "DIRECT_PRODUCTS", 4_000_000 if rows > 8 else 0)
    split = int8_linear.split_planes
    monkeypatch.setattr(int8_linear, "split_planes", lambda *given: made.append(1) or split(*given))
    inputs = torch.randn(1, rows, 576, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = [layer(inputs) for layer in layers]
    assert len(made) == 1 and shared._known is None
    wanted = [integer_product(inputs[0], layer.qweight, layer.scale)[None] for layer in alone]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    layers[0](inputs)
    inputs.mul_(2)
    again = layers[0](inputs)
    assert torch.equal(again, integer_product(inputs[0], alone[0].qweight, alone[0].scale)[None])
    assert not torch.equal(again, got[0])
