"""What the trainer forecasts is what the engine does (gate 3 of the design): the same verify steps, one by one."""

from __future__ import annotations

import pytest
import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.batches import Example, collate
from toolkit.infer.draft_tree import DraftShape
from toolkit.infer.engine import Engine
from toolkit.infer.sampling.sampling_params import SamplingParams
from toolkit.models.eagle3 import Eagle3Config, Eagle3Head
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.initialise import initialise_from_target
from toolkit.train.step import TargetSide, forecast_accept_length, micro_step, replayed_steps, supervised_counts
from toolkit.train.trained_head import TrainedHead

STEPS, TOKENS, PROMPTS = 3, 40, 12


def _prompts(target) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(4, 12, (PROMPTS,), generator=generator).tolist()
    return [torch.randint(3, target.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _batch(prompts, answers):
    examples = [
        Example(str(index), prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    return collate(examples, pad_id=0)


@pytest.fixture(scope="module")
def trained(tiny_target, tiny_draft):
    """A head that knows its answers by heart, so that chains of every depth occur; its unroll, and the prompts."""
    token_map = TokenMap.from_ids(range(tiny_target.vocab_size - 60), tiny_target.vocab_size)
    config = Eagle3Config.from_dict({**tiny_draft.head.config.to_dict(), "draft_vocab_size": token_map.size})
    head = Eagle3Head(config)
    prompts = _prompts(tiny_target)
    engine = Engine(tiny_target)
    answers = [request.output_ids for request in engine.generate(prompts, SamplingParams(max_tokens=TOKENS))]
    engine.close()
    batch = _batch(prompts, answers)
    initialise_from_target(head, tiny_target, token_map, [batch], seed=0)
    model = TrainedHead(head, STEPS, 0.8)
    side = TargetSide(tiny_target, token_map, config.aux_layer_ids, "fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    counts = supervised_counts(batch, STEPS, 0)
    for _ in range(60):
        loss, _, _ = micro_step(model, side, batch, counts, STEPS, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.eval().requires_grad_(False)
    yield model, side, DraftCheckpoint(head=head, token_map=token_map), prompts
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
    batch = _batch(prompts, [request.output_ids for request in requests])
    assert replayed_steps(model, side, [batch], STEPS) == served
    accepted = {count for steps in served for count in steps}
    assert accepted == set(range(STEPS + 1)), "chains of every depth must occur, else little is compared"
    forecast = forecast_accept_length(model, side, [batch], STEPS)
    every = [count for steps in served for count in steps]
    assert forecast.verify_steps == len(every)
    assert forecast.accept_length == pytest.approx(1 + sum(every) / len(every), rel=1e-12)
