"""The EAGLE-3 recipe as others publish it, beside which `training.py` measures ours.

What SafeAILab's EAGLE (traineagle3) and SpecForge do, written anew: every weight random; the target's logits of all
positions over its whole vocabulary, in fp32; a [L, L] matrix of attention scores for each of the K steps; draft logits
of all positions kept for backward; a loss mask that is not shifted with the predictions (SpecForge issue 885); the mean
over all B*L positions, supervised or not; AdamW. Where the two differ, SpecForge's choice is taken (rate 1e-4, cosine,
the teacher's distribution computed once, not in each step). The head, the data, the target's forward and DeepSpeed are
the product's, so that only the recipe differs. Its rate and warm-up (1e-4 and 0.015, which its authors chose for half a
million samples) are the settings' own: `few_tokens.py` chooses them for the tokens there are. So is K, 4 in the demo's
recipe and 7 in SpecForge's: a chain of 4, which judges the head, drafts by the first four steps.

Shapes: B sequences, L positions, T = B*L, W feature width, H head hidden size, V and D target and draft vocabulary, K
steps, heads of width hd.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.data.batches import Batch
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.recipe import Recipe
from toolkit.train.loop import Trainer
from toolkit.train.optimizer import rate_factor, set_learning_rates
from toolkit.train_settings import TrainSettings

PUBLISHED: dict[str, dict[str, Any]] = {
    "head": {
        "kind": "eagle3",
        "layers": 1,
        "init": "random",
        "start_tokens": None,
        "lm_head": None,
        "fc_norm": False,
        "norm_output": False,
        "sliding_window": None,
    },
    "unroll": {
        "loss": "soft_cross_entropy",
        "step_decay": 0.8,
        "curriculum": (),
        "anchors": None,
        "checkpointing": False,
    },
    "optimizer": {
        "name": "adamw",
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "max_grad_norm": 0.5,
        "schedule": "cosine",
    },
    "data": {"pack": False, "supervise": "answers"},
}


def published_settings(settings: TrainSettings) -> TrainSettings:
    """The published recipe at these settings' rate, warm-up, number of steps, batch, lengths and precision."""
    sections = {name: replace(getattr(settings, name), **values) for name, values in PUBLISHED.items()}
    return replace(settings, **sections)


def shifted(x: Tensor) -> Tensor:
    """Column 0 of [B, L, ...] dropped, a column of zeros appended."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)


class DenseAttention:
    """Scores of every root with all step-0 keys [L, L], and one column for its own key of each later step."""

    def __init__(self, batch: int, length: int, device: torch.device) -> None:
        self.batch = batch
        self.future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, hd], k and v [T, kv_heads, hd] of one step -> [T, heads, hd]."""
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        self.keys.append(k.repeat_interleave(groups, dim=1))
        self.values.append(v.repeat_interleave(groups, dim=1))
        scores = q @ self.keys[0].transpose(-1, -2)
        scores = scores.masked_fill(self.future, torch.finfo(scores.dtype).min)
        own = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]
        scores = torch.cat((scores, *own), dim=-1) * q.shape[-1] ** -0.5
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        length = q.shape[2]
        out = weights[..., :length] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            out = out + weights[..., length + step, None] * value
        return out.transpose(1, 2).flatten(0, 1)


class PublishedHead(nn.Module):
    """A head with its unroll and loss. kept_ids [V] bool: the target ids that the draft vocabulary has."""

    def __init__(self, head: Eagle3Head, steps: int, step_decay: float, kept_ids: Tensor) -> None:
        super().__init__()
        self.head, self.steps, self.step_decay = head, steps, step_decay
        self.kept_ids = kept_ids

    def forward(self, aux: Tensor, embeds: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        """aux [B, L, W] and scores [B, L, V] fp32 of the target at each position, embeds [B, L, H] of each id, mask
        [B, L] bool as `lagging_mask` gives it -> the loss, sum over k of decay^k * (mean over B*L)."""
        (batch, length), reach = mask.shape, mask.shape[1] + self.steps
        positions = torch.arange(length, device=mask.device).repeat(batch)
        embeds, scores = shifted(embeds), shifted(scores)
        in_draft = self.kept_ids[scores.argmax(-1)]
        teacher = scores[..., self.kept_ids].softmax(-1)
        del scores
        attend = DenseAttention(batch, length, mask.device)
        hidden = self.head.first_hidden(aux.flatten(0, 1))
        total = aux.new_zeros((), dtype=torch.float32)
        for step in range(self.steps):
            hidden = self.head(embeds.flatten(0, 1), hidden, positions + step, attend, reach)
            logits = self.head.logits(hidden).float().unflatten(0, (batch, length))
            cross_entropy = -(teacher * F.log_softmax(logits, dim=-1)).sum(-1)
            total = total + self.step_decay**step * (cross_entropy * (in_draft & mask)).mean()
            embeds, teacher, in_draft, mask = map(shifted, (embeds, teacher, in_draft, mask))
        return total


def lagging_mask(batch: Batch) -> Tensor:
    """[B, L] bool: root t of step k, which predicts x_{t+2+k}, is supervised where x_{t+k} is a response id.

    A row's last id is taken out, as SpecForge does: its prediction would lie two past the end.
    """
    mask = batch.response.clone()
    mask[torch.arange(len(mask)), batch.lengths.cpu() - 1] = False
    return mask


class PublishedTrainer(Trainer):
    """The product's trainer with another head module, loss and step."""

    def __init__(self, recipe: Recipe, rollouts: Path, token_map: Path, directory: Path) -> None:
        super().__init__(replace(recipe, train=published_settings(recipe.train)), rollouts, token_map, directory)

    def _trained(self, head: Any) -> nn.Module:
        kept_ids = self.plan.token_map.t2d.to(self.target.device)
        return PublishedHead(head, self.settings.unroll.ttt_steps, self.settings.unroll.step_decay, kept_ids)

    def optimise(self, step: int, indices: list[int]) -> dict[str, Any]:
        set_learning_rates(self.optimizer, rate_factor(step, self.steps, self.settings), self.settings)
        batch = self._collate(indices)
        with torch.no_grad():
            features = self.side.features(batch)
            scores = self.target.logits(features.last).float()
            embeds = self.target.embed_tokens(batch.input_ids.to(self.target.device))
        dtype = self.side.head_dtype
        mask = lagging_mask(batch).to(self.target.device)
        with self.accelerator.accumulate(self.model):
            loss = self.model(features.aux.to(dtype), embeds.to(dtype), scores, mask)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": float(loss.detach())}
