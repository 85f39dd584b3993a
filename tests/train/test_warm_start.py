"""The warm start copies and solves what it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.data.batches import Example, collate
from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import HeadError
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.recipe_yaml import RecipeError
from toolkit.targets.features import AuxCapture
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head
from toolkit.train.warm_start import (
    copy_decoder_layer,
    copy_norm,
    initialise_from_target,
    regression_batches,
)
from toolkit.train_settings import HeadSettings, TrainSettings


def _head(target, draft) -> Eagle3Head:
    return Eagle3Head(Eagle3Config.from_dict(draft.head.config.to_dict()))


def _batches(target, count=6, length=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()  # noqa: E731
    return [collate([Example(f"{i}{j}", draw(), [True] * length) for j in range(4)], 0) for i in range(count)]


def test_copies_of_the_target(tiny_target, tiny_draft):
    """A half swapped (embedding for hidden) or a row of lm_head off by one would start the head from noise."""
    head = _head(tiny_target, tiny_draft)
    initialise_from_target(head, tiny_target, tiny_draft.token_map, [], seed=0)
    last = tiny_target.layers[-1]
    for name in ("q_proj", "k_proj", "v_proj"):
        mine = getattr(head.midlayer.self_attn, name).weight
        assert torch.equal(mine[:, 64:], getattr(last.self_attn, name).weight)
        assert mine[:, :64].std() < 0.03
    assert torch.equal(head.midlayer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(head.lm_head.weight, tiny_target.lm_head.weight[tiny_draft.token_map.ids])
    torch.testing.assert_close(head.norm.weight, tiny_target.final_norm.weight, atol=1e-5, rtol=1e-5)


def test_several_layers_start_as_the_last_ones_in_order(tiny_target, tiny_draft):
    """The first of three is the target's third last; in another order the head would start from noise."""
    config = dataclasses.replace(tiny_draft.head.config, num_hidden_layers=3)
    head = Eagle3Head(config)
    initialise_from_target(head, tiny_target, tiny_draft.token_map, [], seed=0)
    assert torch.equal(head.midlayer.mlp.up_proj.weight, tiny_target.layers[-3].mlp.up_proj.weight)
    for number in (1, 2):
        copied = dict(tiny_target.layers[-3 + number].named_parameters())
        for name, value in head.layers[str(number)].named_parameters():
            torch.testing.assert_close(value, copied[name], atol=1e-5, rtol=1e-5)


SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
QK = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
MLP = tuple(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down"))
# Settings that multiply scores and outputs, and the factors that the copies have for it.
OF_FAMILY = {
    "gemma2": ({"query_pre_attn_scalar": 32}, {"q_proj": 0.5}),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "granite": (
        {"attention_multiplier": 0.5, "residual_multiplier": 0.25},
        {"q_proj": 0.5 * 8**0.5, "o_proj": 0.25, "down_proj": 0.25},
    ),
}


@pytest.mark.parametrize(
    ("family", "left"),
    [
        ("llama", ()),
        ("qwen3", QK),
        ("gemma2", OUTPUTS),
        ("phi3", (*QK, "self_attn.v_proj.weight", OUTPUTS[0], *MLP)),
        ("gpt_oss", MLP),  # whose positions turn halves, by a function of its own
        ("glm4", (*QK, *OUTPUTS, *MLP[:2])),
        ("granite", ()),
    ],
)
@torch.no_grad()
def test_parts_of_another_meaning_stay_random(family, left):
    """Queries that the target norms, or outputs that it norms, would be of a scale that nothing was ever read with; a
    norm of an output is not the one before the MLP."""
    own, factors = OF_FAMILY.get(family, ({}, {}))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **own))
    theirs = model.model.layers[-1]
    for name, value in theirs.named_parameters():
        if "norm" in name:
            value.copy_(torch.rand(value.shape) + 0.5)
    config = Eagle3Config.from_target_config(model.config, vocab_size=96, draft_vocab_size=32, aux_layer_ids=(1, 2, 3))
    layer = Eagle3Head(config).midlayer
    before = {name: value.clone() for name, value in layer.named_parameters()}
    assert set(copy_decoder_layer(layer, theirs, 32)) == set(left)
    source = dict(theirs.named_parameters())
    for name, value in layer.named_parameters():
        if name in left or name == "input_layernorm.weight":
            assert torch.equal(value, before[name]), name
        elif "norm" not in name:
            factor = factors.get(name.split(".")[1], 1.0)
            torch.testing.assert_close(value[:, -source[name].shape[1] :], factor * source[name])
    if "post_attention_layernorm.weight" in left:
        return
    mine = layer.post_attention_layernorm.weight
    norm = source.get("pre_feedforward_layernorm.weight", source["post_attention_layernorm.weight"])
    torch.testing.assert_close(mine, norm + (1 if "gemma" in family else 0), atol=1e-5, rtol=1e-4)


