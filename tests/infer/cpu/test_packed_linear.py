"""Linear layers whose weights are kept as products of few rows read them."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.heads.eagle3 import OutputMatrix
from toolkit.infer.cpu import packed_linear
from toolkit.infer.cpu.joined_linear import SharedInput
from toolkit.infer.cpu.packed_linear import PackedLinear, pack_linears
from toolkit.targets.target import Target


@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
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


def test_a_product_that_differs_is_not_taken(monkeypatch):
    """A CPU or a torch whose packed products are wrong costs speed, never tokens."""
    model = nn.Sequential(nn.Linear(8, 8))
    monkeypatch.setattr(
        packed_linear, "_pack", lambda weight: torch.ops.mkldnn._reorder_linear_weight(-weight.detach())
    )
    assert pack_linears(model) == 0 and type(model[0]) is nn.Linear
    monkeypatch.setattr(packed_linear, "_available", lambda: False)
    assert pack_linears(model) == 0


def test_a_packed_target_has_its_weights_and_bits(tiny_target: Target):
    """A tied output matrix is there twice, but a step reads it once: bits a weight are those of the dtype."""
    target = copy.deepcopy(tiny_target)
    bits, rows = target.weight_bits, tiny_target.lm_head.weight[3:5].clone()
    ids = torch.arange(3, 40)[None]
    expected = tiny_target.model(ids).logits
    target.__dict__.pop("weight_bits")
    target.pack()
    assert isinstance(target.lm_head, PackedLinear) and torch.equal(target.lm_head.weight[3:5], rows)
    assert target.weight_bits == pytest.approx(bits)
    with torch.inference_mode():
        torch.testing.assert_close(target.model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_layers_that_read_the_same_input_share_one_product():
    """Another tensor for k than for q, the same tensor again with other numbers, biases: each layer's own result."""
    torch.manual_seed(0)
    for bias in (False, True):
        block = nn.Module()
        for name, outputs in (("q_proj", 24), ("k_proj", 8), ("v_proj", 8)):
            block.add_module(name, nn.Linear(16, outputs, bias=bias))
        before = copy.deepcopy(block)
        assert pack_linears(block) == 3
        q, k, v = block.q_proj, block.k_proj, block.v_proj
        assert q.packed is k.packed is v.packed and torch.equal(k.weight, before.k_proj.weight)
        x, other = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
        with torch.inference_mode():
            for _ in range(2):
                for inputs in ((x, x, x), (x, other, x), (x, x, other)):
                    got = [layer(each) for layer, each in zip((q, k, v), inputs, strict=True)]
                    wanted = [
                        layer(each)
                        for layer, each in zip((before.q_proj, before.k_proj, before.v_proj), inputs, strict=True)
                    ]
                    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
                q(x), k(x), v(x)  # all have read it: what is written to it next is seen
                x.mul_(-2)


def test_threads_that_share_an_input_never_get_anothers():
    """One thread asks while another is between knowing an input and having made what is needed of it."""
    slow, go = threading.Event(), threading.Event()

    def make(inputs: torch.Tensor) -> torch.Tensor:
        if inputs[0] == 2:
            slow.set()
            go.wait(10)
        return inputs * 10

    shared, first, second = SharedInput(2, make), nn.Identity(), nn.Identity()
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    shared.take(one, first)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(shared.take(two, first)))
    thread.start()
    assert slow.wait(10)
    go.set()
    assert shared.take(two, second).item() == 20
    thread.join()
    assert found[0].item() == 20 and shared.take(one, second).item() == 10


def test_a_joint_product_that_differs_is_not_taken(monkeypatch):
    block = nn.ModuleDict({name: nn.Linear(16, 8) for name in ("gate_proj", "up_proj")})
    before, pack = copy.deepcopy(block), packed_linear._pack
    monkeypatch.setattr(packed_linear, "_pack", lambda weight: pack(weight if len(weight) == 8 else weight.flip(0)))
    assert pack_linears(block) == 2 and block["gate_proj"].packed is not block["up_proj"].packed
    x = torch.randn(3, 16)
    torch.testing.assert_close(block["up_proj"](x), before["up_proj"](x), rtol=1e-4, atol=1e-5)
