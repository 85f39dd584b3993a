"""Hidden states of the target, captured by hooks during its forward.

Shapes: B rows, N tokens a row, H target hidden size, A number of auxiliary layers.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from toolkit.errors import TargetError
from toolkit.targets.target import Target


def check_aux_layer_ids(aux_layer_ids: tuple[int, ...], n_layers: int) -> None:
    """Raise `TargetError` unless the ids are ascending, distinct and within 0..n_layers."""
    ids = aux_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > n_layers:
        raise TargetError(
            f"aux_layer_ids is {list(ids)}; a target of {n_layers} layers needs ascending, distinct ids from 0 "
            f"(the embeddings) to {n_layers} (the last layer's output)"
        )


class _InputTap:
    """A hook that keeps a module's input. (A compiled program stores an attribute without a guard on its old value.)"""

    state: torch.Tensor | None = None

    def __call__(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.state = args[0] if args else kwargs["hidden_states"]


class _OutputTap(_InputTap):
    """A hook that keeps the body's last hidden state."""

    def __call__(self, _module: Any, _args: tuple[Any, ...], output: Any) -> None:
        self.state = output.last_hidden_state


class Capture:
    """States that hooks keep during a forward of the target's body. Call `take` after each forward.

    `remove` removes the hooks; so does the end of this object, because an engine that could not be built is not closed.
    """

    def __init__(self, taps: list[_InputTap], handles: list[RemovableHandle]) -> None:
        self._taps, self.remove = taps, weakref.finalize(self, _remove, handles)

    def take_each(self) -> list[torch.Tensor]:
        """The states [B, N, H] of the last forward, in the order of the ids. Every call needs a forward before it."""
        states = [tap.state for tap in self._taps if tap.state is not None]
        assert len(states) == len(self._taps), "no forward of the target ran since the last take"
        for tap in self._taps:
            tap.state = None
        return states

    def put(self, states: torch.Tensor) -> None:
        """Make `states` [B, N, A*H] those of the last forward."""
        for tap, state in zip(self._taps, states.chunk(len(self._taps), dim=-1), strict=True):
            tap.state = state

    def take(self) -> torch.Tensor:
        """The states of the last forward, concatenated, [B, N, A*H]."""
        return _concatenated(self.take_each())


class AuxCapture(Capture):
    """Captures the inputs of the given layers.

    Id k is HF's `hidden_states[k]` before any final norm: the input of layer k; k = n_layers is the last layer's
    output.
    """

    def __init__(self, target: Target, aux_layer_ids: tuple[int, ...]) -> None:
        check_aux_layer_ids(aux_layer_ids, target.n_layers)
        self.aux_layer_ids = aux_layer_ids
        modules, taps = [*target.layers, target.final_norm], [_InputTap() for _ in aux_layer_ids]
        places = zip(aux_layer_ids, taps, strict=True)
        super().__init__(taps, [modules[at].register_forward_pre_hook(tap, with_kwargs=True) for at, tap in places])


class LastCapture(Capture):
    """Captures the body's last hidden state, after the final norm."""

    def __init__(self, target: Target) -> None:
        tap = _OutputTap()
        super().__init__([tap], [target.body.register_forward_hook(tap)])


def _concatenated(each: list[torch.Tensor]) -> torch.Tensor:
    return each[0] if len(each) == 1 else torch.cat(each, dim=-1)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


@dataclass(frozen=True)
class TargetFeatures:
    """Features of one target forward: `aux` [B, N, A*H], the captured states, concatenated, and `last` [B, N, H], the
    last hidden state after the final norm."""

    aux: torch.Tensor
    last: torch.Tensor


@torch.no_grad()
def target_features(
    target: Target, capture: Capture, input_ids: torch.Tensor, starts: torch.Tensor | None = None, **options: Any
) -> TargetFeatures:
    """One causal forward over right-padded `input_ids` [B, N]; the states of padding are arbitrary.

    starts [B, N]: for packed rows, the position where each token's sequence begins. transformers recognises packed
    sequences by positions that restart at 0; `check_packing` finds models that do not. options: for the attention.
    """
    last, each = run_body(target, input_ids, starts, capture, **options)
    return TargetFeatures(aux=_concatenated(each), last=last)


@torch.no_grad()
def run_body(
    target: Target,
    input_ids: torch.Tensor,
    starts: torch.Tensor | None = None,
    capture: Capture | None = None,
    **options: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The last hidden state [B, N, H] of one forward of the body, and the states that `capture` kept, each [B, N, H].

    If processes hold the target together (`target.group`), all of them must call this, each with its own batch of any
    shape. They run the batches of all in turn, and each keeps what belongs to its own. starts: of `target_features`.
    """

    def forward(ids: torch.Tensor, starts: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        more = dict(options)
        if starts is not None:
            more["position_ids"] = torch.arange(ids.shape[1], device=target.device) - starts.to(target.device)
        last = target.body(input_ids=ids.to(target.device), use_cache=False, **more).last_hidden_state
        return last, [] if capture is None else capture.take_each()

    if target.group is None:
        return forward(input_ids, starts)
    batches: list[Any] = [None] * dist.get_world_size(target.group)
    on_host = input_ids.cpu(), None if starts is None else starts.cpu()
    dist.all_gather_object(batches, on_host, group=target.group)
    for rank, batch in enumerate(batches):
        if rank == 0 or not _same(batch, batches[rank - 1]):  # in a forecast all have the same
            states = forward(*batch)
        if rank == dist.get_rank(target.group):
            own = states
    return own


def _same(first: tuple[torch.Tensor | None, ...], second: tuple[torch.Tensor | None, ...]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def check_packing(target: Target) -> None:
    """Raise `TargetError` if the states of a packed sequence depend on the sequence before it in its row."""
    ids = torch.arange(24, device=target.device)[None] * 7 % target.vocab_size
    starts = torch.tensor([0, 13], device=target.device).repeat_interleave(torch.tensor([13, 11], device=target.device))
    capture = LastCapture(target)
    try:
        packed = target_features(target, capture, ids, starts[None]).last[:, 13:].float()
        alone = target_features(target, capture, ids[:, 13:]).last.float()
    finally:
        capture.remove()
    difference = float((packed - alone).norm() / alone.norm())
    if not difference < 0.1:
        raise TargetError(
            f"packed sequences of {target.name} attend to each other (states differ by {difference:.0%}): its model "
            "does not separate them by their positions; set train.data.pack=false"
        )
