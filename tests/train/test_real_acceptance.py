"""accept_length by the engine in the middle of a training, beside the forecasts on the same prompts."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.batches import Example, collate
from toolkit.errors import TrainError
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train import evaluation
from toolkit.train.evaluation import Evaluation
from toolkit.train.forecast_check import ReplayedForecasts, explain_gap
from toolkit.train.initialise import initialise_from_target
from toolkit.train.real_acceptance import Measurement, RealAcceptance, check_engine_runs
from toolkit.train.state import Position, best_path
from toolkit.train.step import TargetSide, micro_step, supervised_counts
from toolkit.train.trained_head import TrainedHead
from toolkit.train.training_data import HeldOutPrompt, HeldOutPrompts, read_held_out
from toolkit.train_settings import DataSettings, EvaluationSettings, TrainSettings, UnrollSettings
from toolkit.weights import load_tensors

STEPS, TOKENS = 3, 32
SETTINGS = TrainSettings(
    precision="fp32",
    unroll=UnrollSettings(ttt_steps=STEPS),
    data=DataSettings(micro_batch=3),
    evaluation=EvaluationSettings(
        real_max_tokens=TOKENS, real_shapes=("3,1,4", "2,1,3", "3,4,12"), real_temperatures=(0.0, 0.2)
    ),
)


@pytest.fixture(scope="module")
def training(tiny_target, tiny_draft):
    """A head in training that knows its answers by heart, the prompts, and the batch it learned."""
    generator = torch.Generator().manual_seed(11)
    asked = [torch.randint(3, tiny_target.vocab_size, (4 + at,), generator=generator).tolist() for at in range(8)]
    engine = Engine(tiny_target)
    answers = [one.output_ids for one in engine.generate(asked, SamplingParams(max_tokens=TOKENS))]
    engine.close()
    prompts = [HeldOutPrompt(str(at), *pair, [], 0.0) for at, pair in enumerate(zip(asked, answers, strict=True))]
    texts = [Example(one.id, one.prompt + one.answer, [False] * len(one.prompt) + [True] * TOKENS) for one in prompts]
    batch = collate([replace(text, response=text.response[: len(text.input_ids)]) for text in texts], pad_id=0)
    token_map = TokenMap.from_ids(range(tiny_target.vocab_size - 60), tiny_target.vocab_size)
    config = Eagle3Config.from_dict({**tiny_draft.head.config.to_dict(), "draft_vocab_size": token_map.size})
    model = TrainedHead(Eagle3Head(config), 0.8)
    initialise_from_target(model.head, tiny_target, token_map, [batch], seed=0)
    side = TargetSide(tiny_target, token_map, config.aux_layer_ids, "fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    counts = supervised_counts(batch, STEPS, 0)
    for _ in range(50):
        loss = micro_step(model, side, batch, counts, STEPS, 0).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    yield model, side, HeldOutPrompts(prompts), batch
    side.capture.remove()


def _evaluation(training, directory, rows: list) -> Evaluation:
    model, side, prompts, batch = training
    accelerator = SimpleNamespace(is_main_process=True, get_state_dict=lambda module: module.state_dict())
    data, metrics = SimpleNamespace(held_out=[batch], pad_id=0), SimpleNamespace(write=rows.append)
    trained = lambda head: TrainedHead(head, 0.8)  # noqa: E731
    one = Evaluation(accelerator, side, data, model.head.config, trained, SETTINGS, directory, metrics)
    one.measurement = Measurement(side.target, prompts, SETTINGS, seed=0)
    return one


def test_the_engine_and_both_forecasts_agree(training, tmp_path, monkeypatch, caplog):
    """In fp32 the replay counts the same steps as the engine, over the engine's answers and (greedy) the rollouts, for
    a chain as deep as the unroll and a shorter one. Another head, position, token map or cut of the answers would
    change the counts. A separate engine gives the same values. The measurement leaves no hook or inference tensor."""
    monkeypatch.setattr(evaluation, "broadcast", lambda tensor: tensor)
    model, side, prompts, batch = training
    rows: list = []
    hooks = [len(layer._forward_pre_hooks) for layer in side.target.layers]
    position = _evaluation(training, tmp_path, rows)(model, Position(step=7), forecast=False, real=True)
    assert hooks == [len(layer._forward_pre_hooks) for layer in side.target.layers]
    (row,) = rows
    chains = [one for one in row["real"] if one["top_k"] == 1]
    assert [(one["num_steps"], one["temperature"]) for one in chains] == [(3, 0.0), (3, 0.2), (2, 0.0), (2, 0.2)]
    for one in chains:
        assert one["forecast_on_answers"] == pytest.approx(one["accept_length"], rel=1e-12)
        assert one["forecast_on_rollouts"] == (one["forecast_on_answers"] if one["temperature"] == 0 else None)
    lengths = {one["name"]: one["accept_length"] for one in row["real"]}
    assert 1.2 < lengths["chain 2 T=0"] < lengths["chain 3 T=0"] <= lengths["tree 3x4/12 T=0"]
    engine = Engine(side.target, DraftCheckpoint(model.head, side.token_map), DraftShape.chain(3))
    alone = engine.generate([one.prompt for one in prompts.prompts], SamplingParams(max_tokens=TOKENS))
    engine.close()
    assert lengths["chain 3 T=0"] == summarise(event for one in alone for event in one.events).accept_length
    assert position.best_real == row["real_accept_length"] == pytest.approx(sum(lengths.values()) / 6)
    best = load_tensors(best_path(tmp_path, 7))
    assert all(torch.equal(best[name], value) for name, value in model.head.state_dict().items())
    assert "likely cause" not in caplog.text
    micro_step(model, side, batch, supervised_counts(batch, STEPS, 0), STEPS, 0).loss.backward()


def test_a_measurement_that_cannot_be_compared_is_warned_of(training, monkeypatch, caplog):
    """A training that never compares forecast and engine must not look like a training in which they agree."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    _, side, prompts, _ = training
    Measurement(side.target, prompts, SETTINGS, seed=0)
    assert not caplog.text
    Measurement(side.target, HeldOutPrompts(prompts.prompts[:1]), SETTINGS, seed=0)
    assert "cannot be compared with the engine's accept_length: one held-out prompt gives no interval" in caplog.text
    caplog.clear()
    deep = replace(SETTINGS.evaluation, real_shapes=("9,1,10", "3,4,12"))
    Measurement(side.target, prompts, replace(SETTINGS, evaluation=deep), seed=0)
    assert "no chain of at most train.unroll.ttt_steps levels" in caplog.text and "interval" not in caplog.text


