"""Compiles the target's body and the head's layers with torch.compile, for eager rounds or for CUDA graphs.

The body is one program, so that Dynamo checks its guards once a forward. Its layers of one class are one region of the
program, compiled once (`nested_compile_region`). The head's layers are one program each class: the head's own code
around them depends on lengths.

Attention is not compiled: it is one opaque operator for the target (layer_attention.py) and one for the head
(`attend_drafting`). So a program depends on sizes only, not on context, pages or mask.

Eager rounds use dynamic sizes: one program for a single row and one for several, each for a single token and for
several. They are compiled when the engine is built. A graph has fixed sizes: each (rows, nodes) is compiled in the
warm-up runs before its capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import nested_compile_region

from toolkit.heads.decoder_layer import Attend, AttendingLayer
from toolkit.infer.attention.layer_attention import COMPILED, attending
from toolkit.infer.attention.metadata import AttentionMetadata
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.linear_states import RowStates
from toolkit.infer.drafters.drafter import Drafter
from toolkit.infer.drafters.drafting_head import HeadReader
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.kernels.reference import attend_causal
from toolkit.infer.request.params import CompileError
from toolkit.log import get_logger

log = get_logger(__name__)

Options = dict[str, str | int | bool | Callable[..., Any]]  # of torch.compile
SIZES = 256  # limit of programs per compiled function; Dynamo's default of 8 is too low for one program per size
BACKEND: str | Callable[..., Any] = "inductor"  # of torch.compile; it must not use CUDA graphs itself
# Example sizes for "several". Dynamo treats equal sizes as one symbol, so they differ.
SEVERAL_ROWS, SEVERAL_TOKENS = 2, 5


class CompiledForward:
    """The compiled body of a target and the compiled layers of a head. They replace the originals inside `running`.

    dynamic: for eager rounds. options: of Inductor. Raises CompileError if the target cannot be compiled, or if the
    logits differ from the model's.
    """

    def __init__(
        self,
        forward: TargetForward,
        reader: HeadReader | None,
        *,
        dynamic: bool = False,
        options: Options | None = None,
    ) -> None:
        device = forward.target.device
        if forward.linear_layers:
            raise CompileError(
                "`torch_compile` is set, and the target's linear-attention layers are not compiled; leave it out"
            )
        if dynamic and device.type != "cpu":
            raise CompileError(
                f"`torch_compile` is given with a target on {device}, where only recorded rounds are compiled: leave "
                "it out, set `device` to cpu, or set `cuda_graph_max_bs`"
            )
        self._forward, self._reader, self._dynamic, self._options = forward, reader, dynamic, options or {}
        self._body = self._compile(forward.states, dynamic=None if dynamic else False)
        of_head = [] if reader is None else drafting_layers(reader.head.module)
        if reader is not None and not of_head:
            log.info("the draft head runs eagerly: its layer is a class of transformers, which is not compiled")
        programs = {kind: self._compile(kind.forward, dynamic=dynamic) for kind in {type(layer) for layer in of_head}}
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

    def _compile(self, function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
        """dynamic None: only the sizes that `_run_body` marks are dynamic."""
        options = dict(self._options) if BACKEND == "inductor" else {}
        if self._dynamic:
            options["guard_filter_fn"] = any_global_state
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=BACKEND, options=options or None)

    @torch.inference_mode()
    def compile_all(self, max_rows: int) -> None:
        """Compile all programs of eager rounds of up to `max_rows` rows."""
        device, lengths = self._forward.target.device, (1, SEVERAL_TOKENS)
        metadata: Any = UncachedMetadata()
        with self.running():
            for rows in (1, SEVERAL_ROWS)[: min(max_rows, 2)]:
                for tokens in lengths:
                    ids = torch.zeros(rows, tokens, dtype=torch.long, device=device)
                    at = torch.arange(tokens, device=device).repeat(rows, 1)
                    self._forward(ids, at, metadata)
            if self._reader is not None:
                for tokens in lengths:
                    self._reader.read_example(tokens, metadata)

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
        if self._dynamic:
            for tensor in (input_ids, positions):
                # Sizes of 1 have programs of their own.
                torch._dynamo.maybe_mark_dynamic(tensor, [at for at, size in enumerate(tensor.shape) if size > 1])
        with self._forward.own_attention(COMPILED), attending(metadata):
            return self._run(self._body, type(self._forward.target.body).__name__, input_ids, positions)

    def _head_call(self, layer: nn.Module, program: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*tensors: Any) -> Any:
            *inputs, drafting.attend = tensors
            try:
                return self._run(program, type(layer).__name__, layer, *inputs, torch.ops.toolkit.attend_drafting)
            finally:
                del drafting.attend

        return forward

    def _run(self, program: Callable[..., Any], name: str, *inputs: Any) -> Any:
        try:
            return program(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:  # from the model's code or from the compiler
            said = " ".join(str(error).split())[:200]
            raise CompileError(f"{name} cannot be compiled ({type(error).__name__}: {said})") from error


def any_global_state(guards: Sequence[Any]) -> list[bool]:
    """Which guards a program keeps: all but that on torch's global state, of which the number of threads is part.

    With that guard, a round with fewer threads (thread_limit.py) would compile the programs again. The rest of the
    state, such as the default dtype, is the same in all rounds.
    """
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


_regions: set[type] = set()


def mark_region(kind: type[nn.Module]) -> None:
    """Mark the forward of a layer class as one region of the programs that call it. Eager calls stay as they are.

    The class is marked, not each layer: with torch 2.13 all marked layers ran with the weights of the first one.
    """
    if kind not in _regions:
        _regions.add(kind)
        setattr(kind, "forward", nested_compile_region(kind.forward))  # noqa: B010 (mypy refuses the assignment)


def compile_for_eager_rounds(
    forward: TargetForward, drafter: Drafter, max_rows: int, options: Options | None
) -> CompiledForward:
    """Compile the target's body and the layers of the drafter's head for eager rounds of up to `max_rows` rows."""
    reader = drafter.reader if isinstance(drafter, HeadDrafter) else None
    compiled = CompiledForward(forward, reader, dynamic=True, options=options)
    compiled.compile_all(max_rows)
    return compiled


class UncachedMetadata:
    """Attention metadata of example inputs: causal attention without a KV cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, N, Hq, Dv]."""
        return attend_causal(q, k, v, scaling=scoring.scaling)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """There is no cache."""


# -- the attention of a head's layers as one opaque operator: it calls the attention that is stored here ---------------


class _Drafting(threading.local):
    """The attention of the head's layer that runs in this thread."""

    attend: Attend


drafting = _Drafting()


def drafting_layers(head: nn.Module) -> list[AttendingLayer]:
    """The layers of the head that take their attention as an argument."""
    return [one for one in head.modules() if isinstance(one, AttendingLayer)]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D] -> [T, Hq, D] of the T tokens of all rows."""
    return drafting.attend(q, k, v).contiguous()


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define("attend_drafting(Tensor q, Tensor k, Tensor v) -> Tensor")
_library.impl("attend_drafting", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit::attend_drafting", lambda q, _k, _v: q.new_empty(q.shape))
