"""An engine that runs during a training, and frees its memory afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from toolkit.infer.engine.engine import Engine

Result = TypeVar("Result")


def with_engine(use: Callable[[Engine], Result], *arguments: Any, **options: Any) -> Result:
    """The result of `use` with an engine of these arguments. `use` must not keep the engine: its memory is freed.

    On a GPU torch caches freed memory. Without `empty_cache` the engine would find little free memory, and the next
    training step, whose tensors have other sizes, might find none.
    """
    torch.cuda.empty_cache()  # does nothing without a GPU
    engine = Engine(*arguments, **options)
    try:
        return use(engine)
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
