"""Finds where the host waits for the device, which a CUDA graph cannot contain: a value, or a shape that depends on
values, is read; or numbers of the host are copied to the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Under inference_mode a watch sees composed operations (`item`), not their parts (`_local_scalar_dense`).
READS = frozenset(
    {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select", "unique_dim",
     "unique_consecutive", "_unique", "_unique2", "bincount"}
)  # fmt: skip


def host_wait(run: Callable[[], object]) -> str | None:
    """Run the function twice (the first run makes its tables). Return where the second one waits, or None."""
    run()
    with _as_if_recorded(), _Watch() as watch:
        run()
    return watch.found


@contextmanager
def _as_if_recorded() -> Iterator[None]:
    """Context manager: who asks whether the stream is recorded hears yes. transformers then leaves out what would wait,
    such as its search for padding."""
    own = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = own


class _Watch(TorchDispatchMode):
    """found: the first operation that waits, with its place in the code."""

    found: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split(".")[0].removeprefix("aten::")
        if self.found is None and _waits(name, args, kwargs or {}):
            self.found = f"{name} in {_caller()}"
        return function(*args, **(kwargs or {}))


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name.startswith("index"):  # a mask is counted first, and an index of the host is uploaded
        indices = [one for one in tree_leaves(args[1]) if isinstance(one, Tensor)]
        masks = (torch.bool, torch.uint8)
        return any(one.dtype in masks or one.device.type != args[0].device.type for one in indices)
    if name in ("to", "_to_copy"):
        places = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, (torch.device, Tensor))]
        types = {one.type if isinstance(one, torch.device) else one.device.type for one in places}
        return bool(types - {args[0].device.type})
    if name == "copy_":
        return args[0].device.type != args[1].device.type
    return name in READS


def _caller() -> str:
    """Module and line of the innermost code outside of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", __name__)):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}, line {frame.f_lineno}"
