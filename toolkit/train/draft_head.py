"""Builds the draft head of a recipe: its configuration, its initial weights and the module that trains it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from toolkit.checkpoint.native_mtp import load_native, module_config, native_of
from toolkit.data.batches import Batch
from toolkit.errors import TargetError
from toolkit.heads.draft_head import DraftHead, build_head, head_class
from toolkit.heads.dspark import DSparkConfig
from toolkit.heads.head_config import HeadConfig, HeadError
from toolkit.log import get_logger
from toolkit.targets.facts import TargetFacts
from toolkit.targets.features import check_aux_layer_ids
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.step import TrainedHead
from toolkit.train.target_side import StoredFeatures, Supervision, Teacher, anchored
from toolkit.train.warm_start import (
    RANDOM_STD,
    InitHead,
    copy_norm,
    initialise_from_target,
    initialise_random,
    open_init,
    regression_batches,
)
from toolkit.train_settings import TrainSettings

log = get_logger(__name__)

MASK_SHARE = 0.01  # of the median length of the embeddings, the least of a mask's


@dataclass(frozen=True)
class HeadPlan:
    """What is fixed about a head before it has weights.

    token_map: the ids that the head is trained on and drafts.
    init: the head that it starts from (train.init); None: it is a new one.
    aux_layer_ids: the layers whose inputs the head reads. None: it reads the last hidden state, after the final norm.
    """

    config: HeadConfig
    token_map: TokenMap
    aux_layer_ids: tuple[int, ...] | None
    init: InitHead | None = None


def plan_head(settings: TrainSettings, target: Target | TargetFacts, token_map: TokenMap) -> HeadPlan:
    """The plan of a head. Raises `TargetError` or `HeadError` when the settings do not fit the target, and as
    `open_init` does."""
    init = None if settings.init is None else open_init(settings, target)
    if init is not None:
        config = init.config(token_map)
    elif settings.head.init == "native":
        config = _native_config(settings, target)
    else:
        config = head_class(settings.head.kind).config_class.from_settings(
            settings.head,
            target.config,
            vocab_size=target.vocab_size,
            draft_vocab_size=token_map.size,
            n_layers=target.n_layers,
        )
        config = config.for_steps(settings.unroll.ttt_steps)
    ids = config.features.layer_ids(target.n_layers)
    if ids is not None:
        check_aux_layer_ids(ids, target.n_layers)
    if settings.start == "target" and (config.regressed_layer or 0) > target.n_layers:
        raise TargetError(
            f"train.head.layers = {settings.head.layers}: {target.name} has {target.n_layers} layers to copy; lower "
            "it, or set train.head.init=random"
        )
    whole = settings.head.whole_vocabulary
    return HeadPlan(config, TokenMap.identity(target.vocab_size) if whole else token_map, ids, init)


def _native_config(settings: TrainSettings, target: Target | TargetFacts) -> HeadConfig:
    """The configuration of the target's own MTP module. Raises `TargetError` if it has none, or another depth."""
    _, found = native_of(target)
    if settings.head.sliding_window is not None:
        raise TargetError(
            f"train.head.sliding_window = {settings.head.sliding_window}, but a native MTP module attends as its "
            "family does; set it to null"
        )
    if found.count != settings.head.layers:
        raise TargetError(
            f"train.head.layers = {settings.head.layers}, but the MTP module of {target.name} has {found.count} "
            f"layers; set train.head.layers={found.count}"
        )
    return module_config(found.family, found.count, target.config, target.vocab_size)


def native_head(target: Target) -> DraftHead:
    """The target's own MTP module, in float32 on the target's device, to be trained further."""
    head = load_native(target, *native_of(target)).head.cast(target.device, torch.float32)
    log.info("the head starts from the target's own MTP module")
    return head.train().requires_grad_(True)