def _pairs(target, head, batches):
    """Features at i and the last layer's input at i+1, position 0 left out: [P, 192] and [P, 64] in float64."""
    capture = AuxCapture(target, (*head.config.aux_layer_ids, target.n_layers - 1))
    xs, ys = [], []
    try:
        for batch in batches:
            target.body(input_ids=batch.input_ids, use_cache=False)
            *features, last = capture.take_each()
            xs.append(torch.cat(features, -1)[:, 1:-1].flatten(0, 1))
            ys.append(last[:, 2:].flatten(0, 1))
    finally:
        capture.remove()
    return torch.cat(xs).double(), torch.cat(ys).double()


@torch.no_grad()
def test_fc_explains_the_next_input_of_the_last_layer(tiny_target, tiny_draft):
    """On fresh positions no worse than plain least squares on the same data; with columns mixed up it would be."""
    head, batches = _head(tiny_target, tiny_draft), _batches(tiny_target, count=10)
    initialise_from_target(head, tiny_target, tiny_draft.token_map, batches, seed=0)
    x, y = _pairs(tiny_target, head, batches)
    fresh_x, fresh_y = _pairs(tiny_target, head, _batches(tiny_target, count=10, seed=9))

    def explained(weight):
        left = ((fresh_x @ weight - fresh_y) ** 2).sum(0) / ((fresh_y - fresh_y.mean(0)) ** 2).sum(0)
        return float((1 - left).mean())

    assert explained(head.fc.weight.T.double()) > explained(torch.linalg.lstsq(x, y).solution) - 0.01


def test_the_scale_of_a_norm():
    """A LayerNorm takes away the mean of what it is asked with, and adds its bias: neither is its scale."""
    theirs, mine = torch.nn.LayerNorm(64, eps=1e-5), torch.nn.RMSNorm(64, eps=1e-5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(64))
    assert copy_norm(mine, theirs, 64)
    torch.testing.assert_close(mine.weight, theirs.weight, atol=1e-5, rtol=1e-5)


def test_an_eagle2_head_starts_as_the_best_linear_guess(tiny_target):
    """Its layers add nothing yet, and its guess of the next state is as near as least squares in float64 comes. Halves
    swapped, or states of another position, would leave the whole variance."""
    config = Eagle2Config.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size, num_hidden_layers=2)
    head = Eagle2Head(config)
    batches = _batches(tiny_target)
    initialise_from_target(head, tiny_target, TokenMap.identity(tiny_target.vocab_size), batches, seed=0)
    ids = torch.cat([batch.input_ids for batch in batches])
    with torch.no_grad():
        states = tiny_target.body(input_ids=ids).last_hidden_state
        read = torch.cat((tiny_target.embed_tokens(ids)[:, 1:], states[:, :-1]), dim=-1)[:, 1:].flatten(0, 1)
        positions = torch.arange(len(read))
        out = head(*read.split(64, dim=-1), positions, lambda q, k, v: q, len(read))
        torch.testing.assert_close(out, head.fc(read))
        wanted = states[:, 2:].flatten(0, 1).double()
        best = torch.linalg.lstsq(read.double(), wanted).solution
    least = (read.double() @ best - wanted).square().mean()
    assert least < 0.95 * wanted.var(0).mean(), "a smaller ratio would show no difference"
    assert (out - wanted).square().mean() < 1.01 * least


def test_mtp_layers_start_as_the_last_layer(tiny_target):
    """Copied by name: the wrong layer, or a norm left at one, would cost the start without a sign."""
    config = MtpConfig.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size, num_mtp_layers=2)
    head = MtpHead(config)
    whole = TokenMap.identity(tiny_target.vocab_size)
    initialise_from_target(head, tiny_target, whole, _batches(tiny_target), seed=0)
    last = dict(tiny_target.layers[-1].named_parameters())
    for layer in head.layers:
        for name, value in layer.named_parameters():
            if name in last:
                torch.testing.assert_close(value, last[name], atol=1e-5, rtol=1e-5)
        norm = layer.shared_head["norm"].weight
        torch.testing.assert_close(norm, tiny_target.final_norm.weight, atol=1e-5, rtol=1e-5)
        assert layer.eh_proj.weight.abs().max() > 0.1, "solved, not random"


