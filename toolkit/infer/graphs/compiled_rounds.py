"""Layers of target and head, compiled for rounds that are recorded as graphs: one set of kernels a size of round.

A recorded round has fixed sizes, so that each (rows, nodes) is compiled for itself, in the runs before its recording;
the recording then holds the compiled kernels, and nothing is compiled or looked up while it is replayed. Dynamo shares
what it compiled between layers of one kind. Attention stays the engine's: to the compiler it is one opaque operator for
the target (opaque_attention.py), and one for the head (drafting_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.infer.attention.metadata import AttentionMetadata
from toolkit.infer.attention.noted_forward import forwards
from toolkit.infer.attention.opaque_attention import COMPILED, now
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.graphs.draft_attention import drafting, drafting_layers
from toolkit.infer.request.errors import CompileError

SIZES = 256  # that one kind of layer may be compiled for; Dynamo's own limit of 8 is for programs that never settle
DEFAULT_ROWS = 32


@dataclass(frozen=True)
class CompileSettings:
    """max_rows: recordings of more rows hold the layers' own code. backend: of torch.compile; it must make no CUDA
    graphs of its own. Raises CompileError for max_rows below 1."""

    max_rows: int = DEFAULT_ROWS
    backend: str = "inductor"

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise CompileError(f"torch_compile_max_bs is {self.max_rows}; a round has at least 1 row")


class CompiledRounds:
    """A target's layers, and those of a head, compiled by torch.compile. Both are changed only inside `running`.

    Raises CompileError where the target's layers cannot be compiled, or give other logits than the model.
    """

    def __init__(self, settings: CompileSettings, forward: TargetForward, head: nn.Module | None) -> None:
        self.settings, self._forward = settings, forward
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}  # by the layers' own code
        of_head = [] if head is None else drafting_layers(head)
        self._layers: list[nn.Module] = [*forward.target.layers, *of_head]
        self._calls = [self._target_call(*one) for one in enumerate(forward.target.layers)]
        self._calls += [self._draft_call(layer) for layer in of_head]
        try:
            with torch.inference_mode():
                forward.compare_logits(self.running)
        except ValueError as error:
            raise CompileError(f"torch_compile: {error}; leave --torch-compile out") from error

    def around(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run` with the layers compiled."""

        def compiled() -> None:
            with self.running():
                run()

        return compiled

    @contextmanager
    def running(self) -> Iterator[None]:
        """Forwards of target and head inside run their layers compiled; the layers' hooks fire as ever."""
        limits = torch._dynamo.config.patch(recompile_limit=SIZES, accumulated_recompile_limit=SIZES)
        before, self._forward.attention = self._forward.attention, COMPILED
        try:
            with limits, forwards(self._layers, self._calls):
                yield
        finally:
            self._forward.attention = before

    def _target_call(self, index: int, layer: nn.Module) -> Callable[..., Any]:
        def forward(*tensors: Any, plan: AttentionMetadata, **keywords: Any) -> Any:
            now.start(plan)
            now.call.layer = index
            try:
                return self._run(layer, *tensors, **keywords)
            finally:
                now.stop()

        return forward

    def _draft_call(self, layer: nn.Module) -> Callable[..., Any]:
        def forward(*tensors: Any) -> Any:
            *inputs, drafting.attend = tensors
            try:
                return self._run(layer, *inputs, torch.ops.toolkit.attend_drafting)
            finally:
                del drafting.attend

        return forward

    def _run(self, layer: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        own = type(layer).forward
        if own not in self._compiled:
            self._compiled[own] = torch.compile(own, fullgraph=True, dynamic=False, backend=self.settings.backend)
        try:
            return self._compiled[own](layer, *inputs, **keywords)
        except torch._dynamo.exc.TorchDynamoException as error:  # of the family's own code, or of the compiler
            said = " ".join(str(error).split())[:200]
            raise CompileError(f"{type(layer).__name__} cannot be compiled ({type(error).__name__}: {said})") from error
