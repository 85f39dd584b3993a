"""The optimizer of a draft head, and the learning rate and unroll depth of every step.

Muon updates the head's matrices and AdamW the other parameters, or AdamW updates all. The schedules are pure functions
of the optimizer step, so that any number of processes and a resumed run compute the same.

Muon (Keller Jordan, 2024) updates a matrix by the orthogonalised momentum of its gradient. The implementation is
DeepSpeed's, which can orthogonalise whole matrices under ZeRO's flat partitions.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch

from toolkit.errors import TrainError
from toolkit.log import get_logger
from toolkit.train_settings import OptimizerSettings, TrainSettings

log = get_logger(__name__)

MOMENTUM = 0.95
CLIP = 0.5
# Matrices that AdamW updates under Muon: most rows of an output matrix or of a table of ids get no gradient.
ADAMW_MATRICES = (
    "lm_head.weight", "mask.weight", "confidence.weight",
    "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight",
)  # fmt: skip


def build_optimizer(head: torch.nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """An optimizer over the head's weights, for `Accelerator.prepare` with DeepSpeed at ZeRO 1, 2 or 3."""
    named = [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]
    adamw: dict[str, Any] = {
        "lr": settings.optimizer.learning_rate,
        "betas": settings.optimizer.betas,
        "weight_decay": settings.optimizer.weight_decay,
    }
    if settings.optimizer.name == "adamw":
        if settings.optimizer.muon_learning_rate != OptimizerSettings.muon_learning_rate:
            log.warning(
                "train.optimizer.muon_learning_rate %g is not used under train.optimizer.name adamw",
                settings.optimizer.muon_learning_rate,
            )
        # fused: one pass over the weights and their moments instead of a dozen.
        return torch.optim.AdamW([parameter for _, parameter in named], fused=True, **adamw)
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for name, parameter in named:  # DeepSpeed reads this mark
        parameter.use_muon = parameter.dim() == 2 and name not in ADAMW_MATRICES  # type: ignore[attr-defined]
    matrices, others = ([one for _, one in named if one.use_muon == muon] for muon in (True, False))  # type: ignore[attr-defined]
    muon = {
        "params": matrices,
        "use_muon": True,
        "lr": settings.optimizer.muon_learning_rate,
        "momentum": MOMENTUM,
        "weight_decay": settings.optimizer.weight_decay,
        # "standard" orthogonalises in bf16, "gram" more precisely. In fp32 training the curve must not depend on the
        # number of processes.
        "ns_method": "standard" if settings.precision == "bf16" else "gram",
    }
    return MuonWithAuxAdam([muon, {"params": others, "use_muon": False, **adamw}])


def without_compiling() -> AbstractContextManager[Any]:
    """For the steps of a training: DeepSpeed compiles Muon's Newton-Schulz. On a CPU that needs a C++ compiler and a
    minute, and gains nothing."""
    return nullcontext() if torch.cuda.is_available() else torch.compiler.set_stance("force_eager")


def gradient_clip(settings: TrainSettings) -> float:
    """The global norm to which DeepSpeed clips; 0: no clipping. Under Muon DeepSpeed would clip the updates, not the
    gradients, so there is none."""
    return 0.0 if settings.optimizer.name == "muon" else settings.optimizer.max_grad_norm or CLIP


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float, settings: TrainSettings) -> None:
    """Set every parameter group to `factor` of its peak learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = factor * (
            settings.optimizer.muon_learning_rate if group.get("use_muon") else settings.optimizer.learning_rate
        )


def rate_factor(step: int, total_steps: int, settings: TrainSettings) -> float:
    """Share of the peak learning rate at the 0-based optimizer step: linear warm-up, then decay to 0 at the end, as
    EAGLE and SpecForge do, or constant."""
    warmup = max(1, round(settings.optimizer.warmup_ratio * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[settings.optimizer.schedule]


def total_steps(settings: TrainSettings, batches_per_epoch: int) -> int:
    """Optimizer steps of a run: `epochs`, at most `max_steps`. Raises `TrainError` if it would end before the first
    fresh rollouts."""
    steps = max(1, math.ceil(settings.epochs * batches_per_epoch))
    steps = steps if settings.max_steps is None else min(steps, settings.max_steps)
    if settings.on_policy.every is not None and settings.on_policy.every >= steps:
        raise TrainError(
            f"train.on_policy.every = {settings.on_policy.every}, but the training has {steps} steps and would write "
            "no fresh rollouts; lower it, or set train.on_policy.every=null"
        )
    return steps


def unroll_steps(step: int, total_steps: int, settings: TrainSettings) -> int:
    """Unroll steps at the 0-based optimizer step: 1, 2, .. for the shares of the curriculum, then ttt_steps."""
    ends = accumulate(settings.unroll.curriculum)
    return next(
        (depth for depth, end in enumerate(ends, 1) if step < round(end * total_steps)), settings.unroll.ttt_steps
    )
