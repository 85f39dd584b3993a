"""What a target's body does before its layers and behind them, as modules that compile as layers do.

    ids, positions -> BodyBegin -> hidden, the layers' other inputs -> layers -> hidden -> BodyEnd -> last hidden state

Both are the body's own forward, with nothing in the place of its layers; what of it an output does not need falls away
when it is compiled.

Shapes: T tokens of all rows, side by side; H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.infer.compiled.layer_program import (
    TokenRange,
    allowed_difference,
    compile_layer,
    off,
    tensors_in,
    weights_of,
)
from toolkit.infer.compiled.layer_runner import RunnableBody, RunnableLayers
from toolkit.infer.compiled.noted_forward import Noted, noted_tokens
from toolkit.infer.compiled.opaque_attention import COMPILED
from toolkit.infer.errors import CompileError
from toolkit.log import get_logger
from toolkit.target.load import Target

logger = get_logger(__name__)


class _BodyWithoutLayers(nn.Module):
    """own_attention: the body's forwards inside it are of a named attention."""

    def __init__(self, target: Target, own_attention: Callable[[str], Any]) -> None:
        super().__init__()
        self._held = (target.body,)  # in a tuple: its layers' weights are not this module's
        self._name, self._count = layers_name(target), target.n_layers
        self._own_attention = own_attention
        self.parts = nn.ModuleDict(outside_of_layers(target))

    def _run(self, ids: Tensor, positions: Tensor, layer: Callable[..., Tensor]) -> Tensor:
        """The body's forward with `layer` as every layer."""
        (body,) = self._held
        with shown(body, self._name, [layer] * self._count), self._own_attention(COMPILED):
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
    noted: Sequence[Noted],
    layers: RunnableLayers,
    own_attention: Callable[[str], Any],
) -> RunnableBody | None:
    """The body for that many tokens; noted: a forward of it by its own code, layers: its compiled ones.

    None where it does more between its layers than hand on what they give, and where what it does around them cannot be
    compiled; the log says why. Raises CompileError where that, compiled, gives another result.
    """
    if any(one.out is not behind.hidden for one, behind in pairwise(noted)):
        return None
    begin, end = BodyBegin(target, own_attention), BodyEnd(target, own_attention)
    ids, at = noted_tokens(target, 1, tokens.example)
    last = noted[-1].out
    weights = [list(weights_of(one).values()) for one in (begin, end)]
    try:
        programs = compile_layer(begin, ids, {"positions": at}, tokens), compile_layer(end, last, {}, tokens)
        made = (*programs[0]([ids, at, *weights[0]]), *programs[1]([last, *weights[1]]))
    except (CompileError, RuntimeError) as error:
        why = str(error).partition(";")[0]
        logger.info("torch_compile: what the target does around its layers stays its own code (%s)", why)
        return None
    others, places = distinct([tensors_in(one.keywords) for one in noted])
    allowed = allowed_difference(target.dtype or torch.float32)
    for got, own in zip(made, (noted[0].hidden, *others, end(last)), strict=True):
        if not (difference := off(got, own)) <= allowed:
            raise CompileError(
                f"torch_compile: what {type(target.model).__name__} does around its layers, compiled, gives another "
                f"result: off by {difference:.2g} of its size (allowed: {allowed:g}); leave --torch-compile out"
            )
    runs = [RunnableLayers([one], [held]) for one, held in zip(programs, weights, strict=True)]
    return RunnableBody(runs[0], layers, runs[1], places)


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
def shown(body: nn.Module, name: str, layers: Sequence[Any]) -> Iterator[None]:
    """The body meets these as its layers. A plain entry of the instance: what it costs is no time."""
    body.__dict__[name] = layers
    try:
        yield
    finally:
        del body.__dict__[name]
