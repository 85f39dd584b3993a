"""Which predictions are supervised, what teaches them, and what the unrolled head makes of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.infer.attention.test_fused_layer import FUSED, build, kernels_for_cpu
from tests.train.conftest import write_tiny_rollouts
from toolkit.data.batches import Example, collate
from toolkit.data.examples import load_examples
from toolkit.infer.attention import fused_layer
from toolkit.infer.engine.cpu_door import load_target
from toolkit.targets.features import AuxCapture, target_features
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.step import TrainedHead, micro_step, supervised_counts
from toolkit.train.target_side import OnlineFeatures, TargetSide, Teacher, TeacherRows, plan_supervision
from toolkit.train.ttt import unroll
from toolkit.train.warm_start import initialise_from_target
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

#          p  p  p  A0 A1 A2 E  \n p
RESPONSE = [0, 0, 0, 1, 1, 1, 1, 0, 0]


def _nine() -> torch.Tensor:
    return torch.tensor([RESPONSE], dtype=torch.bool)


def test_nine_tokens():
    """Exactly A1, A2 and E are predicted at every step; A0 (prefill's) and what follows the answer never are."""
    supervision = plan_supervision(_nine(), steps=3)
    for step, (roots, rows) in enumerate(zip(supervision.roots, supervision.rows, strict=True)):
        assert (roots + 2 + step).tolist() == [4, 5, 6]
        # The teacher row stands at the position from which the token is predicted.
        assert supervision.teacher_positions[rows].tolist() == [3, 4, 5]
    assert supervision.counts.tolist() == [3, 3, 3]


def test_rows_of_a_batch_never_cross_sequences():
    """A root near the end of row 0 must not be paired with a teacher row of row 1."""
    response = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    supervision = plan_supervision(response, steps=4)
    for step, (roots, rows) in enumerate(zip(supervision.roots, supervision.rows, strict=True)):
        positions = supervision.teacher_positions[rows]
        assert torch.equal(positions, roots + 1 + step)
        assert torch.equal(positions // 6, roots // 6)


def _rows(probs: torch.Tensor, kept: torch.Tensor) -> TeacherRows:
    """A teacher whose states are its distributions."""
    return TeacherRows(probs, torch.zeros(len(probs), dtype=torch.long), kept, lambda states: states)


def test_loss_is_the_decayed_mean_over_supervised_tokens(tiny_target, tiny_draft):
    """The whole forward against the formula written out: sum_k 0.8^k mean_rows CE, dropped rows counting as zero."""
    torch.manual_seed(1)
    head, steps = tiny_draft.head, 3
    aux, embeds = torch.randn(1, 9, 192), torch.randn(1, 9, 64)
    supervision = plan_supervision(_nine(), steps=steps)
    probs = torch.randn(3, head.config.draft_vocab_size).softmax(-1)
    rows = _rows(probs, torch.tensor([True, True, False]))
    draft_choice = probs.argmax(-1)
    loss, by_step, hits = TrainedHead(head, 0.8)(aux, embeds, supervision, rows, draft_choice, supervision.counts)
    expected = 0.0
    for step, hidden in enumerate(unroll(head, aux, embeds, steps)):
        for root in (2 - step, 3 - step):  # the third row is not kept
            row = root + step - 2
            term = -(probs[row] * head.logits(hidden[0, root]).log_softmax(-1)).sum() / 3
            expected += 0.8**step * term
            assert bool(hits[step][row]) == bool(head.logits(hidden[0, root]).argmax() == draft_choice[row])
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert float(loss) == pytest.approx(sum(0.8**k * float(v) for k, v in enumerate(by_step)), rel=1e-5)


def test_a_row_of_an_eagle2_head_weighs_token_and_feature(tiny_target):
    """0.1 cross-entropy + 1.0 smooth L1 to the target's state of the position that is predicted from (EAGLE's weights);
    another position's state, a sum over H, or a weight on the wrong half is far off."""
    torch.manual_seed(4)
    settings = TrainSettings(head=HeadSettings(kind="eagle2"), unroll=UnrollSettings(ttt_steps=2))
    plan = plan_head(settings, tiny_target, TokenMap.identity(tiny_target.vocab_size))
    head = start_head(plan, settings, tiny_target, seed=0)
    teacher = Teacher(tiny_target, plan.token_map)
    model = trained_head(plan, settings, head, teacher)
    last, embeds = torch.randn(1, 9, 64), torch.randn(1, 9, 64)
    supervision = plan_supervision(_nine(), steps=2)
    rows = teacher(last[0][supervision.teacher_positions])
    loss, _, _ = model(last, embeds, supervision, rows, rows.choice, supervision.counts)
    expected = 0.0
    for step, states in enumerate(unroll(model.head, last, embeds, 2)):
        for root in supervision.roots[step].tolist():
            wanted, state = last[0, root + 1 + step], states[0, root]
            logits = tiny_target.logits(state).log_softmax(-1)
            token = -(tiny_target.logits(wanted).softmax(-1) * logits).sum()
            feature = F.smooth_l1_loss(state, wanted)
            expected += 0.8**step * (0.1 * token + feature) / supervision.counts[step]
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)


def test_the_distance_of_a_head_with_a_norm_is_of_its_normed_state(tiny_draft):
    """The target's state is after its final norm; an EAGLE-3 head's is before its own."""
    torch.manual_seed(6)
    head = tiny_draft.head
    aux, embeds, wanted = torch.randn(1, 9, 192), torch.randn(1, 9, 64), torch.randn(3, 64)
    supervision = plan_supervision(_nine(), steps=1)
    size = head.config.draft_vocab_size
    rows = TeacherRows(wanted, torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool),
                       lambda states: torch.full((len(states), size), 1 / size))  # fmt: skip
    given = (aux, embeds, supervision, rows, torch.zeros(3, dtype=torch.long), supervision.counts)
    plain, heavier = (TrainedHead(head, 0.8, feature_weight=weight)(*given)[0] for weight in (0.0, 5.0))
    (states,) = unroll(head, aux, embeds, 1)
    distance = F.smooth_l1_loss(head.norm(states[0, supervision.roots[0]]), wanted)
    assert float(heavier - plain) == pytest.approx(5 * float(distance), rel=1e-3)
    assert abs(float(distance) - float(F.smooth_l1_loss(states[0, supervision.roots[0]], wanted))) > 0.01


