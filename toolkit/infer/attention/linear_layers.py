"""Runs a hybrid target's linear-attention layers so that the states after every node of a chain are known.

transformers computes several tokens of such a layer in chunks and returns the last state alone. In a forward over
chains the same layer's rule for single tokens runs node by node instead: the one that plain decoding uses.

Shapes: B rows, N tokens of each.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Cache

from toolkit.infer.cache.linear_states import RowStates
from toolkit.infer.request.params import UnsupportedTargetError

LINEAR = "linear_attention"  # in `layer_types` of a configuration
# The two rules of Qwen3-Next and Qwen3.5: names in transformers' modules.
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
Rule = Callable[..., Any]


class _Running(threading.local):
    """The states of the forward over chains that runs in this thread; None in other forwards."""

    states: RowStates | None = None


_running = _Running()


def linear_layers(config: Any) -> tuple[int, ...]:
    """The numbers of the linear-attention layers of a target's text configuration."""
    types = getattr(config, "layer_types", None) or ()
    return tuple(number for number, kind in enumerate(types) if kind == LINEAR)


def step_by_node(layers: nn.ModuleList, numbers: tuple[int, ...]) -> None:
    """Let the layers with these numbers run node by node inside `keeping`; other forwards of the model do not change.

    Raises UnsupportedTargetError for a layer without the two rules."""
    if numbers and not hasattr(Cache, "get_conv_state"):
        raise UnsupportedTargetError(
            f"targets with linear-attention layers need transformers 5.23 or later, and {transformers.__version__} is "
            "installed; pip install -U transformers"
        )
    for number in numbers:
        mixer = next(
            (part for part in layers[number].modules() if hasattr(part, "conv1d") and part is not layers[number]), None
        )
        module = sys.modules[type(mixer).__module__]
        if all(hasattr(module, name) for name in RULES):
            _replace(module, *RULES)
        else:
            raise UnsupportedTargetError(
                f"layer {number} ({type(layers[number]).__name__}) has a linear attention other than the gated delta "
                "rule, whose state after each drafted token the engine cannot keep; use a target of another family, "
                "or Hugging Face's generate"
            )


def _replace(owner: Any, chunk_name: str, step_name: str) -> None:
    chunk, step = getattr(owner, chunk_name), getattr(owner, step_name)
    if not hasattr(chunk, "by_node"):
        setattr(owner, chunk_name, _by_node(chunk, step))


def _by_node(chunk: Rule, step: Rule) -> Rule:
    """`chunk`, but inside `keeping` one call of `step` for each token."""

    @functools.wraps(chunk)
    def rule(query: Any, key: Any, value: Any, *, g: Any, beta: Any, initial_state: Any = None, **others: Any) -> Any:
        states = _running.states
        if states is None:
            return chunk(query, key, value, g=g, beta=beta, initial_state=initial_state, **others)
        outs, state = [], initial_state
        for one in (slice(node, node + 1) for node in range(query.shape[1])):
            out, state = step(
                query[:, one], key[:, one], value[:, one], g=g[:, one], beta=beta[:, one], initial_state=state, **others
            )
            outs.append(out)
            states.running.append(state)
        return torch.cat(outs, dim=1), state

    rule.by_node = True  # type: ignore[attr-defined]
    return rule


@contextmanager
def keeping(states: RowStates) -> Iterator[None]:
    """Context manager around a forward: chains leave their states after each node in `states`."""
    _running.states = states if states.by_node else None
    try:
        yield
    finally:
        _running.states = None
