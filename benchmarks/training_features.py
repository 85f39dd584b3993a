"""A variant of `few_tokens.py`: an auxiliary loss on features, as EAGLE-1 and 2 have it, that fades out.

What EAGLE-3 gave up (arXiv 2503.01840) because it binds a head with much data; with little data it may guide the start.
Shapes: N supervised states, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.heads.draft_head import Project
from toolkit.train.loop import Trainer
from toolkit.train.loss import DraftLoss
from toolkit.train.trained_head import TrainedHead

WEIGHT = 10.0  # of the distance beside the token loss, at the start: EAGLE's 1 to 0.1
FADES = 0.5  # share of the training after which it is gone


class WithFeatures(TrainedHead):
    """Adds weight times the smooth L1 distance (mean over H) of each normed state to the target's last one."""

    weight = 0.0

    def score(self, states: Tensor, project: Project) -> Any:
        def both(read: Tensor, *matrix: Any) -> Any:
            loss, losses, best = project(read, *matrix)
            features = project.teacher.states[project.rows]
            distances = F.smooth_l1_loss(read.float(), features.float(), reduction="none").mean(-1)
            return loss + self.weight * (project.weight * distances).sum(), losses, best

        learns = isinstance(project, DraftLoss) and self.weight > 0
        return super().score(states, both if learns else project)


class FadingFeaturesTrainer(Trainer):
    """The product's trainer; the logged losses are those of the tokens alone."""

    def _trained(self, head: Any) -> torch.nn.Module:
        unroll = self.settings.unroll
        return WithFeatures(head, unroll.step_decay, unroll.loss, checkpointing=unroll.checkpointing)

    def optimise(self, step: int, indices: list[int]) -> dict[str, Any]:
        self.model.module.weight = WEIGHT * max(0.0, 1.0 - step / (FADES * self.steps))
        return super().optimise(step, indices)