@pytest.mark.parametrize(("start", "choice"), [("target", "random"), ("random", "frozen")])
def test_the_output_matrix_starts_as_set(tiny_target, tiny_draft, monkeypatch, start, choice):
    """`train.head.lm_head` decides about the matrix and its norm whatever the rest starts from; frozen keeps it."""
    scale = torch.full_like(tiny_target.final_norm.weight, 1.5)
    monkeypatch.setattr(tiny_target.final_norm.weight, "data", scale)
    settings = TrainSettings(head=HeadSettings(lm_head=choice, init=start))
    plan = plan_head(settings, tiny_target, tiny_draft.token_map)
    batches = [] if start == "target" else None
    head = start_head(plan, settings, tiny_target, 7, batches)
    rows = tiny_target.lm_head.weight[tiny_draft.token_map.ids]
    assert torch.equal(head.lm_head.weight, rows) == (choice != "random")
    assert head.lm_head.weight.requires_grad == (choice != "frozen")
    torch.testing.assert_close(head.norm.weight, torch.ones_like(scale) if choice == "random" else scale)
    if choice == "random":
        assert 0.015 < float(head.lm_head.weight.detach().std()) < 0.025
        assert not torch.equal(start_head(plan, settings, tiny_target, 8, batches).lm_head.weight, head.lm_head.weight)
    copied = torch.equal(head.midlayer.self_attn.o_proj.weight, tiny_target.layers[-1].self_attn.o_proj.weight)
    assert copied == (start == "target"), "the rest starts as train.head.init says"


def test_the_regression_reads_no_more_tokens_than_it_may(tiny_target, tiny_draft):
    """`train.head.start_tokens` ends it with the batch that reaches so many: a start fitted on more than a training
    sees would make its tokens look worth more than they are."""
    batches = _batches(tiny_target)  # 160 answer tokens each
    assert [len(regression_batches(batches, 64, most)) for most in (None, 161, 160, 1)] == [6, 2, 1, 1]
    plan = plan_head(TrainSettings(), tiny_target, tiny_draft.token_map)
    few = TrainSettings(head=HeadSettings(start_tokens=300))
    cut, short, whole = (
        start_head(plan, settings, tiny_target, 3, iter(given)).state_dict()["fc.weight"]
        for settings, given in ((few, batches), (TrainSettings(), batches[:2]), (TrainSettings(), batches))
    )
    assert torch.equal(cut, short) and not torch.equal(cut, whole)
    with pytest.raises(RecipeError, match="start_tokens"):
        TrainSettings(head=HeadSettings(init="random", start_tokens=300))


def test_a_new_correction_changes_nothing(tiny_target):
    """Else its random weights spoil the first steps. One factor is zero alone: with two, none would ever learn."""
    settings = TrainSettings(head=HeadSettings(kind="dspark", correction="dfly"))
    plan = plan_head(settings, tiny_target, TokenMap.from_ids(range(90), tiny_target.vocab_size))
    head = start_head(plan, settings, tiny_target, seed=0)
    states, parents = torch.randn(5, tiny_target.hidden_size), torch.arange(5)
    scores = head.logits(head.after(states, parents, tiny_target.embed_tokens))
    best = scores.max(-1)
    plain = head.lm_head(head.normed(states)).max(-1)
    assert torch.equal(best.indices, plain.indices) and torch.equal(best.values, plain.values)
    zero = {name for name, one in head.named_parameters() if one.dim() > 1 and not one.any()}
    assert zero == set(head.zeroed) and len(zero) == 1


def test_a_mask_token_without_an_embedding_is_refused(tiny_target):
    """Ids that no text has may have zeros; all masks of a block would then be alike, whatever they stand for."""
    settings = TrainSettings(head=HeadSettings(kind="dspark", mask_token_id=9))
    plan = plan_head(settings, tiny_target, TokenMap.from_ids(range(90), tiny_target.vocab_size))
    start_head(plan, settings, tiny_target, seed=0)
    weight = tiny_target.embed_tokens.weight
    kept = weight[9].clone()
    with torch.no_grad():
        try:
            weight[9] = 0
            with pytest.raises(
                HeadError, match=r"embedding of the mask token 9 has length 0.*train.head.mask_token_id"
            ):
                start_head(plan, settings, tiny_target, seed=0)
        finally:
            weight[9] = kept
