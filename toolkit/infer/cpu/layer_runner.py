"""Compiled programs in this process; consecutive layers, a whole body, or all that is drafted, in one call of C++
(layer_runner.cpp).

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

from toolkit.infer.attention.opaque_attention import AttentionCall, now
from toolkit.infer.cpu.compile_cpp import load_cpp
from toolkit.infer.request.draft_tree import DraftShape, candidates
from toolkit.infer.request.errors import CompileError

SOURCE = Path(__file__).with_suffix(".cpp")
MESSAGE_SIZE = 2000
MOST_OUTPUTS = 64  # of one program
ADDRESS = ctypes.sizeof(ctypes.c_void_p)

Inputs = tuple[Tensor, ...]  # what a layer is called with beside hidden
Taps = Sequence[tuple[int, Callable[[Tensor], None]]]  # layers, and who keeps what enters them


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
    library.toolkit_run_program.argtypes = [
        address, address, ctypes.c_int64, address, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64,
    ]  # fmt: skip
    library.toolkit_run_layers.argtypes = [
        address, address, ctypes.c_int64, address, address, ctypes.c_int64, ctypes.c_int64,
        ctypes.POINTER(AttentionCall), ctypes.POINTER(address), address, ctypes.c_int64, address, ctypes.c_char_p,
        ctypes.c_int64,
    ]  # fmt: skip
    library.toolkit_run_body.argtypes = [
        *[address] * 4, ctypes.c_int64, address, address, ctypes.c_int64, ctypes.POINTER(AttentionCall), address,
        ctypes.POINTER(address), address, ctypes.c_int64, address, ctypes.c_char_p, ctypes.c_int64,
    ]  # fmt: skip
    library.toolkit_run_drafts.argtypes = [
        *[address] * 8, ctypes.c_int64, ctypes.c_int64, address, address, ctypes.POINTER(AttentionCall),
        *[address] * 3, ctypes.c_char_p, ctypes.c_int64,
    ]  # fmt: skip
    for function in ("open_program", "run_program", "run_layers", "run_body", "run_drafts"):
        getattr(library, f"toolkit_{function}").restype = ctypes.c_int64
    return library


class Program:
    """One compiled layer, called as the layer is: hidden [1, T, H], its other inputs, its weights -> [hidden]; or
    another program with all its inputs and outputs.

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
        """Raises what attention in Python raised, else RuntimeError."""
        library, message = runner(), ctypes.create_string_buffer(MESSAGE_SIZE)
        given, outputs = _addresses(_handles([*inputs])), _addresses([None] * MOST_OUTPUTS)
        failed = library.toolkit_run_program(
            self.address, given, len(given), outputs, len(outputs), message, MESSAGE_SIZE
        )
        library.toolkit_free_tensors(given, len(given))
        if failed:
            raise _error("a compiled program", message)
        return [_take(one) for one in outputs if one is not None]


class RunnableLayers:
    """Layers as C++ runs them: each one's program and its weights, in the program's order."""

    def __init__(self, programs: Sequence[Program], weights: Sequence[Sequence[Tensor]]) -> None:
        self._held, self._message = list(programs), ctypes.create_string_buffer(MESSAGE_SIZE)
        tensors, begins = list(itertools.chain(*weights)), itertools.accumulate(map(len, weights), initial=0)
        self._weights = _addresses(_handles(tensors))
        own = (ctypes.addressof(self._weights) + ADDRESS * begin for begin in begins)
        parts = [_Part(*one) for one in zip((one.address for one in programs), own, map(len, weights), strict=False)]
        self.parts = (_Part * len(parts))(*parts)  # valid while this object lives
        freed = weakref.finalize(self, runner().toolkit_free_tensors, self._weights, len(tensors))
        freed.atexit = False  # a thread that does not end may still read them

    def __call__(self, first: int, hidden: Tensor, inputs: Sequence[Inputs], taps: Taps = ()) -> Tensor:
        """Layers `first` and those behind it, as many as `inputs` has: hidden [1, T, H] -> [1, T, H] (of a draft
        head's scores: [1, T, D]). taps: some of these layers, ascending; each is handed what enters it, [1, T, H].

        Their attention asks `now`. Raises what attention in Python raised, else RuntimeError.
        """
        distinct = {id(tensors): tensors for tensors in inputs}
        places = _places([len(tensors) for tensors in distinct.values()])
        at = dict(zip(distinct, places, strict=True))
        begins, stops = zip(*(at[id(tensors)] for tensors in inputs), strict=True)
        count, library = len(inputs), runner()
        others = _addresses(_handles(list(itertools.chain(*distinct.values()))))
        x, tapped = ctypes.c_void_p(_handles([hidden])[0]), _addresses([None] * len(taps))
        failed = library.toolkit_run_layers(
            ctypes.addressof(self.parts) + ctypes.sizeof(_Part) * first, others, len(others), _numbers(begins),
            _numbers(stops), first, count, ctypes.byref(now.call), ctypes.byref(x),
            _numbers([layer for layer, _ in taps]), len(taps), tapped, self._message, MESSAGE_SIZE,
        )  # fmt: skip
        library.toolkit_free_tensors(others, len(others))
        out, taken = _take(x.value), [_take(one) for one in tapped if one is not None]
        if failed:
            raise _error(f"compiled layers {first} to {first + count - 1}", self._message)
        for (_, keep), entered in zip(taps, taken, strict=True):
            keep(entered)
        return out


