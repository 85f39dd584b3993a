"""MTP modules are trained in the form of their family: from the target's own module, or fresh from its layers."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.native_targets import FAMILIES, write_native_target
from tests.train.conftest import answered, answers_of, fit
from tests.train.test_parity import _prompts
from tests.train.test_ttt import _served_chain
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.launch_lines import Shape
from toolkit.checkpoint.native_mtp import load_native, native_of, stitch
from toolkit.errors import TargetError
from toolkit.heads.families import family_of
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.recipe_yaml import RecipeError
from toolkit.targets.facts import target_facts
from toolkit.targets.load import read_target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import native_head, plan_head, start_head, trained_head
from toolkit.train.loss import step_weights
from toolkit.train.step import forecast_accept_length, replayed_steps
from toolkit.train.target_side import TargetSide
from toolkit.train.ttt import unroll
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

STEPS, TOKENS = 3, 16
LEFT_OUT = 40  # ids that are not drafted
NATIVE = HeadSettings(kind="mtp", init="native")


@pytest.fixture(scope="module")
def targets(tiny_target, tmp_path_factory):
    known = {}

    def make(family: str):
        if family not in known:
            directory = tmp_path_factory.mktemp("native") / family
            write_native_target(directory, family, tiny_target.tokenizer, agreeing=True)
            known[family] = read_target(directory)
        return known[family]

    return make


def planned(target, head: HeadSettings):
    settings = TrainSettings(head=head, unroll=UnrollSettings(ttt_steps=STEPS, step_decay=0.6))
    return settings, plan_head(
        settings, target, TokenMap.from_ids(range(target.vocab_size - LEFT_OUT), target.vocab_size)
    )


@pytest.mark.parametrize("family", [name for name in ("deepseek", "mimo", "qwen3.5") if name in FAMILIES])
def test_the_unroll_equals_a_served_chain(family, targets):
    """Recursive steps of the family's layer: latent attention (narrower values), gates, experts; all tensors learn."""
    target = targets(family)
    head = native_head(target)
    torch.manual_seed(0)
    features, embeds = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    unrolled = list(unroll(head, features, embeds, STEPS))
    with torch.no_grad():
        for root in range(9 - STEPS):
            served = _served_chain(head, features[1], embeds[1], root, STEPS)
            trained = torch.stack([unrolled[step][1, root] for step in range(STEPS)])
            torch.testing.assert_close(trained, served, atol=3e-5, rtol=2e-4)
    sum(states.pow(2).mean() for states in unrolled).backward()
    assert [name for name, one in head.named_parameters() if one.grad is None] == []


def test_a_tuned_module_drafts_what_training_forecasts(targets, tmp_path):
    """K recursive steps on the target's own answers: acceptance rises, the forecast is the engine's accept_length step
    by step, and the copy of the target with the module accepts the same."""
    target = targets("deepseek")
    settings, plan = planned(target, NATIVE)
    prompts = _prompts(target)
    answers = answers_of(target, prompts, SamplingParams(max_tokens=TOKENS))
    batch = answered(prompts, answers)
    side = TargetSide(target, plan.token_map, plan.aux_layer_ids, "fp32")
    model = trained_head(plan, settings, native_head(target), side.teacher)
    before = forecast_accept_length(model, side, [batch], STEPS).accept_length
    fit(model, side, batch, STEPS, updates=40, rate=2e-3)
    model.head.eval().requires_grad_(False)
    forecast = forecast_accept_length(model, side, [batch], STEPS)
    assert forecast.accept_length > before + 0.3
    draft = DraftCheckpoint(head=model.head, token_map=plan.token_map)
    params = SamplingParams(max_tokens=TOKENS)

    def accepted(target, draft) -> list[list[int]]:
        engine = Engine(target, draft, DraftShape.chain(STEPS))
        requests = engine.generate(prompts, params)
        engine.close()
        assert [one.output_ids for one in requests] == answers
        return [[event.accepted for event in request.events if not event.truncated] for request in requests]

    served = accepted(target, draft)
    assert replayed_steps(model, side, [batch], STEPS) == served
    side.capture.remove()
    stitch(draft, target_facts(target.name), tmp_path / "copy", Shape(STEPS, 1, STEPS + 1))
    copy = read_target(tmp_path / "copy")
    assert accepted(copy, load_native(copy, *native_of(copy))) == served


@pytest.mark.parametrize("family", ["glm", "ernie"])
def test_a_fresh_module_has_the_form_of_its_family(family, targets):
    """Its layer starts as the target's last one of its class (experts, gates and biases too), its norms are the
    family's, and it can be written into a copy of the target."""
    target = targets(family)
    settings, plan = planned(target, HeadSettings(kind="mtp", init="target"))
    head = start_head(plan, settings, target, 0, ())
    native = load_native(target, *native_of(target)).head
    assert plan.config == native.config
    layer, last = head.layers[0], target.layers[-1]
    assert type(layer) is type(last) and type(layer.enorm) is type(target.final_norm)
    if family_of(target.config.model_type).title != "ERNIE-4.5":  # its module's layer is dense, the target's are not
        copied = dict(layer.named_parameters())
        assert all(torch.equal(copied[name], value) for name, value in last.named_parameters())


@pytest.mark.parametrize("kind", ["mtp", "eagle2"])
def test_a_head_without_an_output_matrix_trains_on_the_token_map_or_on_all_ids(kind, tiny_target):
    """MTP on the map by default, EAGLE-1/2 on all ids; the setting decides."""
    sizes = {
        choice: planned(tiny_target, HeadSettings(kind=kind, vocabulary=choice))[1].token_map.size
        for choice in (None, "draft", "target")
    }
    whole, cut = tiny_target.vocab_size, tiny_target.vocab_size - LEFT_OUT
    assert sizes == {None: cut if kind == "mtp" else whole, "draft": cut, "target": whole}


def test_the_weights_of_mtp_steps_sum_to_one():
    """FastMTP's; those of other heads are the plain powers."""
    assert step_weights("eagle3", 0.5, 3).tolist() == [1.0, 0.5, 0.25]
    torch.testing.assert_close(step_weights("mtp", 0.5, 3), torch.tensor([4.0, 2.0, 1.0]) / 7)


def test_what_has_no_module_is_refused(tiny_target, tiny_target_directory, targets):
    """With the key that helps."""
    with pytest.raises(TargetError, match="has no MTP module.*train.head.init=target"):
        planned(read_target(tiny_target_directory), NATIVE)
    with pytest.raises(TargetError, match="train.head.layers = 2, but the MTP module of .* has 1"):
        planned(targets("mimo"), HeadSettings(kind="mtp", init="native", layers=2))
    with pytest.raises(RecipeError, match="train.head.init"):
        TrainSettings(head=HeadSettings(kind="eagle3", init="native"))
