"""The head that a recipe asks for: its configuration, what it reads of the target, and where it starts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.head_kinds import DraftHead, kind_of
from toolkit.data.batches import Batch
from toolkit.heads.eagle2 import Eagle2Config
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import HeadConfig
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.log import get_logger
from toolkit.targets.errors import TargetError
from toolkit.targets.features import check_aux_layer_ids, default_aux_layer_ids
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.copied_layers import copy_norm
from toolkit.train.features import StoredFeatures
from toolkit.train.initialise import (
    RANDOM_STD,
    initialise_from_target,
    initialise_random,
    regression_batches,
)
from toolkit.train.initialise_shared import start_eagle2, start_mtp
from toolkit.train.step import Anchors
from toolkit.train.teacher import Teacher
from toolkit.train.trained_head import TrainedHead
from toolkit.train_settings import TrainSettings

log = get_logger(__name__)


@dataclass(frozen=True)
class HeadPlan:
    """token_map: the ids the head is scored over, all of the target's for one that shares its output matrix.
    aux_layer_ids: the layers whose states it reads; None: the last state, after the final norm."""

    config: HeadConfig
    token_map: TokenMap
    aux_layer_ids: tuple[int, ...] | None

    @property
    def own_vocabulary(self) -> bool:
        """Whether the token map is part of the head."""
        return kind_of(self.config).own_vocabulary


def plan_head(settings: TrainSettings, target: Target, token_map: TokenMap) -> HeadPlan:
    """The plan of a new head. Raises `TargetError` when its layers do not fit the target."""
    every: dict[str, Any] = {"sliding_window": settings.head.sliding_window}
    if settings.head.kind == "eagle3":
        ids = settings.head.aux_layer_ids or default_aux_layer_ids(target.n_layers)
        check_aux_layer_ids(ids, target.n_layers)
        if settings.head.init != "random" and settings.head.layers > target.n_layers:
            raise TargetError(
                f"train.head.layers = {settings.head.layers}: {target.name} has {target.n_layers} layers to copy"
            )
        config = Eagle3Config.from_target_config(
            target.config,
            vocab_size=target.vocab_size,
            draft_vocab_size=token_map.size,
            aux_layer_ids=ids,
            fc_norm=settings.head.fc_norm,
            norm_output=settings.head.norm_output,
            num_hidden_layers=settings.head.layers,
            **every,
        )
        return HeadPlan(config, token_map, ids)
    whole = TokenMap.identity(target.vocab_size)
    if settings.head.kind == "eagle2":
        eagle2 = Eagle2Config.from_target_config(
            target.config, vocab_size=target.vocab_size, num_hidden_layers=settings.head.layers, **every
        )
        return HeadPlan(eagle2, whole, None)
    mtp = MtpConfig.from_target_config(
        target.config, vocab_size=target.vocab_size, num_mtp_layers=settings.head.layers, **every
    )
    return HeadPlan(mtp, whole, None)


def start_head(
    plan: HeadPlan,
    settings: TrainSettings,
    target: Target,
    seed: int,
    batches: Iterable[Batch] | None = None,
    stored: StoredFeatures | None = None,
) -> DraftHead:
    """A new head on the target's device: random weights, or with `batches` the target's own where they fit, and a
    regression over as many of the batches as it needs (of none: what it would have solved stays random). stored: the
    batches' features; None: the target's forward."""
    head = kind_of(plan.config).head_class(plan.config).to(target.device)
    if not plan.own_vocabulary:
        log.info("scored by the target's output matrix over all its ids: the run's token map is not read")
    if batches is None:
        initialise_random(head, seed)
    else:
        r2 = _from_target(head, plan, target, seed, batches, stored)
        fit = "" if r2 is None else f"; of what its input should become it explains {r2:.2f}"
        log.info("head starts from the target's weights%s", fit)
    if isinstance(head, Eagle3Head) and settings.head.lm_head is not None:
        _set_output_matrix(head, plan, settings, target, seed)
    return head


def trained_head(plan: HeadPlan, settings: TrainSettings, head: DraftHead, teacher: Teacher) -> TrainedHead:
    """The head with its unroll and losses. An eagle2 head also learns the next feature."""
    weights = {}
    if settings.head.kind == "eagle2":
        weights = {"token_weight": settings.unroll.token_weight, "feature_weight": settings.unroll.feature_weight}
    return TrainedHead(
        head,
        settings.unroll.step_decay,
        settings.unroll.loss,
        output=None if plan.own_vocabulary else teacher.shared_matrix(),
        checkpointing=settings.unroll.checkpointing,
        **weights,
    )


def anchors_of(settings: TrainSettings, seed: int, *place: int) -> Anchors | None:
    """The draw of one micro-batch, by its place in the training; None where all roots are unrolled. All roots take the
    steps in which each MTP layer reads all positions for the first time."""
    if settings.unroll.anchors is None:
        return None
    full = settings.head.layers if settings.head.kind == "mtp" else 1
    return Anchors(settings.unroll.anchors, full, random.Random(f"anchors {seed} {place}").getrandbits(63))


def regressed(head: DraftHead) -> nn.Linear:
    """What a start from the target solves for."""
    return head.layer(0).eh_proj if isinstance(head, MtpHead) else head.fc


def _from_target(
    head: DraftHead,
    plan: HeadPlan,
    target: Target,
    seed: int,
    batches: Iterable[Batch],
    stored: StoredFeatures | None,
) -> float | None:
    taken = regression_batches(batches, regressed(head).in_features)
    if isinstance(head, Eagle3Head):
        return initialise_from_target(head, target, plan.token_map, taken, seed, stored)
    start: Any = start_mtp if isinstance(head, MtpHead) else start_eagle2
    return start(head, target, taken, seed)


@torch.no_grad()
def _set_output_matrix(head: Eagle3Head, plan: HeadPlan, settings: TrainSettings, target: Target, seed: int) -> None:
    """`train.head.lm_head`: the output matrix and the norm before it start at random or as the target's."""
    weight = head.lm_head.weight
    head.norm.weight.fill_(1.0)
    if settings.head.lm_head == "random":
        generator = torch.Generator().manual_seed(seed)
        weight.copy_(torch.randn(weight.shape, generator=generator) * RANDOM_STD)
        return
    weight.copy_(target.lm_head.weight[plan.token_map.ids.to(target.device)])
    if not copy_norm(head.norm, target.final_norm, target.hidden_size):
        log.warning("the norm before the output matrix starts at one: the target's last norm has no such scale")
    weight.requires_grad_(settings.head.lm_head != "frozen")
