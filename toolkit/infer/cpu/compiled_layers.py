"""The target's decoder layers, compiled: norms, rotation, projections and MLP without an interpreter between them.

The engine's attention stays as it is, one opaque operator (opaque_attention.py), and all rows lie side by side. So a
program depends on the number of tokens alone, never on rows, context or mask. A layer whose output nobody but the next
one reads leaves its work to that one, and the last of them runs all in one call:

    layer     0      1      2      3 ..      hook before 3
    returns   what it was called with | hidden of 0, 1 and 2 together

Where the body calls all its layers with the very same tensors, it need not call those that leave their work at all. A
hook that only keeps what enters a layer (`InputTap`) parts nothing: it is handed that when they have run. Where there
are no other hooks, the body's own code does not run either: its ends (body_ends.py) and all layers are one call.

Shapes: B rows, N tokens a row, T = B * N, H hidden size, Hq/Hkv heads, D head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils.hooks import RemovableHandle

from toolkit.infer.attention.metadata import AttentionMetadata
from toolkit.infer.attention.noted_forward import Forward, Noted, NotedMetadata, forwards, noted_forward
from toolkit.infer.attention.opaque_attention import COMPILED, now
from toolkit.infer.cpu.body_ends import HOOKS, EndHooks, alone, body_in_one_call, layers_name, with_layers
from toolkit.infer.cpu.layer_program import (
    TOKEN_RANGES,
    TokenRange,
    allowed_difference,
    compile_layer,
    difference,
    program_for,
    tensors_in,
    weights_of,
)
from toolkit.infer.cpu.layer_runner import Inputs, Program, RunnableBody, RunnableLayers, Taps
from toolkit.infer.cpu.packed_products import stand_in
from toolkit.infer.request.errors import CompileError
from toolkit.log import get_logger
from toolkit.targets.features import InputTap
from toolkit.targets.load import Target

logger = get_logger(__name__)

Run = Callable[[int, Tensor, list[Inputs], Taps], Tensor]


class _Inputs(threading.local):
    """A program's inputs from a layer's keywords; most layers are called with the very ones of the layer before."""

    _keywords: dict[str, Any] | None = None
    _tensors: Inputs = ()

    def __init__(self) -> None:
        self.waiting: list[Inputs] = []  # of layers that left their work to the next one

    def of(self, keywords: dict[str, Any]) -> Inputs:
        last = self._keywords
        if last is None or not _same(last, keywords):
            self._keywords = keywords  # held, so that no other object can take the identity of these
            self._tensors = tuple(_side_by_side(tensor) for tensor in tensors_in(keywords))
        return self._tensors

    def forget(self) -> None:
        self._keywords, self._tensors = None, ()
        self.waiting.clear()


def _side_by_side(tensor: Tensor) -> Tensor:
    """[B, N, ..] -> [1, T, ..], contiguous: a program takes nothing else."""
    return (tensor if tensor.shape[0] == 1 else tensor.flatten(0, 1)[None]).contiguous()


_inputs = _Inputs()


class _Instead:
    """Stands in a body's list for a layer that nobody hooks: without a module's way to its forward."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor]) -> None:
        self._layer, self._call = layer, call

    def __call__(self, hidden: Tensor, **keywords: Any) -> Tensor:
        return self._call(hidden, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name == "_layer":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._layer, name)


def check_device(device: torch.device) -> None:
    """Raises CompileError for a device that layers are not compiled for."""
    if device.type != "cpu":
        raise CompileError(
            f"torch_compile came with a target on {device}, where only rounds that are recorded run compiled layers: "
            "leave --torch-compile out, or use --device cpu (serve and chat record rounds: --cuda-graph-max-bs)"
        )


