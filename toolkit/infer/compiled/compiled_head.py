"""The layers of a draft head, compiled on a CPU as the target's are: a draft step costs what its parameters cost.

Attention stays the engine's, one opaque operator (drafting_attention.py), so that a program depends on the number of
tokens alone.

Shapes: T tokens, H head hidden size, hd head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.infer.compiled.compiled_layers import allowed_difference, forwards
from toolkit.infer.compiled.drafting_attention import HeadLayer, drafting, drafting_layers
from toolkit.infer.compiled.layer_program import (
    TOKEN_RANGES,
    TokenRange,
    compile_layer,
    program_for,
    weights_of,
)
from toolkit.infer.compiled.layer_runner import Program
from toolkit.infer.errors import CompileError
from toolkit.infer.kernels.reference import attend_causal
from toolkit.models.decoder_layer import Attend, DecoderLayer


class DraftHeadLayer(nn.Module):
    """A layer as `compile_layer` takes it: [1, T, ..] in and out, the attention the opaque one."""

    def __init__(self, layer: HeadLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, first: Tensor, *, others: tuple[Tensor, ...]) -> Tensor:
        return self.layer(first[0], *(one[0] for one in others), torch.ops.toolkit.attend_drafting)[None]


class CompiledHead:
    """Programs for all layers of a head on the CPU; the head is changed only inside `running`.

    Every program is compared with the layer's own code, on each range of numbers of tokens. Raises CompileError.
    """

    def __init__(self, head: nn.Module) -> None:
        layers = drafting_layers(head)
        self._layers: list[nn.Module] = [*layers]
        self._calls = [_call(layer) for layer in layers]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Passes of the head inside run its layers compiled."""
        with forwards(self._layers, self._calls):
            yield


def _call(layer: HeadLayer) -> Callable[..., Tensor]:
    weights = list(weights_of(layer).values())
    programs = {tokens: _checked(layer, weights, tokens) for tokens in TOKEN_RANGES}

    def forward(*inputs: Any) -> Tensor:
        *tensors, attend = inputs
        return _run(program_for(len(tensors[0]), programs), tensors, weights, attend)

    return forward


def _run(program: Program, tensors: list[Tensor], weights: list[Tensor], attend: Attend) -> Tensor:
    """The layer's tensors [T, ..] -> [T, H]."""
    drafting.attend = attend
    try:
        return program([*(one.contiguous()[None] for one in tensors), *weights])[0][0]
    finally:
        del drafting.attend


def _checked(layer: HeadLayer, weights: list[Tensor], tokens: TokenRange) -> Program:
    """The program for so many tokens, which gives what the layer gives."""
    inputs = _inputs(layer, tokens.example)
    first, *others = (one[None] for one in inputs)
    program = compile_layer(DraftHeadLayer(layer), first, {"others": tuple(others)}, tokens)
    own = layer(*inputs, _causal).float()
    difference = ((_run(program, inputs, weights, _causal).float() - own).norm() / own.norm()).item()
    allowed = allowed_difference(inputs[0].dtype)
    if not difference <= allowed:
        raise CompileError(
            f"torch_compile: {type(layer).__name__} of the head, compiled, gives another result: off by "
            f"{difference:.2g} of its size (allowed: {allowed:g}); leave --torch-compile out"
        )
    return program


def _inputs(layer: HeadLayer, tokens: int) -> list[Tensor]:
    """What the layer reads, of the right shapes and dtype; the numbers hardly matter."""
    norm = layer.post_attention_layernorm.weight
    drawn = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens, len(norm), generator=drawn).to(norm.dtype)
    angles = torch.randn(tokens, 1, layer.self_attn.head_dim, generator=drawn)
    read = list(hidden[: 1 if isinstance(layer, DecoderLayer) else 2])  # the first layer reads embeddings too
    return [*read, angles.cos().to(norm.dtype), angles.sin().to(norm.dtype)]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, Hq, hd], k and v [T, Hkv, hd] -> [T, Hq, hd]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attend_causal(q, k, v, scaling=q.shape[-1] ** -0.5)[0]
