"""The variants of published EAGLE-3 heads against formulas written out by hand, two steps deep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head

T, H, HT, A, HD = 5, 16, 12, 3, 8
SIZES = {
    "hidden_size": H,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HD,
    "rms_norm_eps": 1e-5,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "target_hidden_size": HT,
    "draft_vocab_size": 20,
    "aux_layer_ids": (1, 2, 3),
}
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


def by_hand(w, on, aux, embeds, steps=2):
    """Logits of each step, as the papers and loaders define the variants in `on`."""

    def lin(name, y):
        return F.linear(y, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def mlp(layer, x):
        y = norm(x, w[f"{layer}.post_attention_layernorm.weight"])
        return lin(f"{layer}.mlp.down_proj", F.silu(lin(f"{layer}.mlp.gate_proj", y)) * lin(f"{layer}.mlp.up_proj", y))

    if "norm_before_fc" in on:
        aux = norm(aux, w["input_norm.weight"])
    if "fc_norm" in on:
        aux = torch.cat([norm(aux[:, HT * i : HT * (i + 1)], w[f"fc_norm.{i}.weight"]) for i in range(A)], dim=-1)
    state, said = lin("fc", aux), []
    for _ in range(steps):
        normed = norm(state, w["midlayer.hidden_norm.weight"])
        read = torch.cat((norm(embeds, w["midlayer.input_layernorm.weight"]), normed), dim=-1)
        q, k, v = (lin(f"midlayer.self_attn.{one}_proj", read).view(T, -1, HD) for one in "qkv")
        if "qk_norm" in on:
            q, k = norm(q, w["midlayer.self_attn.q_norm.weight"]), norm(k, w["midlayer.self_attn.k_norm.weight"])
        x = normed if "norm_before_residual" in on else state
        x = x + lin("midlayer.self_attn.o_proj", causal(turned(q), turned(k), v).flatten(1))
        x = x + mlp("midlayer", x)
        for layer in ("layers.1", "layers.2") if FURTHER in on else ():
            read = norm(x, w[f"{layer}.input_layernorm.weight"])
            q, k, v = (lin(f"{layer}.self_attn.{one}_proj", read).view(T, -1, HD) for one in "qkv")
            if "qk_norm" in on:
                q, k = norm(q, w[f"{layer}.self_attn.q_norm.weight"]), norm(k, w[f"{layer}.self_attn.k_norm.weight"])
            x = x + lin(f"{layer}.self_attn.o_proj", causal(turned(q), turned(k), v).flatten(1))
            x = x + mlp(layer, x)
        last = norm(x, w["norm.weight"])
        said.append(lin("lm_head", last))
        state = last if "norm_output" in on else x
    return said


@pytest.mark.parametrize("on", [(), *((one,) for one in VARIANTS), ("fc_norm", "norm_output"), VARIANTS[1:]])
def test_each_variant_equals_its_formula(on):
    """All weights random, norms too: one that is left out, or stands at another place, shows."""
    head = build(on).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    aux, embeds = torch.randn(T, A * HT, generator=generator), torch.randn(T, H, generator=generator)
    wanted = by_hand(head.state_dict(), on, aux, embeds)
    hidden = head.first_hidden(aux)
    for logits in wanted:
        hidden = head(embeds, hidden, torch.arange(T), causal, T)
        assert torch.allclose(head.logits(hidden), logits, atol=1e-4)


def test_variants_differ():
    """A flag that changes nothing would pass the test above with a formula that ignores it."""
    heads = {}
    for on in ((), *((one,) for one in VARIANTS)):
        torch.manual_seed(0)
        heads[on] = build(on)
    plain = heads[()].state_dict()
    for on, head in heads.items():
        same_names = head.state_dict().keys() == plain.keys()
        assert same_names == (on in ((), ("norm_before_residual",), ("norm_output",))), on


def test_two_norms_before_fc():
    with pytest.raises(ValueError, match="one norm before fc is possible"):
        Eagle3Config(**SIZES, fc_norm=True, norm_before_fc=True)


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
