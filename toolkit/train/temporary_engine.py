"""The engine in the midst of a training, which has the memory before and after."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from toolkit.infer.engine.engine import Engine

Result = TypeVar("Result")


def with_engine(use: Callable[[Engine], Result], *arguments: Any, **options: Any) -> Result:
    """What `use` makes of an engine of these arguments. `use` must not keep it: what it held goes back to the device.

    On a GPU torch keeps what was freed for itself: without the calls the engine would find little room, and the next
    training step, whose tensors have other sizes, none at all.
    """
    torch.cuda.empty_cache()  # nothing happens without a GPU
    engine = Engine(*arguments, **options)
    try:
        return use(engine)
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
