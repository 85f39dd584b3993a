"""Which weights Muon moves and which AdamW, the learning rate, and the steps of a training."""

from __future__ import annotations

import logging

import pytest
import torch

from toolkit.errors import TrainError
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.recipe import RecipeError
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head
from toolkit.train.loop import accumulation_steps
from toolkit.train.optimizer import (
    build_optimizer,
    gradient_clip,
    rate_factor,
    set_learning_rates,
    total_steps,
    without_compiling,
)
from toolkit.train_settings import DataSettings, HeadSettings, OnPolicySettings, OptimizerSettings, TrainSettings


@pytest.fixture
def tiny_head(tiny_draft) -> Eagle3Head:
    """A head of this test's own: training marks its parameters."""
    return Eagle3Head(Eagle3Config.from_dict(tiny_draft.head.config.to_dict()))


def test_every_weight_is_in_one_group_at_its_own_rate(tiny_head):
    """A weight in no group would never be trained, without a word."""
    settings = TrainSettings(optimizer=OptimizerSettings(learning_rate=1e-3, muon_learning_rate=0.02))
    optimizer = build_optimizer(tiny_head, settings)
    set_learning_rates(optimizer, 0.5, settings)
    names = {parameter: name for name, parameter in tiny_head.named_parameters()}
    groups = [({names[parameter] for parameter in group["params"]}, group["lr"]) for group in optimizer.param_groups]
    (matrices, muon), (others, adamw) = groups
    assert matrices | others == set(names.values()) and not matrices & others
    assert others == {"lm_head.weight", *(name for name in names.values() if "norm" in name)}
    assert (muon, adamw) == (0.01, 5e-4)


def test_muon_leaves_the_tables_of_a_dspark_head_to_adamw(tiny_target):
    """Both factors of the bias have a row a token, of which a step moves a few."""
    settings = TrainSettings(head=HeadSettings(kind="dspark"))
    token_map = TokenMap.from_ids(range(90), tiny_target.vocab_size)
    head = start_head(plan_head(settings, tiny_target, token_map), settings, tiny_target, seed=0)
    matrices, _ = (group["params"] for group in build_optimizer(head, settings).param_groups)
    names = {name for name, one in head.named_parameters() if any(one is other for other in matrices)}
    assert "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names
    assert not {name for name in names if name.startswith(("markov_head.", "confidence_head.", "lm_head."))}


def test_a_step_of_muon_has_the_size_of_its_rate(tiny_head):
    """Without ZeRO too: the update of a matrix has singular values near 1 whatever the gradient's scale."""
    settings = TrainSettings(precision="fp32", optimizer=OptimizerSettings(muon_learning_rate=0.02))
    optimizer = build_optimizer(tiny_head, settings)
    weight = tiny_head.midlayer.mlp.gate_proj.weight
    before = weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    weight.grad = 1e-6 * torch.randn(weight.shape, generator=generator)
    with without_compiling():
        optimizer.step()
    scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
    values = torch.linalg.svdvals((weight.detach() - before) / (0.02 * scale))
    assert 0.5 < values.min() and values.max() < 1.5


def test_adamw_alone_is_clipped_and_muon_refuses_a_clip(tiny_head, monkeypatch, caplog):
    """A clip that is asked for and not applied would be a setting ignored in silence."""
    adamw = TrainSettings(optimizer=OptimizerSettings(name="adamw"))
    assert type(build_optimizer(tiny_head, adamw)) is torch.optim.AdamW
    assert [
        gradient_clip(one)
        for one in (adamw, TrainSettings(optimizer=OptimizerSettings(name="adamw", max_grad_norm=1.0)), TrainSettings())
    ] == [
        0.5,
        1.0,
        0.0,
    ]
    with pytest.raises(RecipeError, match=r"train\.optimizer\.max_grad_norm"):
        TrainSettings(optimizer=OptimizerSettings(max_grad_norm=1.0))
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    build_optimizer(tiny_head, TrainSettings(optimizer=OptimizerSettings(name="adamw", muon_learning_rate=0.01)))
    assert "muon_learning_rate 0.01 is not used under train.optimizer.name adamw" in caplog.text


@pytest.mark.parametrize(("schedule", "end"), [("cosine", 0.0), ("constant", 1.0)])
def test_warms_up_then_decays_to_zero(schedule, end):
    settings = TrainSettings(optimizer=OptimizerSettings(warmup_ratio=0.1, schedule=schedule))
    rates = [rate_factor(step, 100, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[100] == pytest.approx(end) and rates[99] > 0  # the last step of 100 still learns


def test_total_steps():
    assert total_steps(TrainSettings(epochs=2.5), 10) == 25
    assert total_steps(TrainSettings(epochs=2.5, max_steps=7), 10) == 7
    assert total_steps(TrainSettings(max_steps=7, on_policy=OnPolicySettings(every=6)), 10) == 7
    with pytest.raises(TrainError, match="on_policy.every = 7, but the training has 7 steps"):
        total_steps(TrainSettings(max_steps=7, on_policy=OnPolicySettings(every=7)), 10)


def test_global_batch_is_shared_out_or_refused():
    """The same global batch on any number of processes: what cannot be shared evenly is an error, not a rounding."""
    settings = TrainSettings(data=DataSettings(global_batch=8, micro_batch=2))
    assert [accumulation_steps(settings, processes) for processes in (1, 2, 4, 8)] == [4, 2, 1, 1]
    with pytest.raises(ValueError, match="multiple of 3"):
        accumulation_steps(settings, 3)
