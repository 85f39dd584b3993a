"""A CUDA device that is not there: its tensors say `cuda:0` and hold their numbers on the host.

    with pretended_cuda() as seen:
        model = copy.deepcopy(model).to("cuda")
        ...
        print(seen.launches.total(), seen.reads, seen.uploads)

The code of the GPU runs as on one: the device's ops, recorded rounds, pinned copies, events. What a GPU refuses is an
error here (operations on both devices, reads and uploads while a graph is recorded), and what it waits for is noted
(seen.py). Values are those of the CPU: Triton kernels are launched without a device and then replaced by their
reference (kernels.py).

To C++ the tensors are of the device "meta", for which torch asks no driver; a request for "meta" is one for CUDA here.
torch keeps tables by device, so a program that pretends should be a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend_cuda.containers import mapped, tensors_in
from tests.pretend_cuda.seen import MixedDevicesError, Seen, caller, seen

CUDA, META, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
# Operations that start no kernel though their result is no view of an argument.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh", "detach_",
}  # fmt: skip
READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2", "bincount",
    "multinomial",
}  # fmt: skip
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# These take no number of the host (a tensor without a dimension) beside tensors of the device.
STRICT = {"scatter_", "gather", "scatter", "index_copy_", "index_select", "mm", "bmm", "cat", "embedding"}


class CudaTensor(Tensor):
    """numbers: the tensor on the host that holds the values."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> CudaTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype,
            layout=numbers.layout, device=META,
        )  # fmt: skip
        made.numbers = numbers.detach()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: CudaTensor) -> None:
        with torch.inference_mode(self.is_inference()):  # set_data takes a tensor of the same mode alone
            Tensor.data.__set__(self, CudaTensor(value.numbers))  # type: ignore[attr-defined]
        self.numbers = value.numbers

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = self.detach().clone()
        made = torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made
        return memo.setdefault(id(self), made)

    def __repr__(self, **_settings: Any) -> str:
        return f"CudaTensor({self.numbers})"

    def tolist(self) -> Any:
        seen.read("tolist")
        return self.numbers.tolist()

    def numpy(self, **_settings: Any) -> NoReturn:
        raise TypeError("can't convert a cuda:0 tensor to numpy; copy it to the host first")

    __array__ = numpy

    def new_tensor(self, data: Any, **settings: Any) -> Tensor:
        return torch.tensor(data, device=CUDA, **{"dtype": self.dtype, **settings})

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor.__getitem__(self, _with_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        Tensor.__setitem__(self, _with_tensors(index), value)


def for_cpp(value: Any) -> Any:
    """An argument with "meta" in place of CUDA, for which C++ asks a driver."""
    name = value.type if isinstance(value, torch.device) else value
    return META if isinstance(name, str) and name.partition(":")[0] == "cuda" else value


def _with_tensors(index: Any) -> Any:
    """The lists in an index as tensors of the host, as which CUDA uploads them; in C++ they would become "meta"."""
    if isinstance(index, list):
        return torch.tensor(index, dtype=None if index else torch.long)
    return tuple(map(_with_tensors, index)) if isinstance(index, tuple) else index


class PretendedCuda(TorchDispatchMode):
    """Sees the operations that make tensors of the device out of none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})


class Operation:
    """What is asked about an operation of torch each time that it runs."""

    def __init__(self, function: Any) -> None:
        self.name = function.name().split(".")[0].removeprefix("aten::")
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
        self.writes = function._schema.is_mutable
        aliases = [one.alias_info for one in function._schema.returns]
        self.view = any(one is not None and not one.is_write for one in aliases)  # of what it does not write
        self.launches = not self.view and self.name not in FREE


operation = cache(Operation)


def dispatch(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run one operation of torch, on either device."""
    args, kwargs = tuple(map(for_cpp, args)), {name: for_cpp(one) for name, one in kwargs.items()}
    tensors = list(tensors_in((*args, *kwargs.values())))
    there = any(isinstance(one, CudaTensor) for one in tensors)
    if not there and not any(isinstance(one, torch.device) and one == META for one in (*args, *kwargs.values())):
        return _on_host(function, args, kwargs)
    about = operation(function)
    if about.composite:
        with PretendedCuda():
            out = function.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
    if about.name == "_to_copy":
        return _to_copy(function, args[0], kwargs)
    if about.name == "copy_" and not (isinstance(args[0], CudaTensor) and isinstance(args[1], CudaTensor)):
        return _copy_between(args[0], args[1], kwargs.get("non_blocking") or args[2:] == (True,))
    _check_devices(about.name, args, tensors)
    if about.name in READS or (about.name == "repeat_interleave" and kwargs.get("output_size") is None):
        seen.read(about.name)
    elif about.launches:
        seen.launch(about.name)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": CPU, "pin_memory": False}
    out = _numbers_of(function, args, kwargs)
    if about.launches:
        seen.move(*tensors, *tensors_in(out))
    if about.name in ("_local_scalar_dense", "equal", "is_nonzero"):
        return out
    if about.view and torch.is_inference_mode_enabled() and not tensors[0].is_inference():
        with torch.inference_mode(False):  # a view of an ordinary tensor is one too
            return _wrapped(out, tensors)
    return _wrapped(out, tensors)


def _numbers_of(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers; part of the graph while one is recorded."""
    about = operation(function)
    args, kwargs = mapped(args, numbers_of), mapped(kwargs, numbers_of)

    def run() -> Any:
        if about.name == "histc" and not args[0].is_floating_point():  # the CPU has none of integers
            return function(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        return function(*args, **kwargs)

    out = run()
    if about.launches:
        record(run, None if about.writes else out)
    return out


def _wrapped(out: Any, given: list[Tensor]) -> Any:
    """Results as tensors of the device; those that were written in place are the arguments."""
    known = {id(numbers_of(one)): one for one in given}

    def wrap(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return known[id(one)] if id(one) in known else CudaTensor(one)

    return mapped(out, wrap)


def numbers_of(value: Any) -> Any:
    return value.numbers if isinstance(value, CudaTensor) else value


def _check_devices(name: str, args: tuple, tensors: list[Tensor]) -> None:
    """Raise MixedDevicesError where CUDA does. It takes numbers of the host, and it uploads an index of the host."""
    host = [one for one in tensors if not isinstance(one, CudaTensor)]
    if name in INDEXED:
        index = list(tensors_in(args[1]))
        if any(one.dtype in (torch.bool, torch.uint8) for one in index):
            seen.read("an index that is a mask")
        of_host = [one for one in index if not isinstance(one, CudaTensor)]
        if of_host:
            seen.upload(f"an index of the host {[tuple(one.shape) for one in of_host]}")
        host = [one for one in host if all(one is not other for other in of_host)]
        wrong = not isinstance(args[0], CudaTensor) or any(one.dim() for one in host)
    else:
        wrong = any(one.dim() or name in STRICT for one in host)
    if wrong:
        shapes = [(type(one).__name__, tuple(one.shape)) for one in tensors]
        raise MixedDevicesError(f"{name} of tensors on both devices at {caller()}: {shapes}")


# -- copies between the devices ----------------------------------------------------------------------------------------

_pinned: dict[int, Tensor] = {}  # by the address of their memory; kept, so that no other tensor gets it


def pin(tensor: Tensor) -> Tensor:
    """Call the tensor's memory pinned."""
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether the memory is pinned, also that of a view."""
    return not isinstance(tensor, CudaTensor) and tensor.untyped_storage().data_ptr() in _pinned


def _on_host(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if function.name().startswith(("aten::is_pinned", "aten::pin_memory", "aten::_pin_memory")):
        return is_pinned(args[0]) if "is_pinned" in function.name() else pin(args[0].clone())
    if not kwargs.get("pin_memory"):
        return function(*args, **kwargs)
    return pin(function(*args, **{**kwargs, "pin_memory": False}))


def _to_copy(function: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    to_host = kwargs.get("device") == CPU
    kwargs = {**kwargs, "device": CPU, "pin_memory": False}
    if not isinstance(source, CudaTensor):
        if source.numel():
            seen.upload(f"to cuda {tuple(source.shape)}", pinned=is_pinned(source) and bool(kwargs.get("non_blocking")))
        return CudaTensor(function(source, **kwargs))
    if to_host:
        seen.read("to cpu")
        return function(source.numbers, **kwargs)
    seen.launch("_to_copy")
    out = CudaTensor(_numbers_of(function, (source,), kwargs))
    seen.move(source, out)
    return out


def _copy_between(to: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """`to.copy_(source)`, of which one is on the host."""
    if isinstance(to, CudaTensor) and source.dim() == 0:
        seen.launch("copy_")  # a number, which goes with the launch
        value = source.item()
        to.numbers.fill_(value)
        record(lambda: to.numbers.fill_(value))
        return to
    if isinstance(to, CudaTensor):
        seen.upload(f"copy_ {tuple(source.shape)}", pinned=is_pinned(source) and non_blocking)
    elif not (is_pinned(to) and non_blocking):
        seen.read("copy_ to cpu")
    numbers_of(to).copy_(numbers_of(source))
    return to


# -- graphs ------------------------------------------------------------------------------------------------------------

_recorded: list[tuple[Any, Any]] = []  # of the graph that is recorded now


def record(run: Any, out: Any = None) -> None:
    """Make `run` part of the graph that is recorded. out: tensors that it made; a replay writes them again."""
    if seen.capturing:
        _recorded.append((run, out))


class Graph:
    """The operations of a recorded function, on the numbers that they had: a replay runs no other code of the host."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        self._steps: list[tuple[Any, Any]] = []

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    @contextmanager
    def capture(self) -> Iterator[None]:
        assert not seen.capturing, "a graph is recorded already"
        seen.capturing = True
        seen.recordings += 1
        _recorded.clear()
        try:
            yield
            self._steps = list(_recorded)
        finally:
            seen.capturing = False
            _recorded.clear()

    def replay(self) -> None:
        seen.replays += 1
        with torch.utils._python_dispatch._disable_current_modes():
            for run, out in self._steps:
                new = run()
                if out is not None:
                    for old, value in zip(tensors_in(out), tensors_in(new), strict=True):
                        old.copy_(value)


@contextmanager
def pretended_cuda(free_bytes: int = 2**28) -> Iterator[Seen]:
    """Pretend that there is one CUDA device with that much free memory. Yields what it sees."""
    from tests.pretend_cuda.kernels import standing_in
    from tests.pretend_cuda.runtime import patched_torch

    before = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        stack.enter_context(patched_torch(free_bytes))
        stack.enter_context(standing_in())
        # torch.tensor(..., device="cuda") makes it on the host first, where the numbers can be seen.
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(PretendedCuda())
        stack.callback(seen.clear)
        yield seen
