"""What the trainer computes and forecasts is what the engine does (gate 3 of the design), for each kind of head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.infer.conftest import rows_of
from tests.train.conftest import answered, answers_of, fit
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.correction import plain_scores
from toolkit.heads.dspark import DSparkConfig, DSparkHead
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
    "jetspec": {"kind": "dspark", "layers": 2, "markov_rank": 0, "causal": True},
    "dfly": {"kind": "dspark", "correction": "dfly", "causal": True},
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
        tree = engine.drafter.propose(engine._running, rows_of(engine, engine._running))
    assert len(scored) == STEPS
    for row, request in enumerate(engine._running):
        written = request.prompt_ids + request.output_ids
        root = len(written) - 2
        inputs = side.inputs(answered([written + tree.tokens[row, 1:].tolist()], [[0, 0]]), STEPS)
        with torch.no_grad():
            steps = (unroll_blocks if block else unroll)(model.head, inputs.aux, inputs.embeds, STEPS)
            states = torch.stack([state[0, root] for state in steps])
            if block:
                states = model.head.after(states, tree.tokens[row, :STEPS], tiny_target.embed_tokens)
            logits = model.score(states, lambda x, rows, *_, **own: plain_scores(x, rows, **own))
        served = torch.stack([one[row].flatten() for one in scored])
        torch.testing.assert_close(logits, served, atol=1e-3, rtol=1e-3)
    engine.close()


@pytest.mark.parametrize("roots", [None, [1, 4, 5]], ids=["all", "anchors"])
def test_a_causal_block_is_the_dense_form_and_its_gradient(tiny_target, roots):
    """States and gradients by attention over context and block with a written mask; the other mask gives others."""
    torch.manual_seed(3)
    size, width, length = 4, tiny_target.config.hidden_size, 9
    config = DSparkConfig.from_target_config(
        tiny_target.config, vocab_size=tiny_target.vocab_size, draft_vocab_size=tiny_target.vocab_size,
        aux_layer_ids=(1, 2, 3), num_hidden_layers=2, block_size=size, markov_rank=0, confidence=False,
        confidence_with_markov=False, causal=True,
    )  # fmt: skip
    head = DSparkHead(config)
    head.read_target(tiny_target.embed_tokens)
    features, embeds = torch.randn(2, length, 3 * width), torch.randn(2, length, width)
    anchors = None if roots is None else torch.tensor([roots, roots])
    chosen = torch.arange(length).expand(2, -1) if anchors is None else anchors

    def dense() -> torch.Tensor:
        rows = []
        for row in range(2):
            known = head.first_hidden(features[row])
            for root in chosen[row].tolist():
                context: list[tuple[torch.Tensor, torch.Tensor]] = []
                upto = known[: root + 1]
                head.write_context(upto, torch.arange(root + 1), 99, lambda k, v, to=context: to.append((k, v)))
                layers = iter(context)

                def attend(q, k, v, layers=layers, root=root):
                    k, v = (torch.cat(pair).transpose(0, 1) for pair in zip(next(layers), (k, v), strict=True))
                    sees = torch.ones(size, root + 1 + size, dtype=torch.bool).tril(root + 1)
                    found = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=sees, enable_gqa=True)
                    return found.transpose(0, 1)

                token = embeds[row, min(root + 1, length - 1)].expand(size, -1)
                rows.append(head(token, token, root + 1 + torch.arange(size), attend, 99))
        return torch.stack(rows).view(2, -1, size, width)

    def unrolled() -> torch.Tensor:
        return torch.stack(list(unroll_blocks(head, features, embeds, size, anchors=anchors)), dim=2)

    found, wanted = unrolled(), dense()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    parameters = [*head.fc.parameters(), *head.layers.parameters()]
    weight = torch.randn_like(found)
    gradients = [torch.autograd.grad((one * weight).sum(), parameters) for one in (found, wanted)]
    torch.testing.assert_close(*gradients, atol=2e-3, rtol=1e-3)
    head.config = replace(config, causal=False)
    whole = unrolled()
    assert all((whole[:, :, at] - found[:, :, at]).abs().max() > 1e-2 for at in range(size - 1))


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
