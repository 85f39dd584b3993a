"""Our own products with bfloat16 and int8 weights, compiled for this CPU, and the layers that share one."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.infer.cpu import blocked_product, compile_cpp
from toolkit.infer.cpu.blocked_product import from_blocks, join_products, takes, to_blocks
from toolkit.infer.cpu.int8_linear import Int8Linear
from toolkit.infer.cpu.packed_linear import PackedLinear, pack_linears

only_here = pytest.mark.skipif(
    not compile_cpp.has_vectors() or not compile_cpp.compiler(), reason="needs AVX2 and a C++ compiler"
)


@pytest.fixture
def forgotten():
    """The library is looked for anew, now and by later tests."""
    blocked_product.load_library.cache_clear()
    yield
    blocked_product.load_library.cache_clear()


@pytest.fixture
def taken(forgotten):
    """Where a compiler and the instructions are, so is the product."""
    if not takes(torch.zeros(1, 4, dtype=torch.bfloat16)):
        pytest.fail("the product is not compiled here")


@only_here
@pytest.mark.parametrize("outputs, inputs, bias", [(1, 4, False), (31, 12, True), (97, 160, True)])
def test_a_product_is_the_exact_one_rounded_once(taken, outputs, inputs, bias):
    """For every number of rows up to two tiles and some, for whole and broken blocks, for inputs that AMX divides
    among its tiles and others: within half a unit in the last place of the product in float64 (and what float32 sums
    of so few lose), padding written nowhere."""
    torch.manual_seed(0)
    weight, offset = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16() if bias else None
    blocks = to_blocks(weight)
    assert torch.equal(from_blocks(blocks, outputs), weight)
    for rows in (*range(1, 36), 64, 200, 1025):
        x = torch.randn(rows, inputs).bfloat16()
        exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        got = blocked_product.blocked_product(x, blocks, None, offset, outputs)
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)
    assert blocked_product.blocked_product(x[:0], blocks, None, offset, outputs).shape == (0, outputs)


@only_here
@pytest.mark.parametrize("outputs, inputs", [(31, 12), (97, 160)])
def test_int8_layers_equal_levels_times_scales(taken, outputs, inputs):
    """Levels times scales, with biases, for every number of rows up to a tile and some."""
    torch.manual_seed(0)
    layer = Int8Linear(nn.Linear(inputs, outputs).bfloat16())
    assert layer.blocked and layer.packed.dtype == torch.int8
    weight = from_blocks(layer.packed, outputs).double() * layer.scale.double()[:, None]
    torch.testing.assert_close(layer.weight.double(), weight, rtol=2**-8, atol=0)
    with torch.inference_mode():
        for rows in (*range(1, 20), 64, 1025):
            x = torch.randn(2, rows, inputs).bfloat16()
            got = layer(x)
            torch.testing.assert_close(
                got.double(), F.linear(x.double(), weight, layer.bias.double()), rtol=2**-8, atol=1e-5
            )
            assert torch.equal(layer(x[1:, rows // 2]), got[1:, rows // 2])
            assert torch.equal(layer(x[0]), got[0])  # odd numbers of rows


@only_here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("inputs", [96, 100])
def test_a_rows_result_does_not_depend_on_its_company_or_the_threads(taken, inputs, dtype):
    """Bit for bit: what a step verifies together it would have written alone. (AMX takes 96 inputs, and not 100.)"""
    torch.manual_seed(0)
    weight, x, bias = torch.randn(200, inputs), torch.randn(300, inputs).bfloat16(), torch.randn(200).bfloat16()
    scale = torch.rand(200) if dtype == torch.int8 else None
    blocks, threads = to_blocks((30 * weight).to(dtype)), torch.get_num_threads()

    def product(rows):
        return blocked_product.blocked_product(rows, blocks, scale, bias, 200)

    try:
        torch.set_num_threads(1)
        together = product(x)
        torch.set_num_threads(3)
        assert torch.equal(product(x), together)
    finally:
        torch.set_num_threads(threads)
    for first, last in ((0, 1), (5, 17), (12, 61), (1, 300)):
        part = x[first:last][None].transpose(0, 1).transpose(0, 1)
        assert torch.equal(product(part)[0], together[first:last])


@only_here
def test_infinities_and_nans_stay_what_they_are(taken):
    weight = torch.eye(4, 32, dtype=torch.bfloat16)
    x = torch.tensor([[torch.inf, 1, 2, 3], [torch.nan, 1, 2, 3], [3.39e38, 1, 2, 3]]).bfloat16()
    got = blocked_product.blocked_product(F.pad(x, (0, 28)), to_blocks(weight), None, None, 4)
    assert got[0, 0] == torch.inf and got[1].isnan().all() and got[2, 0] == x[2, 0]


@only_here
@pytest.mark.parametrize("inputs", [96, 100])
def test_int8_weights_take_inputs_of_any_size(taken, inputs):
    """Within the range that blocked_product.cpp states a row times a power of two gives the result times that power."""
    torch.manual_seed(0)
    layer, x = Int8Linear(nn.Linear(inputs, 40, bias=False).bfloat16()), torch.randn(5, inputs).bfloat16()
    with torch.inference_mode():
        for power in (-60, 60):
            assert torch.equal(layer(x * 2.0**power), layer(x) * 2.0**power)
        x[2, 7], x[3, 7] = torch.inf, torch.nan
        got = layer(x)
    wanted = layer.weight[:, 7].sign() * torch.inf  # NaN for a weight of 0
    assert torch.equal(got[2].nan_to_num(0), wanted.nan_to_num(0)) and got[3].isnan().all() and got[:2].isfinite().all()


@only_here
def test_what_the_weights_do_not_take_is_refused(taken):
    """Addresses go to C: a row of another width or dtype would be read beyond its end."""
    whole = ((72, torch.bfloat16), (70, torch.bfloat16), (72, torch.float32))
    assert [takes(torch.zeros(40, inputs, dtype=dtype)) for inputs, dtype in whole] == [True, False, False]
    blocks = to_blocks(torch.zeros(40, 8).bfloat16())
    for x, scale in (
        (torch.zeros(2, 6).bfloat16(), None),
        (torch.zeros(2, 8), None),
        (torch.zeros(2, 8).bfloat16(), torch.ones(40).bfloat16()),
    ):
        with pytest.raises(ValueError, match="these weights take 8 of bfloat16"):
            blocked_product.blocked_product(x, blocks, scale, None, 40)
    weight = torch.randn(8, 64).bfloat16().t()  # columns lie together
    assert torch.equal(from_blocks(to_blocks(weight), 64), weight)


@pytest.mark.parametrize("why", ["no compiler", "broken", "old CPU"])
def test_without_it_products_are_oneDNNs_and_the_log_says_why(forgotten, monkeypatch, tmp_path, caplog, why):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level(logging.INFO, logger="toolkit")
    flags = "sse4_2" if why == "old CPU" else "avx2 fma"
    monkeypatch.setattr(compile_cpp, "cpu_info", lambda: {"flags": flags})
    said = ""
    if why == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
        said = "no C++ compiler: blocked_product.cpp is not compiled"
    if why == "broken":
        broken = tmp_path / "broken.cpp"
        broken.write_text("int main( {")
        monkeypatch.setattr(blocked_product, "SOURCE", broken)
        said = "broken.cpp cannot be compiled" if compile_cpp.compiler() else "no C++ compiler"
    linear = nn.Linear(8, 8).bfloat16()
    model = nn.Sequential(linear)
    pack_linears(model)
    packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not without AVX-512 or its like: torch multiplies there
    assert model[0].packed.is_mkldnn if packs else model[0] is linear
    assert said in caplog.text and bool(caplog.text) == bool(said)
    x = torch.randn(3, 8).bfloat16()
    torch.testing.assert_close(model(x), linear(x), rtol=2e-2, atol=2e-2)


@only_here
def test_the_next_process_compiles_nothing(forgotten, monkeypatch, tmp_path):
    """And it shares PyTorch's threads: an OpenMP of its own would start as many again."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    first = compile_cpp.load_cpp(blocked_product.SOURCE)
    monkeypatch.setenv("CXX", "no-such-compiler")
    second = compile_cpp.load_cpp(blocked_product.SOURCE)
    assert first.toolkit_block_width() == second.toolkit_block_width() in (16, 32)
    library = next((tmp_path / "compiled").glob("blocked_product-*/library.so")).read_bytes()
    openmp = compile_cpp.openmp_of_torch()
    assert openmp is not None and openmp.rpartition("/")[2].partition(".so")[0].encode() in library


