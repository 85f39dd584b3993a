"""New weights for an engine that is open: of its target, or of its draft head.

Both are checked whole before anything is changed, and copied in place: CUDA graphs and compiled programs stay valid.
The KV cache's prefixes and what adaptive drafting learned of acceptance belong to the old weights, and are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.cpu_door import pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import ConfigError, EngineConfig
from toolkit.infer.load.load_draft import check_takes_token_map, fit_draft, load_draft
from toolkit.infer.load.load_engine import LoadedEngine
from toolkit.infer.request.params import EngineError
from toolkit.log import get_logger
from toolkit.targets.load import load_weights
from toolkit.targets.new_weights import check_weights, copy_weights, with_tied

logger = get_logger(__name__)


def update_target(loaded: LoadedEngine, config: EngineConfig, weights: Mapping[str, Tensor] | str | Path) -> None:
    """Replace the target's weights. See `LLM.update_weights`."""
    check_idle(loaded.engine, config)
    target, where = loaded.target, "the state dict" if isinstance(weights, Mapping) else str(weights)
    given = weights if isinstance(weights, Mapping) else load_weights(target, weights)
    tensors = with_tied(target, given, where)
    check_weights(target.model, tensors, where)
    copy_weights(target.model, tensors)
    _start_again(loaded.engine)
    logger.debug("the target has the weights of %s", where)


def update_head(loaded: LoadedEngine, config: EngineConfig, weights: Mapping[str, Tensor]) -> None:
    """Replace the weights of the draft head. Raises ConfigError if none is loaded. See `LLM.refresh_draft`."""
    check_idle(loaded.engine, config)
    if not isinstance(loaded.draft, DraftCheckpoint):
        drafts = "nothing drafts" if loaded.draft is None else "n-gram lookup drafts"
        raise ConfigError(f"a state dict of a draft head is given, but {drafts} here; give a draft directory")
    head = loaded.draft.head
    check_weights(head, weights, "the state dict")
    copy_weights(head, weights)
    _start_again(loaded.engine)


def open_draft(loaded: LoadedEngine, config: EngineConfig, name: str | Path) -> Draft:
    """Load the draft `name` of `config` for the loaded target, unpacked. Raises the errors of `load_engine`."""
    config.check(loaded.target.device.type)
    check_idle(loaded.engine, config)
    draft = load_draft(name, loaded.target.name, loaded.target.revision)
    if config.token_map is not None:
        check_takes_token_map(draft, config.token_map)
    return fit_draft(draft, loaded.target, config.token_map, config.draft_confidence)


def is_same_head(old: Draft | None, new: Draft) -> bool:
    """Whether the weights of `new` can be copied into the drafter of `old`."""
    if not isinstance(old, DraftCheckpoint) or not isinstance(new, DraftCheckpoint):
        return False
    return old.head.config == new.head.config and torch.equal(old.token_map.ids, new.token_map.ids)


def pack_draft(loaded: LoadedEngine, draft: Draft, config: EngineConfig) -> None:
    """Pack a draft that `open_draft` loaded, as the engine's first one was; the target is packed already."""
    pack(loaded.target, draft, config.draft_quantization)


def check_idle(engine: Engine, config: EngineConfig) -> None:
    """Raise EngineError if requests run, or if other processes hold shards of the weights."""
    if engine.has_work():
        raise EngineError(
            "the engine has requests that have not ended, and their cache holds the old weights' keys and values; "
            "step until they end, or abort them, before the weights are replaced"
        )
    if config.tensor_parallel_size > 1:
        raise EngineError(
            f"`tensor_parallel_size` is {config.tensor_parallel_size}, and weights cannot be replaced in several "
            "processes; open a new LLM, or use one process"
        )


@torch.inference_mode()  # the drafter's copies were made in this mode
def _start_again(engine: Engine) -> None:
    engine.scheduler.memory.forget_prefixes()
    engine.drafter.weights_changed()
