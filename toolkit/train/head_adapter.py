"""Trains a draft head on rollouts that are handed over, while its target moves, as in reinforcement learning.

No recipe, files or processes: the caller's loop writes rollouts with the engine, and gives the trained weights to
`LLM.refresh_draft`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint, check_draft_fits
from toolkit.data.batches import Example, collate
from toolkit.targets.target import Target
from toolkit.train.draft_head import HeadPlan, trained_head
from toolkit.train.optimizer import CLIP
from toolkit.train.step import TargetSide, micro_step, supervised_counts
from toolkit.train.teacher import Teacher
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings


class HeadAdapter:
    """A copy of a draft head in float32, with its optimizer (AdamW).

    target: the model that the head drafts for, unpacked; every call of `train` reads its current weights. steps: of the
    unroll, the depth that the head learns to draft. Raises `DraftDirError` if the head does not fit the target.
    """

    def __init__(
        self, target: Target, draft: DraftCheckpoint, *, steps: int = 3, learning_rate: float = 3e-4, batch: int = 8
    ) -> None:
        check_draft_fits(draft, target)
        config = draft.head.config
        self.target, self.steps, self.batch = target, max(steps, config.stages), batch
        self.head = copy.deepcopy(draft.head).cast(target.device, torch.float32).train().requires_grad_(True)
        ids = config.features.layer_ids(target.n_layers)
        self.plan = HeadPlan(config, draft.token_map, ids)
        self.side = TargetSide(target, draft.token_map, ids, "fp32")
        settings = TrainSettings(
            head=HeadSettings(kind=draft.kind, layers=config.layers * config.stages),
            unroll=UnrollSettings(ttt_steps=self.steps),
        )
        self.model = trained_head(self.plan, settings, self.head, self.side.teacher)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0)

    def train(self, rollouts: Sequence[Example]) -> float:
        """One pass over the rollouts, in batches of `batch`. Returns the mean loss; nan if no id is supervised (answers
        of fewer than two ids)."""
        self.side.teacher = Teacher(self.target, self.plan.token_map)  # it copies rows of the target's output matrix
        if self.model.output is not None:
            self.model.output = self.side.teacher.shared_matrix()
        losses: list[float] = []
        for first in range(0, len(rollouts), self.batch):
            batch = collate(rollouts[first : first + self.batch], pad_id=0)
            counts = supervised_counts(batch, self.steps, shift=0)
            if not counts[0]:
                continue
            loss = micro_step(self.model, self.side, batch, counts.clamp(min=1), self.steps, 0).loss
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses) if losses else float("nan")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The head's weights by the names of a draft directory, for `LLM.refresh_draft`."""
        return self.head.state_dict()

    def close(self) -> None:
        """Remove the hooks from the target."""
        self.side.capture.remove()
