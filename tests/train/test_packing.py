"""Several sequences in one row, and steps that backward computes anew: other layouts of the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from toolkit.data.batches import Example, collate
from toolkit.errors import TargetError
from toolkit.targets.features import check_packing
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import anchors_of, plan_head, start_head, trained_head
from toolkit.train.step import micro_step, supervised_counts
from toolkit.train.target_side import TargetSide, anchored
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

K = 3
HEADS = {
    "eagle3-window": {"sliding_window": 5, "norm_output": True},
    "mtp-two-layers": {"kind": "mtp", "layers": 2},
}


def _examples(vocabulary: int) -> list[Example]:
    """Lengths that pack into rows of one, two and three; prompts of one token, so that answers nearly touch."""
    generator = torch.Generator().manual_seed(5)
    examples = []
    for index, length in enumerate((9, 21, 6, 12, 5, 4)):
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        prompt = 1 + index % 2
        examples.append(Example(str(index), ids, [False] * prompt + [True] * (length - prompt)))
    return examples


@pytest.fixture(scope="module", params=HEADS)
def made(request, tiny_target):
    settings = TrainSettings(head=HeadSettings(**HEADS[request.param]), unroll=UnrollSettings(ttt_steps=K))
    plan = plan_head(settings, tiny_target, TokenMap.from_ids(range(0, 393, 2), tiny_target.vocab_size))
    side = TargetSide(tiny_target, plan.token_map, plan.aux_layer_ids, "fp32")
    yield start_head(plan, settings, tiny_target, seed=0), side, plan, settings
    side.capture.remove()


def _step(made, batch, **options):
    """Loss by step, right predictions by step, and the head's gradients."""
    head, side, plan, settings = made
    settings = replace(settings, unroll=replace(settings.unroll, **options))
    model = trained_head(plan, settings, head, side.teacher)
    drawn = anchors_of(plan, settings, seed=0)
    loss, by_step, right, *_ = micro_step(model, side, batch, supervised_counts(batch, K), K, drawn)
    return by_step, right, torch.autograd.grad(loss, list(head.parameters()))


def test_packed_rows_train_as_single_ones(made, tiny_target):
    """fp32: same losses, hits and gradients to 1e-4. A key, feature, position or supervised pair of another document
    in the row moves each of them by far more; so would a target that reads across."""
    examples = _examples(tiny_target.vocab_size)
    packed = collate(examples, pad_id=0, pack=True)
    assert packed.input_ids.shape == (3, 21) and packed.starts is not None
    single = collate(examples, pad_id=0)
    assert supervised_counts(packed, K).tolist() == supervised_counts(single, K).tolist()
    mine, theirs = _step(made, packed), _step(made, single)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(mine[1], theirs[1])
    for a, b in zip(mine[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-9)


def test_as_many_anchors_as_roots_change_nothing(made, tiny_target):
    """The anchored steps are those of the full unroll at the anchors: same losses, hits and gradients to 1e-4. Another
    embedding, position, document or key of an anchor would move them."""
    batch = collate(_examples(tiny_target.vocab_size), pad_id=0, pack=True)
    mine, theirs = _step(made, batch, anchors=99), _step(made, batch)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine[1], theirs[1])
    for a, b in zip(mine[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-9)


def test_a_drawn_anchor_stands_for_all_roots(made, tiny_target):
    """The mean over all draws of one root of one row is the full loss: drawn from too many roots, too few, or weighed
    by another number, it is not. (200 draws of 10 roots miss one with a chance below 1e-8; the seeds are fixed.)"""
    batch = collate(_examples(tiny_target.vocab_size)[3:4], pad_id=0)
    head, side, plan, settings = made
    model, counts = trained_head(plan, settings, head, side.teacher), supervised_counts(batch, K)
    found = {}
    for seed in range(200):
        anchors = partial(anchored, count=1, full=settings.head.layers if settings.head.kind == "mtp" else 1, seed=seed)
        root = anchors(side.inputs(batch, K).supervision, batch.response.shape).anchors.item()
        if root not in found:
            with torch.no_grad():
                found[root] = micro_step(model, side, batch, counts, K, anchors)[1]
    with torch.no_grad():
        full = micro_step(model, side, batch, counts, K)[1]
    torch.testing.assert_close(torch.stack(list(found.values())).mean(0), full, rtol=1e-4, atol=1e-5)


def test_checkpointing_gives_the_same_gradients(made, tiny_target):
    """The same bits: backward runs the same operations again. An attention that remembered a step twice, or that saw
    the keys of later steps when computed anew, would not give them."""
    batch = collate(_examples(tiny_target.vocab_size), pad_id=0, pack=True)
    plain, again = _step(made, batch), _step(made, batch, checkpointing=True)
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[2], again[2], strict=True))


def test_a_target_that_reads_across_documents_is_refused(tiny_target, monkeypatch):
    """A model that ignores positions would train the head on features of mixed conversations."""
    check_packing(tiny_target)
    monkeypatch.setitem(tiny_target.__dict__, "body", _Deaf(tiny_target.body))
    with pytest.raises(TargetError, match="train.data.pack=false"):
        check_packing(tiny_target)


class _Deaf(torch.nn.Module):
    """A body that drops its positions."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, position_ids=None, **kwargs):
        return self.inner(**kwargs)
