"""The int8 layer is a float layer of rounded weights, and a row's result does not depend on the rows beside it. A
quantised target: what is replaced, what stays, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from toolkit.errors import TargetError
from toolkit.infer.cpu import int8_linear
from toolkit.infer.cpu.int8_linear import DTYPES, Int8Linear
from toolkit.infer.engine.cpu_door import load_target
from toolkit.targets.target import weight_bits

# Widths that no vector register divides too, and a weight of three parts.
SIZES = [(33, 7), (576, 192), (576, 960)]


@pytest.fixture
def torch_products(monkeypatch):
    """By PyTorch's products, also where our own take the layer (see test_blocked_product.py)."""
    monkeypatch.setattr(int8_linear, "takes", lambda _weight: False)


def build(width: int, outputs: int, dtype: torch.dtype, bias: bool = True) -> Int8Linear:
    torch.manual_seed(0)
    return Int8Linear(nn.Linear(width, outputs, bias=bias).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "outputs"), SIZES)
def test_equals_a_float_layer_of_the_same_weights(width, outputs, dtype, torch_products):
    """To the rounding of the dtype; an outlier of 100 in a row must not drown the rest of it."""
    layer = build(width, outputs, dtype)
    inputs = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs[0, 1, 3] = 100.0
    exact = inputs.double() @ (layer.levels.double() * layer.scale.double()[:, None]).T + layer.bias.double()
    got = layer(inputs)
    assert got.dtype == dtype and got.shape == (2, 5, outputs)
    error = ((got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("width", [33, 576])
def test_a_row_does_not_depend_on_its_neighbours(width, torch_products):
    """Bit for bit in fp32: a verify step must say what a plain step says. A step per tensor would fail by 1e-3."""
    layer = build(width, 40, torch.float32)
    rows = torch.randn(33, width, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 33)[:, None]
    whole = layer(rows)
    for first, count in [(0, 1), (32, 1), (5, 4), (7, 16), (0, 32)]:
        assert torch.equal(layer(rows[first : first + count]), whole[first : first + count])
    assert layer(rows[None, :0]).shape == (1, 0, 40)


@pytest.fixture
def plain(tiny_target_directory):
    return load_target(tiny_target_directory)


@pytest.fixture
def quantized(tiny_target_directory):
    return load_target(tiny_target_directory, quantization="int8")


def test_linear_layers_are_int8_and_the_rest_stays(plain, quantized):
    """7 matrices in each of 7 layers, and the output matrix."""
    replaced = [path for path, module in quantized.model.named_modules() if isinstance(module, Int8Linear)]
    assert len(replaced) == 7 * 7 + 1 and "lm_head" in replaced
    assert not [path for path, module in quantized.model.named_modules() if type(module) is torch.nn.Linear]
    before = dict(plain.model.named_parameters())
    for path, weight in quantized.model.named_parameters():
        assert torch.equal(weight, before[path])
    assert quantized.fingerprint == plain.fingerprint


def tied_model(hidden: int = 32):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def test_a_tied_embedding_is_not_rounded():
    """The output matrix becomes int8, the table of the same weights stays; the published weights are counted once."""
    model = tied_model()
    table = model.get_input_embeddings().weight.clone()
    published = sum(weight.numel() for weight in model.parameters())
    int8_linear.quantize_model(model, "int8", torch.float32, "tied")
    assert isinstance(model.lm_head, Int8Linear)
    assert torch.equal(model.get_input_embeddings().weight, table)
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()] if tensor.numel() > 16)
    assert weight_bits(model) == pytest.approx(8 * held / published, rel=1e-3)


def test_what_is_refused(monkeypatch):
    """Families whose weights would stay as they are, other devices, other words."""
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))
    with pytest.raises(TargetError, match=r"hold only \d+% of the weights of GPT2LMHeadModel"):
        int8_linear.quantize_model(gpt2, "int8", torch.float32, "gpt2")
    with pytest.raises(TargetError, match="is 'int3'; one of int8"):
        int8_linear.quantize_model(tied_model(), "int3", torch.float32, "tied")
    with pytest.raises(TargetError, match="on the CPU, and the target is torch.float32 on meta"):
        int8_linear.quantize_model(tied_model().to("meta"), "int8", torch.float32, "tied")
    with pytest.raises(TargetError, match="bfloat16 or float32"):
        int8_linear.quantize_model(tied_model(), "int8", torch.float16, "tied")


def test_more_than_a_product_is_not_replaced():
    """A subclass of nn.Linear may do anything; a layer that stands in two places stays one."""

    class Doubling(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = tied_model()
    model.model.layers[0].self_attn.o_proj = doubling = Doubling(32, 32, bias=False)
    model.model.layers[0].mlp.gate_proj = model.model.layers[0].mlp.up_proj
    int8_linear.quantize_model(model, "int8", torch.float32, "tied")
    layer = model.model.layers[0]
    assert layer.self_attn.o_proj is doubling and layer.mlp.gate_proj is layer.mlp.up_proj
    assert type(layer.mlp.up_proj) is not torch.nn.Linear
