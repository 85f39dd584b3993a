"""What the settings of a recipe are checked with, each telling the key, what came and what is needed."""

from __future__ import annotations

import re
from dataclasses import field, fields
from typing import Any

from toolkit.recipe_yaml import RecipeError


def not_in_fingerprint(default: Any) -> Any:
    """A field that does not decide the result of its stage."""
    return field(default=default, metadata={"not_in_fingerprint": True})


def need(ok: bool, key: str, value: object, needed: str) -> None:
    if not ok:
        raise RecipeError(f"{key} = {value!r}, but {needed} is needed")


def check_positive(settings: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        need(value is None or value > 0, f"{section}.{name}", value, "a number above 0")


def check_sampling(settings: object, section: str) -> None:
    temperature, top_p = settings.temperature, settings.top_p  # type: ignore[attr-defined]
    need(temperature >= 0, f"{section}.temperature", temperature, "0 (greedy) or more")
    need(0 < top_p <= 1, f"{section}.top_p", top_p, "a share above 0 and up to 1")


def check_shapes(shapes: tuple[str, ...], key: str) -> None:
    for shape in shapes:
        need(re.fullmatch(r"\d+,\d+,\d+", shape) is not None, key, shape, '"steps,top_k,nodes"')
    need(len(shapes) > 0, key, shapes, "at least one draft shape")
    need(len(set(shapes)) == len(shapes), key, shapes, "each draft shape once")


# Settings that only one kind of head has.
_OF_HEADS = {
    "eagle3": ("aux_layer_ids", "fc_norm", "norm_output", "lm_head"),
    "eagle2": ("token_weight", "feature_weight"),
}


def check_head(train: Any) -> None:
    """A setting that another kind of head has no use for must not be taken for one that works."""
    check_positive(train, "train", "layers")
    defaults = {entry.name: entry.default for entry in fields(train)}
    for head, names in _OF_HEADS.items():
        for name in _set_of(train, names) if head != train.head else ():
            if name == "lm_head" and train.lm_head == "frozen":
                continue  # what the other kinds always do
            either = f"{defaults[name]!r} (it belongs to {head} heads) or train.head={head},"
            need(False, f"train.{name}", getattr(train, name), either)
    window = train.sliding_window is None or train.sliding_window >= train.ttt_steps
    need(window, "train.sliding_window", train.sliding_window, f"at least ttt_steps ({train.ttt_steps}), or null,")
    for name in ("token_weight", "feature_weight"):
        need(getattr(train, name) >= 0, f"train.{name}", getattr(train, name), "0 or more")
    trained = train.head != "mtp" or train.layers <= train.ttt_steps
    need(trained, "train.layers", train.layers, f"at most ttt_steps ({train.ttt_steps}), the layers that are trained,")
    whole = train.layers if train.head == "mtp" else 1
    later = train.anchors is None or train.ttt_steps > whole
    need(later, "train.anchors", train.anchors, f"null, or ttt_steps above {whole}: they thin out later steps,")
    shares = train.ttt_curriculum
    fits = len(shares) < train.ttt_steps and all(share > 0 for share in shares) and sum(shares) < 1
    fewer = (
        f"up to {train.ttt_steps - 1} shares above 0 (one for each number of steps below ttt_steps) that sum to less"
    )
    need(fits, "train.ttt_curriculum", shares, f"{fewer} than 1")
    staged = not shares or whole == 1
    need(
        staged,
        "train.ttt_curriculum",
        shares,
        "none: a step has its own MTP layer here, and fewer leave some untrained,",
    )
    waits = not shares or train.patience is None
    need(
        waits, "train.patience", train.patience, "null under a curriculum: a shallow unroll's measurements fall short,"
    )
    some = train.token_weight + train.feature_weight > 0
    need(some, "train.token_weight", train.token_weight, "a weight above 0 for this or train.feature_weight")


# What a measurement or fresh rollouts are made with, by the interval without which there are none.
_OF_FRESH = ("rollout_prompts", "rollout_temperatures")
_OF_REAL = ("real_prompts", "real_max_tokens", "real_shapes", "real_temperatures")


def check_fresh(train: Any) -> None:
    """Settings of fresh rollouts in a training that writes none: their author believes it does."""
    for name in _set_of(train, _OF_FRESH) if train.rollout_every is None else ():
        needed = "train.rollout_every, the steps between fresh rollouts (null: never), or this setting's default"
        need(False, f"train.{name}", getattr(train, name), needed)


def check_sharded(train: Any) -> None:
    """A sharded target runs in all processes at once; the engine's rounds differ from one to the next, which would wait
    for each other for ever."""
    for name in ("real_every", "rollout_every") if train.target == "sharded" else ():
        needed = "null under train.target sharded (the engine needs all of it; `toolkit bench` measures trained heads)"
        need(getattr(train, name) is None, f"train.{name}", getattr(train, name), needed)


def idle_measurement_settings(train: Any) -> list[str]:
    """Settings of the engine's measurements in a training that has none, which may have been switched off for once."""
    idle = _set_of(train, _OF_REAL) if train.real_every is None else []
    # Fresh rollouts are drafted with the first shape.
    return [f"train.{name}" for name in idle if name != "real_shapes" or train.rollout_every is None]


def _set_of(section: Any, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that have another value than their default."""
    defaults = {entry.name: entry.default for entry in fields(section)}
    return [name for name in names if getattr(section, name) != defaults[name]]
