"""The start from a head that exists, `train.init`: the head is opened, compared with target and recipe, and adapted.

Shapes: D rows of an output matrix, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint.draft_dir import DraftCheckpoint, check_draft_fits, check_draft_sizes, rope_difference
from toolkit.checkpoint.files import weights_sha256
from toolkit.checkpoint.open_head import open_head
from toolkit.heads.draft_head import DraftHead, OutputMatrix
from toolkit.heads.head_config import HeadConfig, full_attention_rope
from toolkit.log import get_logger
from toolkit.recipe_yaml import RecipeError
from toolkit.targets.facts import TargetFacts
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train_settings import HeadSettings, TrainSettings, changed

log = get_logger(__name__)


@dataclass(frozen=True)
class InitHead:
    """The head that a training starts from, on the CPU in its stored dtype. revision: the commit of a hub id."""

    name: str
    revision: str | None
    weights_sha256: str
    draft: DraftCheckpoint

    @property
    def record(self) -> dict[str, Any]:
        """Where the head comes from, for the draft directory."""
        return {"name": self.name, "revision": self.revision, "weights_sha256": self.weights_sha256}

    def config(self, token_map: TokenMap) -> HeadConfig:
        """Its configuration with the draft vocabulary of `token_map`."""
        return self.draft.head.config.with_vocabulary(token_map.size)


def open_init(settings: TrainSettings, target: Target | TargetFacts) -> InitHead:
    """The head of `train.init`. Raises `RecipeError` if it is not the head that the recipe asks for, `DraftDirError` if
    it does not fit the target (with the tensor), and the errors of `open_head`."""
    name = settings.init
    assert name is not None, "called with train.init only"
    draft = open_head(name, target=target.name, revision=target.revision)
    if draft.kind != settings.head.kind:
        raise RecipeError(
            f"train.init = {name} is a head of kind {draft.kind}, but train.head.kind is {settings.head.kind}; set "
            f"train.head.kind={draft.kind}"
        )
    if isinstance(target, Target):
        check_draft_fits(draft, target)
    else:  # its weights are not loaded here; the training compares the embedding
        check_draft_sizes(draft, target)
    with_head_settings(settings, draft.head.config)
    differs = rope_difference(draft.head.config, full_attention_rope(target.config))
    if differs:
        log.warning("train.init = %s: %s", name, differs)
    assert draft.path is not None, "it was read from files"
    # Of a hub's files the cache keeps each commit in a folder of its name.
    hub = not Path(name).expanduser().exists()
    revision = draft.path.name if hub else None
    digest = weights_sha256(draft.path, draft.weights)
    return InitHead(name.partition("@")[0] if hub else name, revision, digest, draft)


def with_head_settings(settings: TrainSettings, config: HeadConfig) -> TrainSettings:
    """The settings with those of a head of this configuration in place of the defaults.

    Raises `RecipeError` for a setting that was given and that the head does not have, and for other settings of the
    training that do not suit the head (its layers are more than ttt_steps).
    """
    has: dict[str, Any] = {
        "layers": config.stages * config.layers,
        "fc_norm": getattr(config, "fc_norm", False),
        "norm_output": getattr(config, "norm_output", False),
        "sliding_window": config.sliding_window,
    }
    read = {**has, "aux_layer_ids": config.features.aux_layer_ids}
    read |= {name: getattr(config, name, getattr(HeadSettings, name)) for name in ("markov_rank", "mask_token_id")}
    wrong = [name for name in changed(settings.head, *read) if getattr(settings.head, name) != read[name]]
    if wrong:
        said = "; ".join(f"train.head.{name} = {getattr(settings.head, name)} (it has {read[name]})" for name in wrong)
        raise RecipeError(
            f"train.init = {settings.init} has settings of its own, which are kept: {said}. Leave these out"
        )
    steps, at_once = settings.unroll.ttt_steps, config.drafts_at_once
    if at_once and steps != at_once:
        raise RecipeError(
            f"train.init = {settings.init} drafts blocks of {at_once} tokens, and train.unroll.ttt_steps is {steps}; "
            f"set train.unroll.ttt_steps={at_once}"
        )
    try:
        return replace(settings, head=replace(settings.head, **has))
    except RecipeError as error:
        raise RecipeError(f"train.init = {settings.init} does not suit the recipe: {error}") from None


def continued_head(
    init: InitHead, config: HeadConfig, token_map: TokenMap, settings: TrainSettings, target: Target
) -> DraftHead:
    """The head in float32 on the target's device, to be trained further with the draft vocabulary of `token_map`. It is
    changed in place, so that memory holds it once.

    Of its output matrix the rows of ids that its own map has are carried over; the others are the target's, as those of
    a new head. `train.head.lm_head` target or frozen takes all rows from the target.
    """
    head = init.draft.head
    said = f"; it scores tokens by {token_map.size} rows of the target's output matrix (train.head.vocabulary)"
    if config.own_vocabulary:
        places = init.draft.token_map.to_draft(token_map.ids)
        rows, said = _output_rows(init.draft, token_map, places, settings, target)
        head.map_rows(places)
        head.config, head.lm_head = config, OutputMatrix(config.hidden_size, len(rows), bias=False)
        head.lm_head.weight = nn.Parameter(rows)
    head = head.cast(target.device, torch.float32).train().requires_grad_(True)
    if settings.head.lm_head == "frozen":
        head.lm_head.weight.requires_grad_(False)
    log.info(
        "the head starts from %s (%s, weights sha256 %s)%s", init.name, config.kind, init.weights_sha256[:12], said
    )
    return head


@torch.no_grad()
def _output_rows(
    draft: DraftCheckpoint, token_map: TokenMap, places: Tensor, settings: TrainSettings, target: Target
) -> tuple[Tensor, str]:
    """The rows [D, H] of the output matrix, fp32 on the CPU, and what the log says of them."""
    rows = target.lm_head.weight[token_map.ids.to(target.device)].float().cpu()
    if settings.head.lm_head is not None:
        return rows, f"; its {token_map.size} output rows are the target's (train.head.lm_head={settings.head.lm_head})"
    if not draft.head.config.own_vocabulary:
        return rows, f"; its {token_map.size} output rows are the target's, as it had none"
    both = places >= 0
    rows[both] = draft.head.lm_head.weight[places[both]].float()
    carried = int(both.sum())
    return rows, (
        f"; {carried} of its {draft.token_map.size} output rows are carried over, and the other "
        f"{token_map.size - carried} of {token_map.size} are the target's"
    )
