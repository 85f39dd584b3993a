"""The int4 layer is a float layer of rounded weights, and a row's result does not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.errors import TargetError
from toolkit.infer.cpu import quantize
from toolkit.infer.cpu.int4_linear import GROUP, Int4Linear, round_to_levels, takes_int4
from toolkit.targets.target import weight_bits


def exact_weight(linear: nn.Linear) -> torch.Tensor:
    """(level - 8) * step + middle in double, from the definition."""
    levels, steps = round_to_levels(linear.weight.detach())
    step, middle = (x.double().t().repeat_interleave(GROUP, dim=1) for x in steps.unbind(-1))
    return (levels.double() - 8) * step + middle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_a_float_layer_of_the_same_weights(dtype, bias):
    torch.manual_seed(0)
    linear = nn.Linear(96, 48, bias=bias).to(dtype)
    layer, exact = Int4Linear(linear), exact_weight(linear)
    inputs = torch.randn(2, 5, 96).to(dtype)
    wanted = inputs.double() @ exact.T + (linear.bias.double() if bias else 0.0)
    got = layer(inputs)
    assert got.dtype == dtype and got.shape == (2, 5, 48)
    assert ((got.double() - wanted).norm() / wanted.norm()).item() < (1e-6 if dtype == torch.float32 else 1e-2)
    torch.testing.assert_close(layer.weight.double(), exact, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_weights_are_rounded_to_the_nearest_of_16():
    """A group of equal weights too, whose step is next to nothing."""
    linear = nn.Linear(2 * GROUP, 16)
    linear.weight.data[3, :GROUP] = 0.25
    layer = Int4Linear(linear)
    groups = linear.weight.detach().unflatten(1, (-1, GROUP))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (layer.weight - linear.weight).detach().abs().unflatten(1, (-1, GROUP))
    assert (error <= 0.51 * step[..., None] + 1e-6).all() and error.max() > 0


def test_a_row_does_not_depend_on_its_neighbours():
    """Bit for bit, in both dtypes: a verify step must say what a plain step says."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = Int4Linear(nn.Linear(576, 48).to(dtype))
        rows = (torch.randn(33, 576) * torch.logspace(-3, 3, 33)[:, None]).to(dtype)
        whole = layer(rows)
        assert all(torch.equal(layer(rows[i : i + n]), whole[i : i + n]) for n in (1, 2, 5, 16) for i in (0, 3, 17))


def test_sizes_that_the_kernel_does_not_take_become_int8(tiny_target_directory):
    """The output matrix too; and bits a weight count half a byte, a step and a middle."""
    assert takes_int4(nn.Linear(32, 16))
    assert not takes_int4(nn.Linear(32, 24)) and not takes_int4(nn.Linear(48, 16))
    model = nn.Sequential(*(Int4Linear(nn.Linear(64, 32, bias=False)) for _ in range(2)))
    model.get_output_embeddings, model.config = lambda: None, None
    assert weight_bits(model) == pytest.approx(4 + 2 * 32 / GROUP)


def test_a_kernel_that_is_wrong_or_missing_is_found(monkeypatch):
    monkeypatch.setattr(quantize, "int4_product", lambda rows, levels, steps: torch.ones(5, 48))
    with pytest.raises(TargetError, match="take quantization int8"):
        quantize.check_int4_products(torch.bfloat16)

    def missing(*_given):
        raise NotImplementedError

    monkeypatch.setattr(quantize, "int4_product", missing)
    with pytest.raises(TargetError, match="int4 weights are missing or wrong"):
        quantize.check_int4_products(torch.bfloat16)