class CompiledLayers:
    """Programs for all layers of a target on the CPU. The target itself is changed only inside `running`.

    run: runs the target's body on a named attention. Every layer's programs, one a range of numbers of tokens, are
    compared with the layer's own code. Raises CompileError where that cannot be had.
    """

    def __init__(self, target: Target, run: Forward, own_attention: Callable[[str], Any]) -> None:
        check_device(target.device)
        self._layers = list(target.layers)
        self._weights = [list(weights_of(layer).values()) for layer in self._layers]
        of_rows = noted_forward(target, run, rows=2, tokens=3)
        self._check_inputs(of_rows.calls)
        self._programs: dict[TokenRange, list[Program]] = {}  # of each range, by layer
        self._runs: dict[TokenRange, Run] = {}
        self._bodies: dict[TokenRange, RunnableBody] = {}  # none: the body's own code runs what is around the layers
        for tokens in TOKEN_RANGES:
            self._programs[tokens] = programs = []
            whole = noted_forward(target, run, 1, tokens.example)
            noted = whole.calls
            kinds: dict[Any, Program] = {}
            for layer, note in zip(self._layers, noted, strict=True):
                kind = _kind(layer, note)
                if kind not in kinds:
                    with own_attention(COMPILED):
                        kinds[kind] = compile_layer(layer, note.hidden, note.keywords, tokens)
                programs.append(kinds[kind])
            self._check(noted, programs, allowed_difference(target.dtype or torch.float32))
            self._runs[tokens] = layers = RunnableLayers(programs, self._weights)
            if len(self._bodies) == len(self._runs) - 1:  # else it is not to be had
                body = body_in_one_call(target, tokens, whole, of_rows, layers, own_attention)
                self._bodies = {} if body is None else self._bodies | {tokens: body}
        # Whether the body hands a layer's output to the next one as it is.
        self._handed_on = [one.out is behind.hidden for one, behind in pairwise(noted)] + [False]
        different = {program for programs in self._programs.values() for program in programs}
        logger.info("torch_compile: %d layers run by %d programs", len(self._layers), len(different))
        # Then the body can do nothing between two layers that another number of them would change.
        self._called_alike = all(self._handed_on[:-1]) and all(_same(one.keywords, noted[0].keywords) for one in noted)
        self._leaves = [False] * len(self._layers)  # its work to the next one
        self._uncalled = [0] * len(self._layers)  # layers before it that the body is not shown
        self._taps: list[tuple[int, InputTap]] = []  # by layer
        self._hooked: list[int] = []  # the layers that somebody hooks
        parts = (self._runs, self._leaves, self._uncalled, self._taps)
        self._calls = [_call(index, *parts) for index in range(len(self._layers))]
        self._instead = [_Instead(*one) for one in zip(self._layers, self._calls, strict=True)]
        self._shown: list[_Instead | nn.Module] = []  # the layers that the body is to call, in order
        self._hooks = [[vars(one)[kind] for one in self._layers] for kind in HOOKS]
        self._body, self._name = target.body, layers_name(target)
        self._ends = EndHooks(target)
        self._seen: tuple[bool, int, int] | None = None  # what we last knew of hooks

    def run_whole(self, input_ids: Tensor, positions: Tensor, plan: AttentionMetadata) -> Tensor | None:
        """A forward of the target's body in one call: input_ids and positions [B, N] -> [B, N, H]. None, and nothing
        has run, where its ends are not compiled, or hooks want more than what enters a layer or leaves the body."""
        if self._follow_hooks() or len(self._bodies) < len(TOKEN_RANGES) or not self._ends.only_tapped:
            return None
        rows, shape = len(input_ids), (*input_ids.shape, -1)
        with alone(self._body):
            try:
                now.start(plan, rows)
                run = program_for(input_ids.numel(), self._bodies)
                taps = [(layer, _in_rows(tap.keep, rows, shape)) for layer, tap in (*self._taps, *self._ends.taps)]
                out = run(input_ids.reshape(1, -1).contiguous(), positions.reshape(1, -1).contiguous(), taps)
            finally:
                now.stop()
            for tap in self._ends.of_last:
                tap.keep(out.view(shape))
        return out.view(shape)

    @contextmanager
    def running(self, plan: AttentionMetadata, rows: int) -> Iterator[None]:
        """A forward of the target's body inside runs its layers compiled. Hooks that are there when it begins fire."""
        hooked = self._follow_hooks()
        calls = [self._calls[index] for index in hooked]
        shown = with_layers(self._body, self._name, self._shown)
        with alone(self._body), shown, forwards([self._layers[index] for index in hooked], calls):
            try:
                now.start(plan, rows)
                yield
            finally:
                now.stop()
                _inputs.forget()

    def _follow_hooks(self) -> list[int]:
        """The layers that somebody hooks. Where hooks have come or gone: which layers leave their work to the next, as
        nobody else reads theirs, what only taps, and which layers the body is to call."""
        of_all = bool(module._global_forward_hooks or module._global_forward_pre_hooks)
        before, behind = self._hooks
        # Every hook that comes takes a new number, every one that goes leaves fewer.
        count = sum(map(len, before)) + sum(map(len, behind)) + sum(map(len, self._ends.hooks))
        seen = (of_all, RemovableHandle.next_id, count)
        if seen != self._seen:
            self._hooked = self._part(of_all, before, behind)
            self._choose_shown(set(self._hooked))
            self._ends.look(of_all)
            self._seen = seen
        return self._hooked

    def _part(
        self, of_all: bool, before: Sequence[Mapping[int, Any]], behind: Sequence[Mapping[int, Any]]
    ) -> list[int]:
        self._taps.clear()
        for index, hooks in enumerate(before):
            only = [] if of_all or behind[index] else [one for one in hooks.values() if isinstance(one, InputTap)]
            if len(only) == len(hooks):
                self._taps.extend((index, one) for one in only)
        tapped = {index for index, _ in self._taps}
        stops = [of_all or bool(hooks) and index not in tapped for index, hooks in enumerate(before)]
        ends = [of_all or bool(hooks) for hooks in behind]
        for index, handed_on in enumerate(self._handed_on):
            self._leaves[index] = handed_on and not ends[index] and not stops[index + 1]
        return [index for index, any_hook in enumerate(zip(stops, ends, strict=True)) if any(any_hook)]

    def _choose_shown(self, hooked: set[int]) -> None:
        self._shown, uncalled = [], 0
        for index, leaves in enumerate(self._leaves):
            if leaves and self._called_alike and index not in hooked:
                uncalled += 1
                continue
            self._shown.append(self._layers[index] if index in hooked else self._instead[index])
            self._uncalled[index], uncalled = uncalled, 0

    def _check_inputs(self, noted: list[Noted]) -> None:
        """Every tensor that goes into a layer must be of rows and tokens, so that rows can lie side by side."""
        for layer, note in zip(self._layers, noted, strict=True):
            wrong = [list(one.shape) for one in tensors_in(note.keywords) if one.shape[:2] != note.hidden.shape[:2]]
            if wrong:
                raise CompileError(
                    f"torch_compile: {type(layer).__name__} is called with tensors of {wrong}, none of [rows, tokens, "
                    "..], which is not known here; leave --torch-compile out for this target"
                )

    def _check(self, noted: list[Noted], programs: list[Program], allowed: float) -> None:
        """Each layer's program must ask for the same attention and give the same output as the layer."""
        for index, (layer, note) in enumerate(zip(self._layers, noted, strict=True)):
            plan = NotedMetadata()
            now.start(plan)
            now.call.layer = index
            try:
                out = programs[index]([note.hidden, *tensors_in(note.keywords), *self._weights[index]])[0]
            except RuntimeError as error:
                raise CompileError(
                    f"torch_compile: layer {index} ({type(layer).__name__}), compiled, does not run ({error}); leave "
                    "--torch-compile out"
                ) from error
            finally:
                now.stop()
            found = difference(out, note.out)
            if plan.asked != [note.asked] or not found <= allowed:
                raise CompileError(
                    f"torch_compile: layer {index} ({type(layer).__name__}), compiled, gives another result: off by "
                    f"{found:.2g} of its size (allowed: {allowed:g}), attention {plan.asked} in place of "
                    f"{note.asked}; leave --torch-compile out"
                )


