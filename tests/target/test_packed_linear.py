"""Linear layers whose weights are kept as products of few rows read them."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.models.eagle3 import OutputMatrix
from toolkit.target import packed_linear
from toolkit.target.packed_linear import PackedLinear, pack_linears
from toolkit.target.shared_input import SharedInput
from toolkit.target.target import Target


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


@pytest.fixture
def fast_float32(monkeypatch):
    """A CPU that multiplies float32 faster, with memory enough."""
    monkeypatch.setattr(packed_linear, "float32_speedup", lambda: 1.6)


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_of_bfloat16_are_multiplied_in_float32(fast_float32, bias):
    """The sums of the bfloat16 product, rounded once: a row's result is the exact sum's, whatever its company."""
    torch.manual_seed(0)
    block = nn.ModuleDict({name: nn.Linear(96, 24, bias=bias) for name in ("gate_proj", "up_proj")}).bfloat16()
    before = copy.deepcopy(block)
    assert pack_linears(block) == 2
    gate, up = block["gate_proj"], block["up_proj"]
    assert gate.packed_float32 is up.packed_float32 and gate.packed_float32.dtype == torch.float32
    x = torch.randn(3, packed_linear.MANY_ROWS, 96).bfloat16()
    taken = []
    product = packed_linear.packed_product
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(packed_linear, "packed_product", lambda *args: taken.append(args[0].dtype) or product(*args))
        for inputs in (x, x[0], x[0, 1:]):
            got, exact = up(inputs), before["up_proj"].double()(inputs.double())
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-6)  # half a unit in the last place
    assert taken == [torch.float32, torch.float32, torch.bfloat16], "63 rows are few"


@pytest.mark.parametrize("why", ["slow", "memory", "dtype", "wrong"])
def test_no_float32_copy_where_it_does_not_pay(fast_float32, monkeypatch, why):
    layer = nn.Sequential(nn.Linear(32, 64, bias=False))
    if why == "slow":
        monkeypatch.setattr(packed_linear, "float32_speedup", lambda: 1.2)
    if why == "memory":
        monkeypatch.setattr(packed_linear, "usable_memory", lambda: 8 * 4 * 32 * 64 - 1)
    if why == "wrong":
        pack = packed_linear._pack
        monkeypatch.setattr(
            packed_linear, "_pack", lambda weight: pack(-weight if weight.dtype == torch.float32 else weight)
        )
    assert pack_linears(layer if why == "dtype" else layer.bfloat16()) == 1
    assert layer[0].packed_float32 is None


def test_the_log_says_what_was_made(fast_float32, monkeypatch, caplog):
    """A copy that was refused takes no memory."""
    model = nn.ModuleDict({name: nn.Linear(width, 512, bias=False) for name, width in (("a", 512), ("b", 1024))})
    pack = packed_linear._pack
    wrong = lambda weight: weight.dtype == torch.float32 and weight.shape[1] == 1024  # noqa: E731
    monkeypatch.setattr(packed_linear, "_pack", lambda weight: pack(-weight if wrong(weight) else weight))
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="toolkit"):
        assert pack_linears(model.bfloat16()) == 2
    assert model["a"].packed_float32 is not None and model["b"].packed_float32 is None
    assert "that takes 1 MB" in caplog.text
