"""Each loss against its formula, and the tiled forward and backward against torch's own differentiation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from toolkit.train import loss as loss_module
from toolkit.train.loss import ETA, ROW_LOSSES, DraftLoss, best_tokens
from toolkit.train.target_side import TeacherRows

STATES, TEACHER_ROWS, WIDTH, VOCABULARY = 11, 5, 4, 7


def _soft(p, q, choice):
    return -(p * q.log()).sum(-1)


def _hard(p, q, choice):
    return F.nll_loss(q.log(), choice.clamp(min=0), reduction="none")


def _variation(p, q, choice):
    return 1 - torch.minimum(p, q).sum(-1)


def _hybrid(p, q, choice):
    share = (-ETA * torch.minimum(p, q).sum(-1)).exp().detach()
    return share * (p * (p / q).log()).sum(-1) + (1 - share) * _variation(p, q, choice)


def _dspark(p, q, choice):
    return 0.1 * _hard(p, q, choice) + 0.9 * _variation(p, q, choice)


FORMULAS = {
    "soft_cross_entropy": _soft,
    "hard_cross_entropy": _hard,
    "total_variation": _variation,
    "lk_hybrid": _hybrid,
    "dspark": _dspark,
}


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """Chunks of 4 states and tiles of 3, neither of which divides what comes."""
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: 4)
    monkeypatch.setattr(loss_module, "TILE_ROWS", 3)


def _problem(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, TeacherRows, torch.Tensor, torch.Tensor]:
    """States that read the teacher's rows out of order, several each; one row not kept, its right token unknown."""
    torch.manual_seed(0)
    states = torch.randn(STATES, WIDTH, dtype=dtype, requires_grad=True)
    matrix = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    probs = torch.randn(TEACHER_ROWS, VOCABULARY, dtype=torch.float64).mul(2).softmax(-1).to(dtype)
    kept = torch.tensor([True, True, False, True, True])
    teacher = TeacherRows(probs, torch.zeros(TEACHER_ROWS, dtype=torch.long), kept, lambda hidden: hidden)
    rows = torch.tensor([0, 1, 2, 3, 4, 1, 2, 4, 0, 3, 4])
    choice = torch.where(kept, probs.argmax(-1), -1)[rows]
    return states, matrix, teacher, rows, choice


def _task(name, teacher, rows, choice, dtype=torch.float64) -> DraftLoss:
    weight = torch.linspace(0.1, 0.9, STATES, dtype=dtype) * teacher.in_draft_vocab[rows]
    return DraftLoss(name, teacher, rows, choice, weight)


@pytest.mark.parametrize("name", ROW_LOSSES)
def test_a_loss_and_its_gradients_equal_the_formula(small_tiles, name):
    """float64, 1e-12: total, losses by row, gradients of states and matrix, times a factor from above."""
    states, matrix, teacher, rows, choice = _problem()
    task = _task(name, teacher, rows, choice)
    total, losses, best = task(states, matrix)
    logits = states @ matrix.T
    wanted = FORMULAS[name](teacher.states[rows], logits.softmax(-1), choice)
    kept = teacher.in_draft_vocab[rows]
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(losses[kept], wanted[kept], **close)
    torch.testing.assert_close(total, (wanted * task.weight).sum(), **close)
    assert torch.equal(best, logits.argmax(-1))
    mine = torch.autograd.grad(3 * total, (states, matrix))
    theirs = torch.autograd.grad(3 * (wanted * task.weight).sum(), (states, matrix))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **close)


def test_a_frozen_output_matrix_gets_no_gradient(small_tiles):
    states, matrix, teacher, rows, choice = _problem()
    total, _, _ = _task("soft_cross_entropy", teacher, rows, choice)(states, matrix.detach())
    total.backward()
    assert states.grad is not None and matrix.grad is None


def test_the_kernels_are_taken_on_an_nvidia_gpu_alone(monkeypatch):
    triton_loss = pytest.importorskip("toolkit.train.triton_loss")
    choose = loss_module.gpu_kernels.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert choose("cuda").score_rows is triton_loss.score_rows
    assert choose("cpu") is choose("mps") is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert choose("cuda") is None, "a T4 has no bfloat16 products"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose("cuda") is None


