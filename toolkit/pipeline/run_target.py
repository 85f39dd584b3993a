"""Loading the target of a run, and the checks that come before its first stage."""

from __future__ import annotations

import torch

from toolkit.bench.prompts import Prompt, builtin_prompts, read_prompt_files
from toolkit.heads.decoder_layer import Rope
from toolkit.infer.engine.cpu_door import Use, load_target, pack
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.recipe import BenchSettings, RecipeError, TargetSettings
from toolkit.targets.facts import TargetFacts
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head
from toolkit.train_settings import TrainSettings


def load_packed(chosen: TargetSettings, use: Use) -> Target:
    """The target of a recipe, on a GPU where there is one, packed for decoding."""
    target = load_target(
        chosen.model,
        dtype=chosen.dtype,
        revision=chosen.revision,
        device=best_device(),
        quantization=chosen.quantization,
        chat_template=chosen.chat_template,
        use=use,
    )
    pack(target)
    return target


def best_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_head_fits(target: Target | TargetFacts, settings: TrainSettings) -> None:
    """Raises `TargetError` or `RecipeError` when no draft head can be built for this target by these settings."""
    config = plan_head(settings, target, TokenMap.identity(target.vocab_size)).config
    try:
        Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
    except ValueError as error:
        raise RecipeError(f"target {target.name}: {error}; take another target") from error


def prompts_and_shapes(wanted: BenchSettings) -> tuple[list[Prompt], list[DraftShape]]:
    """The prompts of a measurement, and the shapes that are drafted in every step; `wanted.adaptive` is one more mode.

    Raises `DataError` and `DraftShapeError`.
    """
    shapes = [DraftShape.parse(one) for one in wanted.shapes if one != "adaptive"]
    return builtin_prompts() if wanted.prompts is None else read_prompt_files(wanted.prompts), shapes
