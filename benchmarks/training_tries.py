"""Changes of a training that are no settings of a recipe: `few_tokens.py` tries them in the variants of these names.

One that pays becomes a setting of the product; the others stay here, so that their rows can be made again. A row is
known by its variant's name: another strength needs another name.

Shapes: T tokens, H head hidden size, m teacher rows, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from toolkit.train.loop import Trainer

DECAY = 0.98  # of the moving average: it spans about the last 50 steps
NOISE = 0.1  # EAGLE's amplitude (arXiv 2401.15077, section 4.2), here of each channel's root mean square
TEMPERATURE = 0.7  # of the teacher


class AveragingTrainer(Trainer):
    """The head at the end is an exponential moving average of its weights."""

    average: list[Tensor] | None = None

    def optimise(self, step: int, indices: list[int]) -> dict[str, Any]:
        row = super().optimise(step, indices)
        weights = [one.detach() for one in self.model.parameters() if one.requires_grad]
        if self.average is None:
            self.average = [one.float().clone() for one in weights]
        for kept, one in zip(self.average, weights, strict=True):
            kept.lerp_(one.float(), 1 - DECAY)
            if step == self.steps - 1:
                one.copy_(kept)
        return row


class NoisyTrainer(Trainer):
    """Uniform noise is added to the hidden state that each pass reads; in the first pass that is the output of `fc`."""

    def _trained(self, head: Any) -> nn.Module:
        assert not self.settings.unroll.checkpointing, "a step that is computed again would draw other noise"
        generator = torch.Generator(self.target.device).manual_seed(self.recipe.seed)

        def noisy(_head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            embeds, hidden, *others = inputs
            return embeds, with_noise(hidden, generator), *others

        head.register_forward_pre_hook(noisy)
        return super()._trained(head)


def with_noise(hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Hidden states [T, H] plus noise between -NOISE and NOISE of each channel's root mean square over the T."""
    scale = hidden.detach().float().square().mean(0).sqrt()
    drawn = torch.rand(hidden.shape, generator=generator, device=hidden.device) * 2 - 1
    return hidden + (NOISE * drawn * scale).to(hidden.dtype)


class SharpTrainer(Trainer):
    """The teacher's distribution is sharpened, as a greedy chain asks for its argmax."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        plain = self.side.teacher.distribution
        self.side.teacher.distribution = lambda hidden: sharpened(plain(hidden))  # type: ignore[method-assign]


def sharpened(probabilities: Tensor) -> Tensor:
    """Rows [m, D] that sum to 1, at TEMPERATURE."""
    powers = probabilities ** (1 / TEMPERATURE)
    return powers / powers.sum(-1, keepdim=True)


class FeatureTrainer(Trainer):
    """The head also learns the target's next final-normed state, as EAGLE's does (arXiv 2401.15077, section 4.2), of
    rows too whose token the draft vocabulary lacks."""

    weight = 10.0  # ten times the token's, as EAGLE weights them

    def _trained(self, head: Any) -> nn.Module:
        assert not self.plan.config.drafts_at_once, "a block drafter's states are normed before"
        module = super()._trained(head)
        module.feature_weight = self.weight
        return module


class LightFeatureTrainer(FeatureTrainer):
    weight = 2.0


TRIES: dict[str, type[Trainer]] = {
    "ema": AveragingTrainer,
    "ema_constant_rate": AveragingTrainer,
    "noise": NoisyTrainer,
    "sharp_teacher": SharpTrainer,
    "feature_loss_10": FeatureTrainer,
    "feature_loss_2": LightFeatureTrainer,
}
