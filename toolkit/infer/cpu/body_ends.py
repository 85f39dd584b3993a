"""What a target's body does before its layers and behind them, as modules that compile as layers do.

    ids, positions -> BodyBegin -> hidden, the layers' other inputs -> layers -> hidden -> BodyEnd -> last hidden state

Both are the body's own forward, with nothing in the place of its layers; what of it an output does not need falls away
when it is compiled.

Shapes: T tokens of all rows, side by side; H hidden size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from toolkit.infer.attention.noted_forward import NotedForward
from toolkit.infer.attention.opaque_attention import COMPILED
from toolkit.infer.cpu.layer_program import (
    TokenRange,
    allowed_difference,
    compile_layer,
    difference,
    tensors_in,
    unchanged,
    weights_of,
)
from toolkit.infer.cpu.layer_runner import RunnableBody, RunnableLayers
from toolkit.infer.request.errors import CompileError
from toolkit.log import get_logger
from toolkit.targets.features import InputTap, OutputTap
from toolkit.targets.load import Target

logger = get_logger(__name__)

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_busy: set[int] = set()  # bodies whose compiled layers run, by id
_looking = threading.Lock()


class _BodyWithoutLayers(nn.Module):
    """A target's body, of which only what stands around the layers counts as its own.

    own_attention: the body's forwards inside it are of a named attention.
    """

    def __init__(self, target: Target, own_attention: Callable[[str], Any]) -> None:
        super().__init__()
        self._held = (target.body,)  # in a tuple: its layers' weights are not this module's
        self._name, self._count = layers_name(target), target.n_layers
        self._own_attention = own_attention
        self.parts = nn.ModuleDict(outside_of_layers(target))

    def _run(self, ids: Tensor, positions: Tensor, layer: Callable[..., Tensor]) -> Tensor:
        """The body's forward with `layer` as every layer."""
        (body,) = self._held
        instead = with_layers(body, self._name, [layer] * self._count)
        with instead, _without_hooks([body, *self.parts.modules()]), self._own_attention(COMPILED):
            out: Tensor = body(input_ids=ids, position_ids=positions, use_cache=False, plan=None).last_hidden_state
        return out


class BodyBegin(_BodyWithoutLayers):
    """ids and positions [1, T] -> hidden [1, T, H] of the first layer, and what else layers are called with."""

    def forward(self, ids: Tensor, *, positions: Tensor) -> tuple[Tensor, ...]:
        entered: list[Tensor] = []
        called: list[list[Tensor]] = []

        def note(hidden: Tensor, **keywords: Any) -> Tensor:
            entered.append(hidden)
            called.append(layer_inputs(keywords))
            return hidden

        self._run(ids, positions, note)
        # Copies: an input of the program must not be an output of it.
        return tuple(one.clone(memory_format=torch.contiguous_format) for one in (entered[0], *distinct(called)[0]))


class BodyEnd(_BodyWithoutLayers):
    """hidden [1, T, H] behind the last layer -> the last hidden state."""

    def forward(self, hidden: Tensor) -> Tensor:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return self._run(ids, ids, lambda _hidden, **_keywords: hidden)


def body_in_one_call(
    target: Target,
    tokens: TokenRange,
    noted: NotedForward,
    of_rows: NotedForward,
    layers: RunnableLayers,
    own_attention: Callable[[str], Any],
) -> RunnableBody | None:
    """The body for that many tokens; noted and of_rows: forwards of it by its own code, of one row and of several;
    layers: its compiled ones.

    None, and the log says why, where it does more than begin, call its layers and end, where a row's tokens meet around
    the layers, and where what it does there cannot be compiled. Raises CompileError where that, compiled, gives another
    result.
    """
    begin, end = BodyBegin(target, own_attention), BodyEnd(target, own_attention)
    allowed = allowed_difference(target.dtype or torch.float32)
    try:
        if module._global_forward_hooks or module._global_forward_pre_hooks:
            raise CompileError("hooks on all modules are there")
        for forward in (noted, of_rows):
            _compare(begin, end, forward, allowed)
        with unchanged([target.body]):
            of_begin = compile_layer(begin, noted.ids, {"positions": noted.positions}, tokens)
            of_end = compile_layer(end, noted.calls[-1].out, {}, tokens)
    except CompileError as error:
        logger.warning("what the target does around its layers stays its own code, which is slower: %s", error)
        return None
    weights = [list(weights_of(one).values()) for one in (begin, end)]
    last, farthest = noted.calls[-1].out, noted.positions + (target.max_context - 1 - int(noted.positions.max()))
    made, wanted = [], [end(last)]
    try:
        made += of_end([last, *weights[1]])
        for at in (noted.positions, farthest):
            made += of_begin([noted.ids, at, *weights[0]])
            wanted += begin(noted.ids, positions=at)
    except RuntimeError as error:
        raise CompileError(
            f"torch_compile: what {type(target.model).__name__} does around its layers, compiled, does not run "
            f"({error}); leave --torch-compile out"
        ) from error
    found = _largest(made, wanted)
    if not found <= allowed:
        raise CompileError(
            f"torch_compile: what {type(target.model).__name__} does around its layers, compiled, gives another "
            f"result: off by {found:.2g} of its size (allowed: {allowed:g}); leave --torch-compile out"
        )
    runs = [RunnableLayers([one], [held]) for one, held in zip((of_begin, of_end), weights, strict=True)]
    places = distinct([tensors_in(one.keywords) for one in noted.calls])[1]
    return RunnableBody(runs[0], layers, runs[1], places)


