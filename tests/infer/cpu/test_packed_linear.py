"""Linear layers whose weights are kept as products of few rows read them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.errors import TargetError
from toolkit.heads.eagle3 import OutputMatrix
from toolkit.infer.cpu.packed_linear import PackedLinear, pack_linears
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.targets.target import Target


@pytest.mark.parametrize("dtype, allowed, bias", [(torch.float32, 1e-5, True), (torch.bfloat16, 2e-2, False)])
def test_a_packed_layer_says_what_the_layer_said(dtype, allowed, bias):
    """At every number of rows, for rows that lie apart in memory, and for none."""
    torch.manual_seed(0)
    linear = nn.Linear(72, 40, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    assert torch.equal(packed.weight, linear.weight) and (packed.in_features, packed.out_features) == (72, 40)
    with torch.inference_mode():
        for rows in (1, 2, 5, 16, 130):
            x = torch.randn(rows, 144).to(dtype)[:, :72]
            torch.testing.assert_close(packed(x), linear(x), rtol=allowed, atol=allowed)
        assert packed(x[:0]).shape == (0, 40)
        assert packed(x[None]).shape == (1, 130, 40)


def test_a_model_is_packed_but_for_what_is_more_than_a_product():
    """A subclass may do anything in its forward; the output matrix of a head keeps its product from outside."""

    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Doubling(8, 8), "lm_head": OutputMatrix(8, 12, bias=False)})
    before = copy.deepcopy(model)
    assert pack_linears(model) == 2
    assert [type(model[name]).__name__ for name in ("a", "b", "lm_head")] == [
        "PackedLinear",
        "Doubling",
        "PackedLinear",
    ]
    x = torch.randn(3, 8)
    with torch.inference_mode():
        torch.testing.assert_close(model["lm_head"](x, F.linear), before["lm_head"](x))
        assert torch.equal(model["lm_head"](x, lambda rows, weight: weight), before["lm_head"].weight)


def test_a_packed_target_has_its_weights_and_bits(tiny_target: Target):
    """A tied output matrix is there twice, but a step reads it once: bits a weight are those of the dtype."""
    target = copy.deepcopy(tiny_target)
    bits, rows = target.weight_bits, tiny_target.lm_head.weight[3:5].clone()
    ids = torch.arange(3, 40)[None]
    expected = tiny_target.model(ids).logits
    pack(target)
    assert isinstance(target.lm_head, PackedLinear) and torch.equal(target.lm_head.weight[3:5], rows)
    assert target.weight_bits == pytest.approx(bits)
    with torch.inference_mode():
        torch.testing.assert_close(target.model(ids).logits, expected, rtol=1e-4, atol=1e-4)


LAYERS = {None: "PackedLinear", "int8": "Int8Linear"}


@pytest.mark.parametrize("quantization", LAYERS)
def test_a_fixed_model_is_neither_copied_nor_saved(tiny_target_directory, tmp_path, quantization):
    """Its weights are not in the state dict, so a saved file would silently lack them."""
    target = load_target(tiny_target_directory, quantization=quantization)
    pack(target)
    model = target.model
    for what, act in (
        ("copied or pickled", lambda: copy.deepcopy(model)),
        ("copied or pickled", lambda: pickle.dumps(model)),
        ("saved", lambda: model.state_dict()),
        ("saved", lambda: model.save_pretrained(tmp_path / "out")),
        ("loaded into", lambda: model.load_state_dict({})),
    ):
        says = rf"a {LAYERS[quantization]} \(in_features=.*\) cannot be {what}: .* Load the target again"
        with pytest.raises(TargetError, match=says):
            act()
    assert not list(tmp_path.glob("out/*.safetensors"))
