"""Layers that read the same input share one product."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from toolkit.infer.cpu import joined_product
from toolkit.infer.cpu.blocked_product import available
from toolkit.infer.cpu.int8_linear import Int8Linear
from toolkit.infer.cpu.joined_product import join_products
from toolkit.infer.cpu.packed_linear import PackedLinear

pytestmark = pytest.mark.skipif(not available(), reason="this CPU has no products with blocked weights")

SIZES = {"q_proj": 64, "k_proj": 32, "v_proj": 32}


def attention(kind: type[nn.Module], bias: bool, sizes: dict[str, int] = SIZES) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Module()
    for name, outputs in sizes.items():
        block.add_module(name, kind(nn.Linear(16, outputs, bias=bias, dtype=torch.bfloat16)))
    return block


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_return_what_each_returns_alone(kind, bias):
    """Same input, another input for one layer, and the same tensor after a write to it: bitwise as without joining."""
    apart, together = attention(kind, bias), attention(kind, bias)
    join_products(together)
    pairs = [(apart.get_submodule(name), together.get_submodule(name)) for name in SIZES]
    assert all(two.joined is not None and torch.equal(one.weight, two.weight) for one, two in pairs)
    x, other = torch.randn(2, 3, 16).bfloat16(), torch.randn(2, 3, 16).bfloat16()
    with torch.inference_mode():
        for _ in range(2):
            for inputs in ((x, x, x), (x, other, x), (x, x, other), (other, x, x)):
                for (one, two), given in zip(pairs, inputs, strict=True):
                    assert torch.equal(one(given), two(given))
            x.mul_(-2)


def test_the_product_is_computed_once_and_not_kept(monkeypatch):
    """Counts the products; after the last layer nothing of them stays in memory."""
    calls = []
    product = joined_product.blocked_product
    monkeypatch.setattr(joined_product, "blocked_product", lambda *args: calls.append(args[-1]) or product(*args))
    block = attention(PackedLinear, bias=False)
    join_products(block)
    x = torch.randn(1, 16).bfloat16()
    for name in SIZES:
        block.get_submodule(name)(x)
    assert calls == [128] and block.q_proj.joined._known is None


def test_layers_of_partial_blocks_or_other_names_stay_apart():
    uneven = attention(PackedLinear, bias=False, sizes={**SIZES, "k_proj": 24})
    unnamed = attention(PackedLinear, bias=False, sizes={"q_proj": 32, "k_proj": 32})
    for block in (uneven, unnamed):
        join_products(block)
        assert all(layer.joined is None for layer in block.children())


def test_threads_never_take_each_others_product():
    """Two threads run the layers on inputs of their own, a thousand times."""
    block, apart = attention(PackedLinear, bias=False), attention(PackedLinear, bias=False)
    join_products(block)
    wrong = []

    def work(seed: int) -> None:
        x = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        wanted = [layer(x) for layer in apart.children()]
        for _ in range(1000):
            got = [layer(x) for layer in block.children()]
            wrong.extend(1 for one, two in zip(got, wanted, strict=True) if not torch.equal(one, two))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