def test_factors_are_not_rounded():
    """bf16: a factor such as 0.8 / 1021, of the loss or from above, would be off by up to 0.4 % in every gradient."""
    torch.manual_seed(0)
    states = torch.eye(16, dtype=torch.bfloat16).requires_grad_(True)
    matrix = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
    probs, factor = torch.randn(16, 16).softmax(-1), 0.8 / 1021
    teacher = TeacherRows(probs, torch.zeros(16), torch.ones(16, dtype=torch.bool), lambda hidden: hidden)
    weights = torch.ones(16)

    def gradient(weight, above):
        task = DraftLoss("soft_cross_entropy", teacher, torch.arange(16), torch.zeros(16, dtype=torch.long), weight)
        return torch.autograd.grad(above * task(states, matrix)[0], matrix)[0]

    plain = gradient(weights, 1.0)
    assert torch.equal(gradient(weights, factor), (plain.float() * factor).bfloat16())
    exact = (matrix.detach().T.float().softmax(-1) - probs).T * factor
    torch.testing.assert_close(gradient(weights * factor, 1.0).float(), exact, rtol=2**-8, atol=0)


def test_nothing_as_wide_as_the_vocabulary_is_kept():
    """What outlives the forward is a gradient of the states and one of the matrix; logits of all rows would be larger
    than both together."""
    sizes: list[int] = []
    rows, vocabulary = 3000, 4096
    states = torch.randn(rows, 8, requires_grad=True)
    matrix = torch.randn(vocabulary, 8, requires_grad=True)
    seen: list[int] = []

    def distribution(hidden):
        seen.append(len(hidden))
        return hidden.new_full((len(hidden), vocabulary), 1 / vocabulary)

    teacher = TeacherRows(torch.zeros(rows, 1), torch.zeros(rows), torch.ones(rows, dtype=torch.bool), distribution)
    task = DraftLoss(
        "soft_cross_entropy", teacher, torch.arange(rows), torch.zeros(rows, dtype=torch.long), torch.ones(rows)
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        task(states, matrix)
    assert sizes and max(sizes) <= 8 * vocabulary
    assert sum(seen) == rows and max(seen) * vocabulary <= loss_module.CHUNK_LOGITS


def test_chunks_fit_the_memory_of_a_gpu(monkeypatch):
    """Each chunk rewrites the gradient of the output matrix. On a CPU chunks stay as they are."""
    for memory, logits in ((8e9, 2**24), (24e9, 2**26), (84.9e9, 2**28)):
        properties = SimpleNamespace(total_memory=int(memory))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, given=properties: given)
        loss_module.chunk_logits.cache_clear()
        assert loss_module.chunk_logits(torch.device("cuda", 0)) == logits
    loss_module.chunk_logits.cache_clear()
    assert loss_module.chunk_rows(8192, torch.device("cpu")) == 1024


@pytest.mark.parametrize("name", ["soft_cross_entropy", "dspark"])
def test_bias_and_soft_cap_of_a_target_s_matrix(small_tiles, name):
    """A head scored by the target's own matrix: gradients go through the family's soft cap, and the argmax sees the
    bias. Against torch's own differentiation in float64."""
    states, matrix, teacher, rows, choice = _problem()
    matrix, bias = matrix.detach(), 3 * torch.randn(VOCABULARY, dtype=torch.float64)
    weight = torch.rand(STATES, dtype=torch.float64) * teacher.in_draft_vocab[rows]

    def finish(scores):
        return torch.tanh(scores / 2.0) * 2.0

    total, losses, best = DraftLoss(name, teacher, rows, choice, weight)(states, matrix, bias, finish)
    logits = finish(F.linear(states, matrix, bias))
    expected = FORMULAS[name](teacher.states[rows], logits.softmax(-1), choice)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    mine, theirs = (torch.autograd.grad(x, states)[0] for x in (total, (weight * expected).sum()))
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert torch.equal(best, logits.argmax(-1)) and torch.equal(best_tokens(states, matrix, bias, finish), best)
    assert not torch.equal(best, (states @ matrix.T).argmax(-1)), "the bias must matter here"
