"""The target's forward with fused layers gives the features of transformers' own."""

from __future__ import annotations

import pytest
import torch

from tests.infer.attention.test_fused_layer import FUSED, build, kernels_for_cpu
from toolkit.data.batches import Example, collate
from toolkit.infer.attention import fused_layer
from toolkit.targets.features import AuxCapture, target_features
from toolkit.train.target_side import OnlineFeatures

__all__ = ["kernels_for_cpu"]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("family", FUSED)
def test_features_are_those_of_the_layers_apart(family, pack, kernels_for_cpu, monkeypatch) -> None:
    """float32, 1e-5. A mask that got lost lets packed texts, or positions before a window, see each other."""
    target, calls = build(family, **FUSED[family]), []
    run = fused_layer.FusedLayer.__call__
    texts = [Example(str(size), [3 + 7 * at % 300 for at in range(size)], [True] * size) for size in (19, 9, 8)]
    batch, capture = collate(texts, pad_id=0, pack=pack), AuxCapture(target, (1, 2))
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
