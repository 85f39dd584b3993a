"""What the trainer computes and forecasts is what the engine does (gate 3 of the design), for each kind of head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.train.conftest import answered, answers_of, fit
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.dspark import DSparkHead
from toolkit.infer.drafters.block_drafter import BlockRollout
from toolkit.infer.drafters.draft_rollout import DraftRollout
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import HeadPlan, plan_head, start_head, trained_head
from toolkit.train.state import head_of
from toolkit.train.step import forecast_accept_length, replayed_steps
from toolkit.train.target_side import TargetSide
from toolkit.train.ttt import unroll, unroll_blocks
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

STEPS, TOKENS, PROMPTS = 3, 24, 12
KINDS = {
    "eagle3-1": {"fc_norm": True, "norm_output": True, "sliding_window": 9},
    "eagle2": {"kind": "eagle2", "layers": 2},
    "mtp": {"kind": "mtp", "sliding_window": 9},
    "mtp-two-layers": {"kind": "mtp", "layers": 2},
    "dspark": {"kind": "dspark", "layers": 2, "markov_rank": 8},
}


def _prompts(target) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(4, 12, (PROMPTS,), generator=generator).tolist()
    return [torch.randint(3, target.vocab_size, (length,), generator=generator).tolist() for length in lengths]


SLOW = ("mtp-two-layers",)


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in KINDS]
)
def trained(request, tiny_target):
    """A head that knows its answers by heart, so that chains of every depth occur; its unroll, and the prompts."""
    settings = TrainSettings(head=HeadSettings(**KINDS[request.param]), unroll=UnrollSettings(ttt_steps=STEPS))
    plan = plan_head(
        settings, tiny_target, TokenMap.from_ids(range(tiny_target.vocab_size - 60), tiny_target.vocab_size)
    )
    prompts = _prompts(tiny_target)
    batch = answered(prompts, answers_of(tiny_target, prompts, SamplingParams(max_tokens=TOKENS)))
    head = start_head(plan, settings, tiny_target, 0, [batch])
    side = TargetSide(tiny_target, plan.token_map, plan.aux_layer_ids, "fp32")
    model = trained_head(plan, settings, head, side.teacher)
    fit(model, side, batch, STEPS, updates=45)
    head.eval().requires_grad_(False)
    yield model, side, DraftCheckpoint(head=head, token_map=plan.token_map), prompts
    side.capture.remove()


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_the_forecast_is_the_engine(tiny_target, trained, temperature):
    """fp32, chain of 3: every rollout's counted verify steps accept the same number of drafts in both.

    A shift between training and serving, a wrong mask at an answer's ends, or another rule for steps that the end cuts
    would each show. At a temperature the drafts are compared with what was drawn, not with the argmax.
    """
    model, side, draft, prompts = trained
    engine = Engine(tiny_target, draft, DraftShape.chain(STEPS))
    params = [SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed) for seed in range(PROMPTS)]
    requests = engine.generate(prompts, params)
    engine.close()
    served = [[event.accepted for event in request.events if not event.truncated] for request in requests]
    batch = answered(prompts, [request.output_ids for request in requests])
    assert replayed_steps(model, side, [batch], STEPS) == served
    accepted = {count for steps in served for count in steps}
    assert accepted == set(range(STEPS + 1)), "chains of every depth must occur, else little is compared"
    forecast = forecast_accept_length(model, side, [batch], STEPS)
    every = [count for steps in served for count in steps]
    assert forecast.verify_steps == len(every)
    assert forecast.accept_length == pytest.approx(1 + sum(every) / len(every), rel=1e-12)


def test_the_unroll_scores_as_the_engine_does(tiny_target, trained, monkeypatch):
    """Logits of every step of a drafted chain, after some verify steps, against those of the unroll over the same
    tokens: 1e-3 of values that spread over tens. Another norm, state, position, layer or key is off by far more."""
    model, side, draft, prompts = trained
    engine = Engine(tiny_target, draft, DraftShape.chain(STEPS))
    for prompt in prompts[:4]:
        engine.add_request(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(4):
        engine.step()
    block = isinstance(model.head, DSparkHead)
    rollout = BlockRollout if block else DraftRollout
    scored, inner = [], rollout.logits
    monkeypatch.setattr(rollout, "logits", lambda *args: scored.append(inner(*args)) or scored[-1])
    with torch.inference_mode():
        tree = engine.drafter.propose(engine._running, engine._rounds.set_rows(engine._running)[0])
    assert len(scored) == STEPS
    for row, request in enumerate(engine._running):
        written = request.prompt_ids + request.output_ids
        root = len(written) - 2
        inputs = side.inputs(answered([written + tree.tokens[row, 1:].tolist()], [[0, 0]]), STEPS)
        with torch.no_grad():
            steps = (unroll_blocks if block else unroll)(model.head, inputs.aux, inputs.embeds, STEPS)
            states = torch.stack([state[0, root] for state in steps])
            if block:
                states = model.head.after(states, tree.tokens[row, :STEPS])
            logits = model.score(states, lambda x, rows, *_: F.linear(x, rows))
        served = torch.stack([one[row].flatten() for one in scored])
        torch.testing.assert_close(logits, served, atol=1e-3, rtol=1e-3)
    engine.close()


def test_a_copy_of_the_weights_forecasts_as_the_head_in_training(tiny_target, trained):
    """What a head holds of the target (the embedding of a mask) is not among its weights."""
    model, side, draft, prompts = trained
    config = draft.head.config
    batch = answered(prompts, [prompt[:1] * 8 for prompt in prompts])
    plan = HeadPlan(config, draft.token_map, config.features.layer_ids(tiny_target.n_layers))
    head = HeadSettings(kind=draft.kind, layers=config.layers * config.mtp_layers)
    settings = TrainSettings(head=head, unroll=UnrollSettings(ttt_steps=STEPS))
    copied = head_of(model.head.state_dict(), config, tiny_target.device, torch.float32)
    again = trained_head(plan, settings, copied, side.teacher).eval()
    inputs = side.inputs(batch, STEPS)
    arguments = (inputs.aux, inputs.embeds, inputs.supervision, None, side.token_map.to_draft(inputs.labels), None)
    with torch.no_grad():
        (_, _, hits), (_, _, wanted) = (one(*arguments, inputs.before) for one in (again, model))
        states = [one.head.first_hidden(inputs.aux) for one in (again, model)]
    assert all(torch.equal(*pair) for pair in zip(hits, wanted, strict=True))
    assert torch.equal(*states)
    if draft.kind == "dspark":
        assert torch.equal(copied.mask, model.head.mask) and not copied.mask.isnan().any()