def test_a_batch_without_supervision_gives_zero_gradients(tiny_draft):
    """A process with no rows of a short last batch must still take part in the backward pass, with zeros."""
    head = TrainedHead(tiny_draft.head, 0.8).requires_grad_(True)
    try:
        supervision = plan_supervision(torch.zeros(1, 9, dtype=torch.bool), steps=2)
        size = tiny_draft.head.config.draft_vocab_size
        rows = _rows(torch.zeros(0, size), torch.zeros(0, dtype=torch.bool))
        empty = torch.zeros(0, dtype=torch.long)
        loss, _, _ = head(torch.randn(1, 9, 192), torch.randn(1, 9, 64), supervision, rows, empty, torch.ones(2))
        loss.backward()
        assert float(loss) == 0.0
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in head.parameters())
    finally:
        head.zero_grad()
        head.requires_grad_(False)


def test_teacher_equals_the_full_logits(tiny_target, tiny_draft, monkeypatch):
    """Pieces and the sliced head must give what [M, V] logits in one piece would."""
    monkeypatch.setattr("toolkit.train.target_side.CHOICE_SCORES", 4 * tiny_target.vocab_size)
    monkeypatch.setattr("toolkit.train.target_side.LEAST_ROWS", 1)
    torch.manual_seed(2)
    hidden = torch.randn(11, tiny_target.hidden_size)
    teacher = Teacher(tiny_target, tiny_draft.token_map)
    rows = teacher(hidden)
    full = tiny_target.logits(hidden)
    wanted = full[:, tiny_draft.token_map.ids].softmax(-1)
    torch.testing.assert_close(rows.probs(slice(0, 11)), wanted)
    torch.testing.assert_close(rows.probs(slice(3, 7)), wanted[3:7])
    assert torch.equal(rows.choice, full.argmax(-1))
    assert torch.equal(rows.in_draft_vocab, tiny_draft.token_map.t2d[full.argmax(-1)])
    assert 0 < int(rows.in_draft_vocab.sum()) < 11, "the example must hold both kinds of rows"


STEPS = 3


@pytest.fixture(scope="module")
def path(tiny_target, tmp_path_factory):
    path = tmp_path_factory.mktemp("greedy") / "rollouts.jsonl"
    write_tiny_rollouts(tiny_target, path, count=8)
    return path


def _batch(target, path, *written):
    """The rollouts of the tiny target with these provenances, the last one for all that are left."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for index, row in enumerate(rows):
        row["provenance"] = written[min(index, len(written) - 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return collate(load_examples(path, "train", 64, target.name)[0], pad_id=0)


def _step(target, draft, batch):
    """The step, and how many of the target's choices it computed."""
    side = TargetSide(target, draft.token_map, draft.head.config.aux_layer_ids, "fp32")
    computed: list[int] = []
    choice = side.teacher.choice
    side.teacher.choice = lambda hidden: computed.append(len(hidden)) or choice(hidden)
    model = TrainedHead(draft.head, 0.8)
    micro = micro_step(model, side, batch, supervised_counts(batch, STEPS), STEPS)
    side.capture.remove()
    return micro, sum(computed)


