"""Compiles the target's body and the head's layers with torch.compile, for the rounds that CUDA graphs record.

The body is one program, so that Dynamo checks its guards once a forward. Its layers of one class are one region of the
program, compiled once (`nested_compile_region`). The head's layers are one program each class: the head's own code
around them depends on lengths.

Attention is not compiled: it is one opaque operator. So a program depends on sizes only, not on context, pages or mask.

A graph has fixed sizes: each (rows, nodes) is compiled in the warm-up runs before its capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from toolkit.heads.decoder_layer import AttendingLayer
from toolkit.infer.attention.layer_attention import register_attention
from toolkit.infer.attention.metadata import AttentionMetadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.linear_states import RowStates
from toolkit.infer.drafters.drafting_head import HeadReader
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.request.params import CompileError
from toolkit.log import get_logger

log = get_logger(__name__)

COMPILED = "toolkit-compiled"  # the name of its attention in transformers' AttentionInterface
SIZES = 256  # limit of programs per compiled function; Dynamo's default of 8 is too low for one program per size
BACKEND: str | Callable[..., Any] = "inductor"  # of torch.compile; it must not use CUDA graphs itself


class CompiledForward:
    """The compiled body of a target and the compiled layers of a head. They replace the originals inside `running`.

    Raises CompileError if the target cannot be compiled, or if the logits differ from the model's.
    """

    def __init__(self, forward: TargetForward, reader: HeadReader | None) -> None:
        if forward.linear_layers:
            raise CompileError(
                "`torch_compile` is set, and the target's linear-attention layers are not compiled; leave it out"
            )
        self._forward = forward
        self._body = _compile(forward.states)
        of_head = [] if reader is None else drafting_layers(reader.head.module)
        if reader is not None and not of_head:
            log.info("the draft head runs eagerly: its layer is a class of transformers, which is not compiled")
        programs = {kind: _compile(kind.forward) for kind in {type(layer) for layer in of_head}}
        self._head_calls: dict[nn.Module, Callable[..., Any]] = {
            layer: self._head_call(layer, programs[type(layer)]) for layer in of_head
        }
        for kind in {type(layer) for layer in forward.target.layers}:
            mark_region(kind)
        try:
            with torch.inference_mode():
                forward.compare_logits(self.running)
        except ValueError as error:
            raise CompileError(f"`torch_compile`: {error}; leave it out") from error

    def around(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run` with target and head compiled."""

        def compiled() -> None:
            with self.running():
                run()

        return compiled

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: target and head run compiled. Module hooks still fire."""
        # Automatic dynamic shapes would make symbols of the sizes of packed weights, after an engine of other weights
        # in this process. Inductor refuses a region whose calls have different symbols.
        settings = torch._dynamo.config.patch(
            recompile_limit=SIZES, accumulated_recompile_limit=SIZES, skip_nnmodule_hook_guards=False,
            automatic_dynamic_shapes=False,
        )  # fmt: skip
        before, self._forward.run_body = self._forward.run_body, self._run_body
        try:
            with settings:
                for layer, call in self._head_calls.items():
                    layer.__dict__["forward"] = call
                yield
        finally:
            self._forward.run_body = before
            for layer in self._head_calls:
                layer.__dict__.pop("forward")

    def _run_body(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, _states: RowStates | None
    ) -> Tensor:
        """`TargetForward.run_body`, compiled."""
        # Copies: a program has guards on strides, which differ in views.
        input_ids, positions = (one.clone(memory_format=torch.contiguous_format) for one in (input_ids, positions))
        layers = count()
        attending = _attending(lambda q, k, v, scoring: metadata.attend(next(layers), q, k, v, scoring))
        with self._forward.own_attention(COMPILED), attending:
            return self._run(self._body, type(self._forward.target.body).__name__, input_ids, positions)

    def _head_call(self, layer: nn.Module, program: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*tensors: Any) -> Any:
            *inputs, attend = tensors
            with _attending(lambda q, k, v, _scoring: attend(q, k, v)):
                return self._run(program, type(layer).__name__, layer, *inputs, _of_head)

        return forward

    def _run(self, program: Callable[..., Any], name: str, *inputs: Any) -> Any:
        try:
            return program(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:  # from the model's code or from the compiler
            said = " ".join(str(error).split())[:200]
            raise CompileError(f"{name} cannot be compiled ({type(error).__name__}: {said})") from error


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)


_regions: set[type] = set()


def mark_region(kind: type[nn.Module]) -> None:
    """Mark the forward of a layer class as one region of the programs that call it. Eager calls stay as they are.

    The class is marked, not each layer: with torch 2.13 all marked layers ran with the weights of the first one.
    """
    if kind not in _regions:
        _regions.add(kind)
        setattr(kind, "forward", nested_compile_region(kind.forward))  # noqa: B010 (mypy refuses the assignment)


def drafting_layers(head: nn.Module) -> list[AttendingLayer]:
    """The layers of the head that take their attention as an argument."""
    return [one for one in head.modules() if isinstance(one, AttendingLayer)]


# -- attention as one opaque operator: it calls what is stored here ----------------------------------------------------


class _Running(threading.local):
    """attend: of the layer that runs in this thread, of queries, keys, values and scoring."""

    attend: Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]


_running = _Running()


@contextmanager
def _attending(attend: Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]) -> Iterator[None]:
    """Context manager around a program: its layers attend so."""
    _running.attend = attend
    try:
        yield
    finally:
        del _running.attend


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    return _running.attend(q, k, v, Scoring(scaling, window, softcap, sinks)).contiguous()


def _shape(q: Tensor, k: Tensor, v: Tensor, *_scoring: Any) -> Tensor:
    """A target's q [B, Hq, N, D], v [B, Hkv, N, Dv] -> [B, N, Hq, Dv]; a head's q [T, Hq, D] -> [T, Hq, D]."""
    return q.new_empty(q.shape if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, float scaling, int? window, float? softcap, Tensor? sinks) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit::attend", _shape)


def _of_target(_module: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, _others: Any) -> Tensor:
    return torch.ops.toolkit.attend(q, k, v, *scoring)


def _of_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.toolkit.attend(q, k, v, 1.0, None, None, None)  # the scoring is that of the stored attention


register_attention(COMPILED, _of_target)