def _compare(begin: BodyBegin, end: BodyEnd, noted: NotedForward, allowed: float) -> None:
    """Raises CompileError unless the body's forward is its ends around its layers, rows side by side."""

    def flat(tensor: Tensor) -> Tensor:
        return tensor.reshape(1, -1, *tensor.shape[2:])

    calls = noted.calls
    handed_on = all(one.out is behind.hidden for one, behind in pairwise(calls)) and noted.into_norm is calls[-1].out
    entered = [calls[0].hidden, *distinct([tensors_in(one.keywords) for one in calls])[0], noted.last]
    around = [*begin(flat(noted.ids), positions=flat(noted.positions)), end(flat(calls[-1].out))]
    if not handed_on or not _largest(around, [flat(one) for one in entered]) <= allowed:
        raise CompileError("it does more than begin, call its layers and end, token by token")


def _largest(got: Sequence[Tensor], own: Sequence[Tensor]) -> float:
    if len(got) != len(own):
        return torch.inf
    found = [difference(*pair) for pair in zip(got, own, strict=True)]
    return torch.inf if any(map(math.isnan, found)) else max(found)


@contextmanager
def _without_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Hooks of others neither fire nor become part of a program."""
    held = [vars(one)[kind] for one in modules for kind in HOOKS]
    before = [dict(one) for one in held]
    for one in held:
        one.clear()
    try:
        yield
    finally:
        for one, then in zip(held, before, strict=True):
            one.update(then)


class EndHooks:
    """The hooks on what stands around a target's layers: of the body, and its other parts.

    taps: who keeps what leaves the last layer, and enters the final norm; of_last: what leaves the body. only_tapped:
    nobody wants more.
    """

    def __init__(self, target: Target) -> None:
        parts = [one for part in outside_of_layers(target).values() for one in part.modules()]
        self.hooks = [vars(one)[kind] for one in (target.body, *parts) for kind in HOOKS]
        self._count = target.n_layers
        self._into_norm, self._out_of_body = target.final_norm._forward_pre_hooks, target.body._forward_hooks
        self.look(of_all=False)

    def look(self, of_all: bool) -> None:
        """Anew, where hooks have come or gone."""
        into, out = list(self._into_norm.values()), list(self._out_of_body.values())
        self.taps = [(self._count, one) for one in into if isinstance(one, InputTap)]
        self.of_last = [one for one in out if isinstance(one, OutputTap)]
        self.only_tapped = not of_all and sum(map(len, self.hooks)) == len(self.taps) + len(self.of_last)


def outside_of_layers(target: Target) -> dict[str, nn.Module]:
    """The parts of its body but its layers."""
    return {name: child for name, child in target.body.named_children() if child is not target.layers}


def layers_name(target: Target) -> str:
    """Under which its body holds its layers."""
    return next(name for name, child in target.body.named_children() if child is target.layers)


def layer_inputs(keywords: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a layer is called with, beside its hidden."""
    return tensors_in({name: value for name, value in keywords.items() if name != "plan"})


def distinct(called: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[int]]]:
    """Of the tensors that each layer is called with: every one once, and by layer which of these it is called with."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}
    for one in (tensor for of_layer in called for tensor in of_layer):
        if id(one) not in places:
            places[id(one)] = len(tensors)
            tensors.append(one)
    return tensors, [[places[id(tensor)] for tensor in of_layer] for of_layer in called]


@contextmanager
def with_layers(body: nn.Module, name: str, layers: Sequence[Any]) -> Iterator[None]:
    """The body meets these as its layers: a plain entry of the instance, which costs no time."""
    body.__dict__[name] = layers
    try:
        yield
    finally:
        del body.__dict__[name]


@contextmanager
def alone(body: nn.Module) -> Iterator[None]:
    """Raises RuntimeError where a forward of this body runs compiled already."""
    with _looking:
        if id(body) in _busy:
            raise RuntimeError("this target's compiled layers run already: engines in two threads need two targets")
        _busy.add(id(body))
    try:
        yield
    finally:
        _busy.discard(id(body))