SIZES = {"q_proj": 64, "k_proj": 32, "v_proj": 32}


def attention(kind: type[nn.Module], bias: bool, sizes: dict[str, int] = SIZES) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Module()
    for name, outputs in sizes.items():
        block.add_module(name, kind(nn.Linear(16, outputs, bias=bias, dtype=torch.bfloat16)))
    return block


@only_here
@pytest.mark.parametrize("kind, bias", [(PackedLinear, False), (Int8Linear, True)])
def test_joined_layers_are_parts_of_one_product(kind, bias):
    """A native layer has one product of q, k and v. Each layer by itself returns what it did, and new weights and
    biases reach both. Layers of partial blocks stay apart."""
    apart, together = attention(kind, bias), attention(kind, bias)
    join_products(together)
    x = torch.randn(2, 3, 16).bfloat16()
    for change in (1.0, -2.0):
        for one in [*apart.children(), *together.children()]:
            if bias:
                one.bias.mul_(change)
            one.set_weight(one.weight * change)
        outs = [layer(x) for layer in apart.children()]
        assert all(map(torch.equal, (layer(x) for layer in together.children()), outs))
        assert torch.equal(together.q_proj.joined.blocked_product(x), torch.cat(outs, dim=-1))
    uneven = attention(kind, bias, sizes={**SIZES, "k_proj": 24})
    join_products(uneven)
    assert all(layer.joined is None for layer in uneven.children())
