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
from toolkit.train.step import micro_step, supervised_counts
from toolkit.train.target_side import TargetSide
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings


class HeadAdapter:
    """A copy of a draft head in float32, with its optimizer (AdamW).

    target: the model that the head drafts for, unpacked; every call of `train` reads its current weights. It may be in
    training itself: outside of `train` nothing is attached to it, and it never gets gradients from here. steps: of the
    unroll, the depth that the head learns to draft; a block drafter's are those of its block. Raises `DraftDirError` if
    the head does not fit the target.
    """

    def __init__(
        self, target: Target, draft: DraftCheckpoint, *, steps: int = 3, learning_rate: float = 3e-4, batch: int = 8
    ) -> None:
        check_draft_fits(draft, target)
        config = draft.head.config
        self.target, self.steps, self.batch = target, config.drafts_at_once or max(steps, config.mtp_layers), batch
        self.head = copy.deepcopy(draft.head).cast(target.device, torch.float32).train().requires_grad_(True)
        self.plan = HeadPlan(config, draft.token_map, config.features.layer_ids(target.n_layers))
        self.settings = TrainSettings(
            head=HeadSettings(kind=draft.kind, layers=config.layers * config.mtp_layers),
            unroll=UnrollSettings(ttt_steps=self.steps),
        )
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0)

    def train(self, rollouts: Sequence[Example]) -> float:
        """One pass over the rollouts, in batches of `batch`. Returns the mean loss; nan if no id is supervised (answers
        of fewer than two ids)."""
        # Made anew: it copies rows of the target's output matrix, and its hooks would keep the states, and with them
        # the graphs, of the target's own training.
        side = TargetSide(self.target, self.plan.token_map, self.plan.aux_layer_ids, "fp32")
        model = trained_head(self.plan, self.settings, self.head, side.teacher)
        losses: list[float] = []
        try:
            for first in range(0, len(rollouts), self.batch):
                batch = collate(rollouts[first : first + self.batch], pad_id=0)
                counts = supervised_counts(batch, self.steps)
                if not counts[0]:
                    continue
                loss = micro_step(model, side, batch, counts.clamp(min=1), self.steps).loss
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
                self.optimizer.step()
                losses.append(float(loss.detach()))
        finally:
            self.optimizer.zero_grad()  # gradients are as large as the head, and the engine is next to need memory
            side.capture.remove()
        return sum(losses) / len(losses) if losses else float("nan")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The head's weights by the names of a draft directory, for `LLM.refresh_draft`."""
        return self.head.state_dict()