def start_head(
    plan: HeadPlan,
    settings: TrainSettings,
    target: Target,
    seed: int,
    batches: Iterable[Batch] | None = None,
    stored: StoredFeatures | None = None,
) -> DraftHead:
    """A new head on the target's device.

    batches: None gives random weights. Otherwise the head starts from the target's weights where they fit, and its
    input layer from a regression over as many of the batches as that needs (random if `batches` is empty).
    stored: the features of the batches; None computes them with the target's forward.
    """
    head = build_head(plan.config).to(target.device)
    if isinstance(plan.config, DSparkConfig):
        _check_mask(plan.config.mask_token_id, target)
    own_vocabulary = plan.config.own_vocabulary
    if not own_vocabulary:
        log.info(
            "the head uses %s rows of the target's output matrix (train.head.vocabulary)",
            "all" if settings.head.whole_vocabulary else f"the token map's {plan.token_map.size}",
        )
    if batches is None:
        initialise_random(head, seed)
    else:
        columns = head.warm_start().solved.in_features
        taken = regression_batches(batches, columns, settings.head.start_tokens)
        initialise_from_target(head, target, plan.token_map, taken, seed, stored)
        log.info("the head starts from the target's weights")
    if own_vocabulary and settings.head.lm_head is not None:
        _set_output_matrix(head, plan, settings, target, seed)
    return head


@torch.no_grad()
def _check_mask(token: int, target: Target) -> None:
    """Raise `HeadError` for a mask token whose embedding is next to zero, as of ids that no text has: all masks of a
    block would be alike."""
    some = torch.arange(0, target.vocab_size, max(1, target.vocab_size // 1024), device=target.device)
    usual = float(target.embed_tokens(some).float().norm(dim=-1).median())
    own = float(target.embed_tokens(some.new_tensor([token])).float().norm())
    if own < MASK_SHARE * usual:
        raise HeadError(
            f"the embedding of the mask token {token} has length {own:.2g}, those of {target.name} have {usual:.2g} in "
            "the median; name another id by train.head.mask_token_id"
        )


def trained_head(plan: HeadPlan, settings: TrainSettings, head: DraftHead, teacher: Teacher) -> TrainedHead:
    """The module that training runs: the head with its unroll and losses."""
    head.read_target(teacher.target.embed_tokens)
    token_weight, feature_weight = plan.config.loss_weights(settings.unroll)
    return TrainedHead(
        head,
        settings.unroll.step_decay,
        settings.unroll.loss,
        output=None if plan.config.own_vocabulary else teacher.shared_matrix(),
        checkpointing=settings.unroll.checkpointing,
        token_weight=token_weight,
        feature_weight=feature_weight,
    )


def anchors_of(
    plan: HeadPlan, settings: TrainSettings, seed: int, *place: int
) -> Callable[[Supervision, torch.Size], Supervision] | None:
    """`anchored` for one micro-batch; `place` is its place in the training. None if all roots are unrolled.

    The first `mtp_layers` steps always unroll all roots: in each of them a layer reads all positions for the first
    time. The context of a block drafter is read apart from its blocks.
    """
    if settings.unroll.anchors is None:
        return None
    drawn = random.Random(f"anchors {seed} {place}").getrandbits(63)
    full = 0 if plan.config.drafts_at_once else plan.config.mtp_layers
    return partial(anchored, full=full, count=settings.unroll.anchors, seed=drawn)


@torch.no_grad()
def _set_output_matrix(head: DraftHead, plan: HeadPlan, settings: TrainSettings, target: Target, seed: int) -> None:
    """Apply `train.head.lm_head`: "random" or the target's output matrix and norm; "frozen" also stops its training."""
    weight = head.lm_head.weight
    head.norm.weight.fill_(1.0)
    if settings.head.lm_head == "random":
        generator = torch.Generator().manual_seed(seed)
        weight.copy_(torch.randn(weight.shape, generator=generator) * RANDOM_STD)
        return
    weight.copy_(target.lm_head.weight[plan.token_map.ids.to(target.device)])
    if not copy_norm(head.norm, target.final_norm, target.hidden_size):
        log.warning("the norm before the output matrix starts at one: the target's final norm has no scale to copy")
    weight.requires_grad_(settings.head.lm_head != "frozen")
