"""The preview marks exactly what the loss mask supervises."""

from __future__ import annotations

import torch

from toolkit.data.batches import supervised_mask
from toolkit.data.preview import SUPERVISED, token_kinds


def test_kinds_are_the_loss_mask():
    """Drawn by another rule than the training's, a preview would reassure about the wrong tokens."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        response = torch.rand(12, generator=generator) < 0.6
        mask = supervised_mask(response[None], 0)[0]
        predicted = (mask.nonzero().squeeze(-1) + 2).tolist()
        kinds = token_kinds(response.tolist())
        # Token 1 has no root before it: two real tokens precede every answer, or there is no prompt.
        assert [at for at, kind in enumerate(kinds) if kind == SUPERVISED and at > 1] == predicted
