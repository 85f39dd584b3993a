"""The optimizer of a draft head: Muon for its matrices and AdamW for the other parameters, or AdamW for all.

Muon (Keller Jordan, 2024) updates a matrix by the orthogonalised momentum of its gradient. The implementation is
DeepSpeed's, which can orthogonalise whole matrices under ZeRO's flat partitions.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.log import get_logger
from toolkit.train_settings import OptimizerSettings, TrainSettings

log = get_logger(__name__)

MOMENTUM = 0.95
CLIP = 0.5
# Matrices that AdamW updates under Muon: most rows of an output matrix get no gradient in a step.
ADAMW_MATRICES = ("lm_head.weight",)


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

    if not torch.cuda.is_available():
        # DeepSpeed compiles Newton-Schulz. On a CPU that needs a C++ compiler and a minute, and gains nothing.
        torch.compiler.set_stance("force_eager")
    chosen = [parameter.dim() == 2 and name not in ADAMW_MATRICES for name, parameter in named]
    for (_, parameter), muon in zip(named, chosen, strict=True):
        parameter.use_muon = muon  # type: ignore[attr-defined]  # DeepSpeed reads this mark
    matrices = {
        "params": [parameter for (_, parameter), muon in zip(named, chosen, strict=True) if muon],
        "use_muon": True,
        "lr": settings.optimizer.muon_learning_rate,
        "momentum": MOMENTUM,
        "weight_decay": settings.optimizer.weight_decay,
        # "standard" orthogonalises in bf16, "gram" more precisely. In fp32 training the curve must not depend on the
        # number of processes.
        "ns_method": "standard" if settings.precision == "bf16" else "gram",
    }
    rest = [parameter for (_, parameter), muon in zip(named, chosen, strict=True) if not muon]
    others = {"params": rest, "use_muon": False, **adamw}
    return MuonWithAuxAdam([matrices, others])


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
