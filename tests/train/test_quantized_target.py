"""Training on a quantised target: what it teaches, and what a head copies of it."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.engine.cpu_door import load_target
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.target_side import Teacher
from toolkit.train.warm_start import initialise_from_target


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
        assert initialise_from_target(head, target, tiny_draft.token_map, [], seed=0) is None
    for (name, plain), rounded in zip(heads[0].named_parameters(), heads[1].parameters(), strict=True):
        assert (plain - rounded).abs().max() <= 0.51 * plain.abs().max() / 127, name
    assert not torch.equal(heads[0].lm_head.weight, heads[1].lm_head.weight)