def _call(
    index: int,
    runs: Mapping[TokenRange, Run],
    leaves: Sequence[bool],
    uncalled: Sequence[int],
    tapped: Sequence[tuple[int, InputTap]],
) -> Callable[..., Tensor]:
    """What takes the place of a layer's forward."""

    def forward(hidden: Tensor, **keywords: Any) -> Tensor:
        del keywords["plan"]
        waiting = _inputs.waiting
        waiting.extend([_inputs.of(keywords)] * (1 + uncalled[index]))
        if leaves[index]:
            return hidden
        run, first = program_for(hidden.shape[0] * hidden.shape[1], runs), index + 1 - len(waiting)

        taps = [(layer, _in_rows(tap.keep, now.rows, hidden.shape)) for layer, tap in tapped if first <= layer <= index]
        out = run(first, _side_by_side(hidden), waiting, taps)
        waiting.clear()
        return out if now.rows == 1 else out.view(hidden.shape)

    return forward


def _in_rows(keep: Callable[[Tensor], None], rows: int, shape: Sequence[int]) -> Callable[[Tensor], None]:
    """`keep`, of what lies side by side."""
    return keep if rows == 1 else lambda entered: keep(entered.view(shape))


def _same(keywords: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether a layer is called with the very objects of another."""
    return keywords.keys() == others.keys() and all(map(is_, keywords.values(), others.values()))


def _kind(layer: nn.Module, note: Noted) -> Any:
    """Equal for layers that one program serves: classes, plain settings, attention, shapes of weights and inputs."""
    plain = (int, float, str, bool, type(None))
    settings = [
        (name, type(part).__qualname__, key, value)
        for name, part in layer.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, plain) and key != "layer_idx"
    ]
    weights = [
        (name, tensor.shape, stand_in(tensor).stride(), tensor.dtype) for name, tensor in weights_of(layer).items()
    ]
    inputs = [(tensor.shape, tensor.dtype) for tensor in (note.hidden, *tensors_in(note.keywords))]
    others = [(name, value) for name, value in note.keywords.items() if isinstance(value, plain)]
    return repr((settings, note.asked[1:4], note.asked[4] is None, weights, inputs, others))
