"""A snapshot of the head in training: gathered weights, a head or draft checkpoint of them, and the record of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.draft_head import DraftHead, build_head, empty_head
from toolkit.heads.head_config import HeadConfig
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.state import Position
from toolkit.train_settings import TrainSettings
from toolkit.weights import load_strict

Weights = Mapping[str, torch.Tensor]


def gathered_weights(accelerator: Accelerator, model: torch.nn.Module) -> Weights:
    """The head's weights, in the dtype of training, by their names in a draft directory. All processes must call this;
    under ZeRO-3 only the main process gets the weights."""
    state = accelerator.get_state_dict(model) or {}
    return {name.removeprefix("head."): value.detach() for name, value in state.items() if name.startswith("head.")}


def in_dtype(weights: Weights, config: HeadConfig, dtype: torch.dtype) -> Weights:
    """The weights in the dtype in which they are saved and served; buffers keep theirs, as in `DraftHead.cast`."""
    with torch.device("meta"):
        cast = {name for name, _ in build_head(config).named_parameters()}
    return {name: value.to(dtype) if name in cast else value for name, value in weights.items()}


def head_of(weights: Weights, config: HeadConfig, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """A frozen copy of the head with these weights."""
    head = empty_head(config)
    load_strict(head, weights, "the head in training")
    return head.cast(device, dtype).eval().requires_grad_(False)


def as_draft(weights: Weights, config: HeadConfig, token_map: TokenMap, target: Target) -> DraftCheckpoint:
    """The head as a draft checkpoint for the engine, in the target's dtype and on its device."""
    return DraftCheckpoint(head_of(weights, config, target.device, target.dtype), token_map)


def training_record(
    settings: TrainSettings, seed: int, target: Target, position: Position, rollouts: int
) -> dict[str, Any]:
    """The draft directory's `toolkit` block for the head of `position.best_step`."""
    return {
        "target": describe_target(target),
        "training": {
            **asdict(settings),
            "seed": seed,
            "steps": position.step,
            "best_step": position.best_step,
            "supervised_tokens": position.supervised_tokens,
            "seconds": round(position.seconds, 1),
            "forecast_accept_length": position.best_forecast,
            "real_accept_length": position.best_real,
            "rollouts": rollouts,
        },
    }


def describe_target(target: Target) -> dict[str, Any]:
    """The record of the target; it is enough for `toolkit serve --draft DIR` to load the target."""
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint,
        "template_sha256": target.template_sha256,
        **({} if target.template is None else {"chat_template": target.template}),
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.quantization,
    }
