"""The arithmetic of EAGLE-2 and MTP heads against formulas written out by hand, and the names of their weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.mtp import MtpConfig, MtpHead

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
T = 5


def causal(q, k, v):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def turned(x):
    """Rotary embedding of [T, heads, 8] at positions 0..T-1."""
    angles = torch.outer(torch.arange(T).float(), 10000.0 ** (-torch.arange(0, 8, 2) / 8)).repeat(1, 2)[:, None]
    return x * angles.cos() + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * angles.sin()


def decoder(w, prefix, x, read):
    """A Llama layer over the stream x whose attention reads `read`."""

    def lin(name, y):
        return F.linear(y, w[f"{prefix}{name}.weight"], w.get(f"{prefix}{name}.bias"))

    q, k, v = (lin(f"self_attn.{one}_proj", read).view(T, -1, 8) for one in "qkv")
    x = x + lin("self_attn.o_proj", causal(turned(q), turned(k), v).flatten(1))
    y = norm(x, w[prefix + "post_attention_layernorm.weight"])
    return x + lin("mlp.down_proj", F.silu(lin("mlp.gate_proj", y)) * lin("mlp.up_proj", y))


def random_head(head):
    """All weights random, norms too, so that a norm left out shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return head.requires_grad_(False), head.state_dict()


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(T, 16, generator=generator), torch.randn(T, 16, generator=generator)


@pytest.mark.parametrize("fc_bias", [True, False])
def test_eagle2_equals_its_formula(inputs, fc_bias):
    """Embedding first, no norm before the first layer's attention, one before the second's, none at the end."""
    embeds, hidden = inputs
    config = Eagle2Config(**SIZES, num_hidden_layers=2, fc_bias=fc_bias, attention_bias=True)
    head, w = random_head(Eagle2Head(config))
    x = F.linear(torch.cat((embeds, hidden), dim=-1), w["fc.weight"], w.get("fc.bias"))
    x = decoder(w, "layers.0.", x, x)
    x = decoder(w, "layers.1.", x, norm(x, w["layers.1.input_layernorm.weight"]))
    assert torch.allclose(head(embeds, hidden, torch.arange(T), causal, T), x, atol=1e-5)


def test_eagle2_has_eagles_names():
    """EAGLE's and SGLang's loaders look these up."""
    layer = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    wanted = {f"layers.0.{name}.weight" for name in [*layer, "post_attention_layernorm"]}
    assert set(Eagle2Head(Eagle2Config(**SIZES)).state_dict()) == wanted | {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("embedding_first", [True, False])
@pytest.mark.parametrize("state", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("zero_first", [True, False])
def test_mtp_equals_its_formula(inputs, embedding_first, state, zero_first):
    """Every choice in which published MTP layers differ changes what it says and nothing else."""
    embeds, hidden = inputs
    config = MtpConfig(
        **SIZES, num_mtp_layers=2, embedding_first=embedding_first, state=state, zero_first_embedding=zero_first
    )
    head, w = random_head(MtpHead(config))
    if zero_first:
        zeroed = torch.cat((torch.zeros(1, 16), embeds[1:]))
    for layer in (0, 1):
        prefix = f"layers.{layer}."
        pair = [
            norm(zeroed if zero_first else embeds, w[prefix + "enorm.weight"]),
            norm(hidden, w[prefix + "hnorm.weight"]),
        ]
        x = F.linear(torch.cat(pair if embedding_first else pair[::-1], dim=-1), w[prefix + "eh_proj.weight"])
        x = decoder(w, prefix, x, norm(x, w[prefix + "input_layernorm.weight"]))
        read = norm(x, w[prefix + "shared_head.norm.weight"])
        got = head(embeds, hidden, torch.arange(T), causal, T, layer)
        assert torch.allclose(got, read if state == "post_norm" else x, atol=1e-5)
        assert torch.allclose(head.read(layer, got), read, atol=1e-5)


def test_mtp_choices_that_do_not_exist():
    """A typing error in a config must not fall back to a default."""
    with pytest.raises(ValueError, match="state is 'post'"):
        MtpConfig(**SIZES, state="post")
    with pytest.raises(ValueError, match="num_mtp_layers is 0"):
        MtpConfig(**SIZES, num_mtp_layers=0)