def _measured(training, **changed) -> RealAcceptance:
    answers = [one.answer for one in training[2].prompts]
    stats = summarise([])
    measured = RealAcceptance(DraftShape.chain(3), 0.0, stats, (1.4, 1.6), answers, [], 1.0)
    return replace(measured, **{"stats": replace(stats, verify_steps=9, accept_length=1.5), **changed})


CHAT = [{"role": "user", "content": "the lazy dog"}, {"role": "assistant", "content": "jumps"}]


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("agree", None),
        ("head", "the head is trained in bfloat16 and drafts in float32"),
        ("template", "8 of 8 prompts of the rollouts were rendered with another chat template"),
        ("token map", "the token map covers 0% of the tokens that the target writes now and "),
        ("near-ties", "answers diverge from the rollouts at near-ties"),
        (
            "texts",
            "8 of 8 answers differ from the rollouts' in their first 8 tokens: .*not written by this target.*float32",
        ),
    ],
)
def test_the_warning_of_a_gap_names_its_cause(training, tiny_target, case, cause):
    """Each cause alone; the texts have no other fault. A warning with a wrong cause misleads the user."""
    _, side, prompts, _ = training
    replayed = ReplayedForecasts(on_rollouts=1.9, on_answers=1.5)
    measured, token_map = _measured(training), side.token_map
    if case == "agree":
        replayed = ReplayedForecasts(on_rollouts=1.61, on_answers=1.5)
    elif case == "head":
        replayed = ReplayedForecasts(on_rollouts=1.9, on_answers=1.9)
    elif case == "template":
        prompts = HeldOutPrompts([replace(one, messages=CHAT) for one in prompts.prompts])
    elif case == "token map":
        measured = _measured(training, answers=[[tiny_target.vocab_size - 1] * 9] * 8)
    elif case == "near-ties":
        measured = _measured(training, answers=[[*answer[:9], 5, *answer[10:]] for answer in measured.answers])
    else:
        measured = _measured(training, answers=[[5, *answer] for answer in measured.answers])
    precision = "bf16" if case == "head" else "fp32"
    gap = explain_gap(measured, replayed, prompts, tiny_target, token_map, precision, TOKENS)
    if cause is None:
        assert gap is None
    else:
        assert gap is not None and "lies outside [1.40, 1.60]" in gap
        assert re.search(cause, gap), gap


def test_the_target_s_own_template_counts_as_equal(training, tiny_target):
    text = tiny_target.tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, tokenize=False)
    ids = tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert HeldOutPrompts([HeldOutPrompt("a", ids, [5], CHAT, 0.0)]).rendered_differently(tiny_target) == 0


def test_the_first_held_out_prompts(tmp_path):
    """The order of the ids decides, not that of the file, so that two runs measure the same prompts."""
    path = tmp_path / "rollouts.jsonl"

    def write(*rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def row(name, split="held_out", spans=((2, 4),)):
        return {"id": name, "split": split, "input_ids": [1, 2, 3, 4], "response_spans": spans, "provenance": {}}

    write(row("c"), row("a", "train"), row("d"), row("b"), row("0", spans=[]), row("1", spans=[[0, 4]]))
    found = read_held_out(path, 2, longest=8)
    assert [(one.id, one.prompt, one.answer) for one in found.prompts] == [("b", [1, 2], [3, 4]), ("c", [1, 2], [3, 4])]
    with pytest.raises(TrainError, match="no usable held-out prompt.*real_every=null"):
        read_held_out(path, 2, longest=1)


def test_an_unusable_draft_shape_raises_before_training(tiny_target):
    with pytest.raises(TrainError, match="more branches than the draft vocabulary.*real_shapes"):
        check_engine_runs(tiny_target, 3, [DraftShape.parse("2,4,8")])