class RunnableBody:
    """A body's programs in one call. begin: ids and positions [1, T] -> hidden [1, T, H], and what else the layers are
    called with; end: hidden -> the last hidden state.

    places: by layer, which of those others it is called with. Of begin and end there is one program each.
    """

    def __init__(
        self, begin: RunnableLayers, layers: RunnableLayers, end: RunnableLayers, places: Sequence[Sequence[int]]
    ) -> None:
        self._held, self._message = (begin, layers, end), ctypes.create_string_buffer(MESSAGE_SIZE)
        distinct = list(dict.fromkeys(tuple(one) for one in places))
        at = dict(zip(distinct, _places(list(map(len, distinct))), strict=True))
        begins, stops = zip(*(at[tuple(one)] for one in places), strict=True)
        order = _numbers(list(itertools.chain(*distinct)))
        self._parts = (begin.parts, layers.parts, end.parts, order, len(order), _numbers(begins), _numbers(stops))

    def __call__(self, ids: Tensor, positions: Tensor, taps: Taps = ()) -> Tensor:
        """ids and positions [1, T] -> [1, T, H]; taps and errors as of RunnableLayers, but that a layer behind the last
        one may be tapped too."""
        library, out = runner(), ctypes.c_void_p()
        given, tapped = _addresses(_handles([ids, positions])), _addresses([None] * len(taps))
        failed = library.toolkit_run_body(
            *self._parts, len(self._held[1].parts), ctypes.byref(now.call), given, ctypes.byref(out),
            _numbers([layer for layer, _ in taps]), len(taps), tapped, self._message, MESSAGE_SIZE,
        )  # fmt: skip
        library.toolkit_free_tensors(given, len(given))
        taken = [_take(one) for one in tapped if one is not None]
        if failed:
            raise _error("the compiled body", self._message)
        last = _take(out.value)
        for (_, keep), entered in zip(taps, taken, strict=True):
            keep(entered)
        return last


class RunnableDrafts:
    """A draft head's programs in turn, all that is drafted in a round, behind what its rows have not read yet: fuse
    (features [1, T, W] -> hidden [1, T, H]; none: features are what it reads), passes (hidden, tokens, positions, cos,
    sin -> hidden) and scores (hidden -> logits [1, T, D]). Of each a program for one token, and one for more.

    to_target [D]: the target's ids of what is scored. top: the address of toolkit_top_log_probs of the logits' dtype.
    """

    def __init__(
        self,
        fuse: Sequence[RunnableLayers],
        passes: Sequence[RunnableLayers],
        scores: Sequence[RunnableLayers],
        to_target: Tensor,
        top: int | None,
    ) -> None:
        self._held, self._message = [*fuse, *passes, *scores], ctypes.create_string_buffer(MESSAGE_SIZE)
        self._fuse = _together(fuse) if fuse else None
        self._passes, self._scores = _together(passes), _together(scores)
        self._to_target, self._top = to_target.contiguous(), top

    def __call__(
        self,
        given: Inputs,
        before: Sequence[int],
        counts: Sequence[int],
        shape: DraftShape,
        kept: Sequence[DraftShape | None] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """given: features [1, B * P, W] and tokens [1, B * P] of what is read first, attending as `now` says, in C++;
        cos and sin [S, 1, hd] of every position from 0 on that is read. before and counts [B]: the positions that a row
        has read, and how many of its P are read now, of which the last is drafted from. kept: the part of `shape` that
        each row keeps; None: all of it. -> all candidates, as `draft_beams` has them: tokens, parents, scores [B, C].

        Raises RuntimeError.
        """
        rows, message = len(counts), self._message
        limits = (None, None) if kept is None else (_numbers(values) for values in zip(*map(_sizes, kept), strict=True))
        tokens, parents = torch.empty(2, rows, candidates(shape.num_steps, shape.top_k), dtype=torch.long)
        scores, others = torch.empty(tokens.shape), _addresses(_handles([*given]))
        failed = runner().toolkit_run_drafts(
            self._fuse, self._passes, self._scores, self._top, self._to_target.data_ptr(), others, _numbers(before),
            _numbers(counts), shape.num_steps, shape.top_k, *limits, ctypes.byref(now.call), tokens.data_ptr(),
            parents.data_ptr(), scores.data_ptr(), message, MESSAGE_SIZE,
        )  # fmt: skip
        runner().toolkit_free_tensors(others, len(others))
        if failed:
            raise RuntimeError(f"compiled drafting failed: {message.value.decode(errors='replace')}")
        return tokens, parents, scores


def _together(layers: Sequence[RunnableLayers]) -> Any:
    """The only layer of each."""
    return (_Part * len(layers))(*(one.parts[0] for one in layers))


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where parts of these sizes begin and end, one behind the other."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _error(what: str, message: Any) -> BaseException:
    return now.take_error() or RuntimeError(f"{what} failed: {message.value.decode(errors='replace')}")


def _sizes(shape: DraftShape | None) -> tuple[int, int]:
    """Branches and levels."""
    return (0, 0) if shape is None else (shape.top_k, shape.num_steps)


class _Part(ctypes.Structure):
    """A program, its weights, and how many."""

    _fields_ = (("program", ctypes.c_void_p), ("weights", ctypes.c_void_p), ("count", ctypes.c_int64))


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


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
