"""Compiled programs in this process; consecutive layers, or a drafted chain, in one call of C++ (layer_runner.cpp).

Tensors cross to C++ as handles: addresses of at::Tensor objects of their own, which somebody has to free.

Shapes: B rows, T tokens of all rows side by side, H hidden size.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.compiled.opaque_attention import AttentionCall, now
from toolkit.infer.errors import CompileError
from toolkit.target.compile_cpp import load_cpp

SOURCE = Path(__file__).with_suffix(".cpp")
MESSAGE_SIZE = 2000

Inputs = tuple[Tensor, ...]  # what a layer is called with beside hidden


@functools.cache
def runner() -> ctypes.CDLL:
    """Loaded before any program, which calls it. Raises CompileError where it cannot be compiled; the log says why."""
    library = load_cpp(SOURCE, instead="--torch-compile cannot do without")
    if library is None:
        raise CompileError(
            f"torch_compile needs {SOURCE.name}, which could not be compiled (the log says why): a C++ compiler is "
            "needed once (Debian, Ubuntu: apt install g++; or name one in CXX); or leave --torch-compile out"
        )
    address = ctypes.c_void_p
    library.toolkit_open_program.argtypes = [ctypes.c_char_p, ctypes.POINTER(address), ctypes.c_char_p, ctypes.c_int64]
    library.toolkit_close_program.argtypes = [address]
    library.toolkit_free_tensors.argtypes = [address, ctypes.c_int64]
    library.toolkit_run_layers.argtypes = [
        *[address] * 6, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(AttentionCall), ctypes.POINTER(address),
        ctypes.c_char_p, ctypes.c_int64,
    ]  # fmt: skip
    library.toolkit_run_chain.argtypes = [
        *(address, address, ctypes.c_int64) * 2, address, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(AttentionCall),
        address, address, ctypes.c_char_p, ctypes.c_int64,
    ]  # fmt: skip
    for function in ("toolkit_open_program", "toolkit_run_layers", "toolkit_run_chain"):
        getattr(library, function).restype = ctypes.c_int64
    return library


class Program:
    """One compiled layer, called as the layer is: hidden [1, T, H], its other inputs, its weights -> [hidden].

    Raises CompileError where the package cannot be loaded.
    """

    def __init__(self, package: Path) -> None:
        library, loaded, message = runner(), ctypes.c_void_p(), ctypes.create_string_buffer(MESSAGE_SIZE)
        if library.toolkit_open_program(str(package).encode(), ctypes.byref(loaded), message, MESSAGE_SIZE):
            raise CompileError(
                f"torch_compile: {package} cannot be loaded ({message.value.decode(errors='replace')}); remove its "
                "folder, or leave --torch-compile out"
            )
        self.address = loaded.value
        # At exit too: it removes the files that it unpacked.
        weakref.finalize(self, library.toolkit_close_program, loaded.value)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        layer = RunnableLayers([self], [[]], number=now.call.layer)
        return [layer(0, inputs[0], [tuple(inputs[1:])])]


class RunnableLayers:
    """Layers as C++ runs them: each one's program and its weights, in the program's order. number: the first one's."""

    def __init__(self, programs: Sequence[Program], weights: Sequence[Sequence[Tensor]], number: int = 0) -> None:
        self._number, self._message = number, ctypes.create_string_buffer(MESSAGE_SIZE)
        self._held = list(programs)
        self._programs = _addresses([one.address for one in programs])
        self._weights_from = (ctypes.c_int64 * (len(weights) + 1))(0, *itertools.accumulate(map(len, weights)))
        tensors = list(itertools.chain(*weights))
        self._weights = _addresses(_handles(tensors))
        freed = weakref.finalize(self, runner().toolkit_free_tensors, self._weights, len(tensors))
        freed.atexit = False  # a thread that does not end may still read them

    def alone(self) -> tuple[int | None, Any, int]:
        """Of the only layer: its program's address, its weights', and their number."""
        (program,) = self._held
        return program.address, self._weights, len(self._weights)

    def __call__(self, first: int, hidden: Tensor, inputs: Sequence[Inputs]) -> Tensor:
        """Layers `first` and those behind it, as many as `inputs` has: hidden [1, T, H] -> [1, T, H] (of a draft
        head's pick: [1, T]).

        Their attention asks `now`. Raises what attention in Python raised, else RuntimeError.
        """
        distinct = {id(tensors): tensors for tensors in inputs}
        ends = list(itertools.accumulate(map(len, distinct.values())))
        places = {key: (end - len(distinct[key]), end) for key, end in zip(distinct, ends, strict=True)}
        begins, stops = zip(*(places[id(tensors)] for tensors in inputs), strict=True)
        count, library, numbers = len(inputs), runner(), ctypes.c_int64 * len(inputs)
        others = _addresses(_handles(list(itertools.chain(*distinct.values()))))
        x = ctypes.c_void_p(_handles([hidden])[0])
        failed = library.toolkit_run_layers(
            _behind(self._programs, first), self._weights, _behind(self._weights_from, first), others,
            numbers(*begins), numbers(*stops), self._number + first, count, ctypes.byref(now.call), ctypes.byref(x),
            self._message, MESSAGE_SIZE,
        )  # fmt: skip
        library.toolkit_free_tensors(others, len(others))
        out = _take(x.value)
        if failed:
            began = self._number + first
            raise now.take_error() or RuntimeError(
                f"compiled layers {began} to {began + count - 1} failed: {self._message.value.decode(errors='replace')}"
            )
        return out


class RunnableChain:
    """A draft head's pass (hidden [1, T, H], tokens [1, T], .. -> hidden) and its pick (hidden -> tokens) in turn.

    Each is one program. The attention of `now` is C++'s, of one new node a row.
    """

    def __init__(self, reads: RunnableLayers, picks: RunnableLayers) -> None:
        self._held = reads, picks
        self._pass, self._pick = reads.alone(), picks.alone()

    def __call__(self, hidden: Tensor, inputs: Sequence[Inputs]) -> Tensor:
        """hidden [1, B, H] and the further inputs of each pass -> one more level of tokens than passes, [levels, B].

        Raises RuntimeError.
        """
        levels, library, message = len(inputs) + 1, runner(), ctypes.create_string_buffer(MESSAGE_SIZE)
        drafts = torch.empty(levels, hidden.shape[1], dtype=torch.long)
        others = _addresses(_handles([hidden, *itertools.chain(*inputs)]))
        failed = library.toolkit_run_chain(
            *self._pick, *self._pass, _behind(others, 1), (len(others) - 1) // max(1, len(inputs)), levels,
            ctypes.byref(now.call), others[0], drafts.data_ptr(), message, MESSAGE_SIZE,
        )  # fmt: skip
        library.toolkit_free_tensors(others, len(others))
        if failed:
            raise RuntimeError(f"a compiled draft chain failed: {message.value.decode(errors='replace')}")
        return drafts


def _behind(array: Any, first: int) -> ctypes.c_void_p:
    """The address of entry `first`: C++ counts from the first layer that runs."""
    return ctypes.c_void_p(ctypes.addressof(array) + ctypes.sizeof(array._type_) * first)


def _addresses(values: Sequence[int | None]) -> Any:
    return (ctypes.c_void_p * len(values))(*values)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _handles(tensors: list[Tensor]) -> list[int]:
    """Who calls frees them."""
    return [_pointer(capsule, None) for capsule in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)]


def _take(handle: int | None) -> Tensor:
    """The tensor of a handle, which is freed."""
    take: Callable[[Any], Tensor] = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
    return take(_capsule(handle, None, None))
