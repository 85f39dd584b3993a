"""torch.cuda without a driver: one H100 with a default stream, on which everything is over at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.pretend_cuda.device import CUDA, META, CudaTensor, Graph, for_cpp, pin
from tests.pretend_cuda.seen import seen

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30
)


class Event:
    """Waiting for one is how the host waits for a copy that it did not wait for itself."""

    def __init__(self, *_args: Any, **_settings: Any) -> None: ...

    def record(self, *_stream: Any) -> None: ...

    def query(self) -> bool:
        return True

    def wait(self, *_stream: Any) -> None: ...

    def synchronize(self) -> None:
        seen.read("event")

    def elapsed_time(self, _other: Event) -> float:
        return 1.0


class Stream:
    """Streams need not wait for each other."""

    device, cuda_stream = CUDA, 0

    def __init__(self, *_args: Any, **_settings: Any) -> None: ...

    def wait_stream(self, _other: Stream) -> None: ...

    def wait_event(self, _event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        seen.read("stream")


def _graph(graph: Graph, **_settings: Any) -> Any:
    return graph.capture()


def _pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory that asks the driver neither for pinned memory nor for the number of a device that has none."""

    def run(*args: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        if for_cpp(settings.get("device")) == META:
            settings["device"] = CUDA
        made = make(*args, **settings)
        return pin(made) if pin_memory else made

    return run


def _moving(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tensor.to, which asks the driver for the number of a device that has none."""

    def run(tensor: Tensor, *args: Any, **settings: Any) -> Tensor:
        args, settings = tuple(map(for_cpp, args)), {name: for_cpp(one) for name, one in settings.items()}
        given = [*args, *settings.values()]
        if isinstance(tensor, CudaTensor) and META in [one for one in given if isinstance(one, torch.device)]:
            # It is there already, and who watches the operation must not see it move to "meta".
            dtype = next((one for one in given if isinstance(one, torch.dtype)), tensor.dtype)
            return to(tensor, dtype, copy=settings.get("copy", False))
        return to(tensor, *args, **settings)

    return run


def _pinned_copy(tensor: Tensor, *_device: Any) -> Tensor:
    return pin(tensor.clone())


@contextmanager
def patched_torch(free_bytes: int) -> Iterator[None]:
    """Replace what asks the driver."""
    of_cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "is_bf16_supported": lambda *settings: True,
        "mem_get_info": lambda device=None: (free_bytes, PROPERTIES.total_memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: seen.read("synchronize"),
        "is_current_stream_capturing": lambda: seen.capturing,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "set_stream": lambda stream: None,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": _graph,
    }
    with ExitStack() as stack:
        for name, value in of_cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name in ("tensor", "empty"):
            stack.enter_context(patch.object(torch, name, _pinning(getattr(torch, name))))
        stack.enter_context(patch.object(Tensor, "to", _moving(Tensor.to)))
        stack.enter_context(patch.object(Tensor, "cuda", lambda tensor, *where, **how: tensor.to(CUDA)))
        stack.enter_context(patch.object(Tensor, "pin_memory", _pinned_copy))
        yield