def test_only_greedy_rollouts_speak_for_the_argmax(tiny_target, tiny_draft, path):
    """Losses and right predictions are those of the computed argmax, to the last bit; what was sampled, written by
    another target, or has no provenance is computed, row by row."""
    own = {"target": tiny_target.name, "temperature": 0.0}
    known, none_computed = _step(tiny_target, tiny_draft, _batch(tiny_target, path, own))
    computed, every = _step(tiny_target, tiny_draft, _batch(tiny_target, path, None))
    assert none_computed == 0 < every
    assert torch.equal(known.by_step, computed.by_step) and torch.equal(known.right, computed.right)
    for other in (own | {"temperature": 1.0}, own | {"target": "another"}, {"temperature": 0.0}):
        mixed, some = _step(tiny_target, tiny_draft, _batch(tiny_target, path, own, own, own, other))
        assert 0 < some < every and torch.equal(mixed.right, computed.right)
    greedy = _batch(tiny_target, path, own)
    wrong = greedy.input_ids.clone()
    wrong[greedy.response] = tiny_draft.token_map.ids[0]
    changed = _step(tiny_target, tiny_draft, replace(greedy, input_ids=wrong))[0]
    assert not torch.equal(changed.right, known.right), "the step reads the rollout's ids"


@pytest.fixture(scope="module")
def quantized(tiny_target_directory) -> Target:
    return load_target(tiny_target_directory, quantization="int8", dtype="float32")


def test_the_teacher_is_the_quantised_target(quantized):
    """Training must learn what the quantised target says: its choice, and its distribution on the draft vocabulary."""
    token_map = TokenMap.from_ids(range(0, quantized.vocab_size, 2), quantized.vocab_size)
    hidden = torch.randn(20, quantized.hidden_size, generator=torch.Generator().manual_seed(5))
    logits = quantized.logits(hidden)
    rows = Teacher(quantized, token_map)(hidden)
    assert torch.equal(rows.choice, logits.argmax(-1))
    torch.testing.assert_close(rows.probs(slice(0, 20)), logits[:, token_map.ids].softmax(-1), rtol=1e-4, atol=1e-6)


def test_a_head_starts_from_the_rounded_weights(quantized, tiny_target, tiny_draft):
    """Every part that a plain target gives is copied, to the rounding of its weights: nothing is left random."""
    heads = [type(tiny_draft.head)(tiny_draft.head.config) for _ in range(2)]
    for head, target in zip(heads, (tiny_target, quantized), strict=True):
        initialise_from_target(head, target, tiny_draft.token_map, [], seed=0)
    for (name, plain), rounded in zip(heads[0].named_parameters(), heads[1].parameters(), strict=True):
        assert (plain - rounded).abs().max() <= 0.51 * plain.abs().max() / 127, name
    assert not torch.equal(heads[0].lm_head.weight, heads[1].lm_head.weight)


__all__ = ["kernels_for_cpu"]


@pytest.mark.parametrize("family", ["llama-bias", "mistral", "qwen3"])
def test_features_are_those_of_the_layers_apart(family, kernels_for_cpu, monkeypatch) -> None:
    """float32, 1e-5. A mask that got lost lets packed texts, or positions before a window, see each other."""
    target, calls = build(family, **FUSED[family]), []
    run = fused_layer.FusedLayer.__call__
    texts = [Example(str(size), [3 + 7 * at % 300 for at in range(size)], [True] * size) for size in (19, 9, 8)]
    batch, capture = collate(texts, pad_id=0, pack=True), AuxCapture(target, (1, 2))
    wanted = target_features(target, capture, batch.input_ids, batch.starts)
    features = OnlineFeatures(target, capture)
    counted = lambda *given, **more: (calls.append(given), run(*given, **more))[1]  # noqa: E731
    monkeypatch.setattr(fused_layer.FusedLayer, "__call__", counted)
    found = features(batch)
    assert len(calls) == target.n_layers
    for row, start, end in batch.sequences():
        for mine, theirs in ((found.aux, wanted.aux), (found.last, wanted.last)):
            torch.testing.assert_close(mine[row, start:end], theirs[row, start:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("why", ["training", "cpu"])
def test_the_layers_stay_apart(why, request) -> None:
    """The optimizer of a target in training holds its weights where they are."""
    if why == "training":
        request.getfixturevalue("kernels_for_cpu")
    target = build("llama")
    target.model.requires_grad_(why == "training")
    places = [one.data_ptr() for one in target.model.parameters()]
    OnlineFeatures(target, AuxCapture(target, (1,)))
    assert [one.data_ptr() for one in target.model.parameters()] == places
