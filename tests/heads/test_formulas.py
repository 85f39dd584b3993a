"""The arithmetic of EAGLE-3 (the variants of published heads, two steps deep), EAGLE-2 and MTP heads against formulas
written out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig

from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import HeadError
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.train_settings import HeadSettings

T, H, HT, A, HD = 5, 16, 12, 3, 8
LLAMA = {
    "hidden_size": H,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HD,
    "rms_norm_eps": 1e-5,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SIZES = {**LLAMA, "target_hidden_size": HT, "draft_vocab_size": 20, "aux_layer_ids": (1, 2, 3)}
FURTHER = "num_hidden_layers"  # of which there are 3
VARIANTS = (
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "fc_bias",
    "attention_bias",
    "qk_norm",
    FURTHER,
)


def build(on) -> Eagle3Head:
    return Eagle3Head(Eagle3Config(**SIZES, **{name: 3 if name == FURTHER else True for name in on}))


def causal(q, k, v):
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def turned(x):
    angles = torch.outer(torch.arange(T).float(), 10000.0 ** (-torch.arange(0, HD, 2) / HD)).repeat(1, 2)[:, None]
    return x * angles.cos() + torch.cat((-x[..., HD // 2 :], x[..., : HD // 2]), dim=-1) * angles.sin()


def decoder(w, prefix, x, read, qk_norm=False):
    """A Llama layer over the stream x whose attention reads `read`."""

    def lin(name, y):
        return F.linear(y, w[f"{prefix}{name}.weight"], w.get(f"{prefix}{name}.bias"))

    q, k, v = (lin(f"self_attn.{one}_proj", read).view(T, -1, HD) for one in "qkv")
    if qk_norm:
        q, k = norm(q, w[prefix + "self_attn.q_norm.weight"]), norm(k, w[prefix + "self_attn.k_norm.weight"])
    x = x + lin("self_attn.o_proj", causal(turned(q), turned(k), v).flatten(1))
    y = norm(x, w[prefix + "post_attention_layernorm.weight"])
    return x + lin("mlp.down_proj", F.silu(lin("mlp.gate_proj", y)) * lin("mlp.up_proj", y))


def random_head(head):
    """All weights random, norms too: one that is left out, or stands at another place, shows."""
    generator = torch.Generator().manual_seed(0)
    head.requires_grad_(False)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return head, head.state_dict()


def by_hand(w, on, aux, embeds, steps=2):
    """Logits of each step, as the papers and loaders define the variants in `on`."""
    if "norm_before_fc" in on:
        aux = norm(aux, w["input_norm.weight"])
    if "fc_norm" in on:
        aux = torch.cat([norm(aux[:, HT * i : HT * (i + 1)], w[f"fc_norm.{i}.weight"]) for i in range(A)], dim=-1)
    state, logits = F.linear(aux, w["fc.weight"], w.get("fc.bias")), []
    for _ in range(steps):
        normed = norm(state, w["midlayer.hidden_norm.weight"])
        read = torch.cat((norm(embeds, w["midlayer.input_layernorm.weight"]), normed), dim=-1)
        x = decoder(w, "midlayer.", normed if "norm_before_residual" in on else state, read, "qk_norm" in on)
        for layer in ("layers.1.", "layers.2.") if FURTHER in on else ():
            x = decoder(w, layer, x, norm(x, w[f"{layer}input_layernorm.weight"]), "qk_norm" in on)
        last = norm(x, w["norm.weight"])
        logits.append(F.linear(last, w["lm_head.weight"]))
        state = last if "norm_output" in on else x
    return logits


@pytest.mark.parametrize("on", [(), ("fc_norm", "norm_output"), VARIANTS[1:]], ids=["eagle3", "eagle3.1", "most"])
def test_each_variant_equals_its_formula(on):
    head, w = random_head(build(on))
    generator = torch.Generator().manual_seed(1)
    aux, embeds = torch.randn(T, A * HT, generator=generator), torch.randn(T, H, generator=generator)
    wanted = by_hand(w, on, aux, embeds)
    hidden = head.first_hidden(aux)
    for logits in wanted:
        hidden = head(embeds, hidden, torch.arange(T), causal, T)
        assert torch.allclose(head.logits(hidden), logits, atol=1e-4)


def test_the_layer_compiles_around_its_attention_for_all_lengths():
    """A length of its own for each program would be compiled in each of the first steps of a training."""
    layer, programs = build(()).midlayer, []

    def note(program, _examples):
        programs.append(program)
        return program.forward

    before, after = (
        torch.compile(one, backend=note, fullgraph=True, dynamic=True) for one in (layer.before, layer.after)
    )
    for length in (3, 7, 12):
        embeds, hidden = torch.randn(2, length, H)
        angles = torch.randn(2, length, 1, HD)
        *heads, rest = before(embeds, hidden, *angles)
        plain = layer(embeds, hidden, *angles, lambda q, k, v: q * 2)
        torch.testing.assert_close(after(heads[0] * 2, rest), plain)
    assert len(programs) == 2


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(T, 16, generator=generator), torch.randn(T, 16, generator=generator)


def test_eagle2_equals_its_formula(inputs):
    """Embedding first, no norm before the first layer's attention, one before the second's, none at the end."""
    embeds, hidden = inputs
    config = Eagle2Config(**LLAMA, num_hidden_layers=2, fc_bias=True, attention_bias=True)
    head, w = random_head(Eagle2Head(config))
    x = F.linear(torch.cat((embeds, hidden), dim=-1), w["fc.weight"], w.get("fc.bias"))
    x = decoder(w, "layers.0.", x, x)
    x = decoder(w, "layers.1.", x, norm(x, w["layers.1.input_layernorm.weight"]))
    assert torch.allclose(head(embeds, hidden, torch.arange(T), causal, T), x, atol=1e-5)


def test_eagle2_has_eagles_names():
    """EAGLE's and SGLang's loaders look these up."""
    layer = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    wanted = {f"layers.0.{name}.weight" for name in [*layer, "post_attention_layernorm"]}
    assert set(Eagle2Head(Eagle2Config(**LLAMA)).state_dict()) == wanted | {"fc.weight", "fc.bias"}


@pytest.mark.parametrize(("embedding_first", "zero_first"), [(True, False), (False, True)])
def test_mtp_equals_its_formula(inputs, embedding_first, zero_first):
    """Every choice in which published MTP layers differ changes what it says and nothing else."""
    embeds, hidden = inputs
    config = MtpConfig(**LLAMA, num_mtp_layers=2, embedding_first=embedding_first, zero_first_embedding=zero_first)
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
        assert torch.allclose(head(embeds, hidden, torch.arange(T), causal, T, layer), read, atol=1e-5)


@pytest.mark.parametrize(
    "head",
    [
        lambda: build(()),
        lambda: build(("fc_norm", "norm_before_residual", "attention_bias", "qk_norm")),
        lambda: Eagle2Head(Eagle2Config(**LLAMA)),
        lambda: MtpHead(MtpConfig(**LLAMA, zero_first_embedding=True)),
    ],
)
def test_keys_and_values_alone_are_those_of_the_attention(head):
    """Serving writes them without the rest of the layer where no state is needed."""
    made, seen = head().eval(), []
    embeds, hidden, positions = torch.randn(T, H), torch.randn(T, H), torch.arange(T)
    made(embeds, hidden, positions, lambda q, k, v: seen.append((k, v)) or causal(q, k, v), T)
    assert made.writes_alone
    ((keys, values),) = seen
    own = made.keys_values(embeds, hidden, positions, T)
    assert torch.equal(own[0], keys) and torch.equal(own[1], values)
    assert not build((FURTHER,)).writes_alone


def test_a_familys_layer_that_a_head_cannot_have_is_an_error_unless_llamas_is_asked_for():
    """A head of another form than the target's would be trained for days, and could not be written into it."""
    config = GptOssConfig(num_hidden_layers=2, hidden_size=16, intermediate_size=8, num_attention_heads=2, head_dim=8,
                          num_key_value_heads=1, num_local_experts=2, vocab_size=30)  # fmt: skip
    sizes = {"vocab_size": 30, "draft_vocab_size": 30, "n_layers": 2}
    with pytest.raises(HeadError, match="cannot be that of gpt_oss.*sinks.*train.head.layer to llama"):
        MtpConfig.from_settings(HeadSettings(kind="mtp"), config, **sizes)
    asked = MtpConfig.from_settings(HeadSettings(kind="mtp", layer="llama", sliding_window=4), config, **sizes)
    assert asked.layer_config is None and asked.sliding_window == 4
