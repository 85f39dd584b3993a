"""Keeps the target's hidden states that an engine computes while it writes, for whoever trains on its answers.

Every position that the target reads passes a drafter's eyes: prompts in `admit`, committed tokens in `observe`. The
recorder stands before the engine's own drafter, takes them there, and otherwise lets that one draft.

Shapes: B rows, N tokens a row, A layers, H target hidden size, W = (A+1)*H: the inputs of the layers side by side, then
the last hidden state after the final norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter, Ranks
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.errors import EngineError
from toolkit.infer.request.request import Request
from toolkit.infer.verify.walk import VerifyResult
from toolkit.targets.features import AuxCapture, LastCapture
from toolkit.targets.load import Target


@dataclass
class _Recorded:
    """States of a request's first `positions` positions, in order."""

    positions: int = 0
    parts: list[Tensor] = field(default_factory=list)

    def append(self, states: Tensor) -> None:
        self.parts.append(states)
        self.positions += len(states)


class FeatureRecorder:
    """A drafter that drafts as `inner` does. `take` gives a request's states; those nobody takes go with the request.

    Texts whose beginning came out of a prefix cache were not read whole, and have no states to take.
    """

    def __init__(self, inner: Drafter, target: Target, layer_ids: Sequence[int]) -> None:
        self.inner = inner
        self._layers, self._last = AuxCapture(target, tuple(layer_ids)), LastCapture(target)
        # An engine that is dropped without close() must not leave hooks on a model others go on using.
        self._unhook = weakref.finalize(self, _remove, self._layers, self._last)
        self._recorded: weakref.WeakKeyDictionary[Request, _Recorded] = weakref.WeakKeyDictionary()

    def take(self, request: Request) -> Tensor | None:
        """[L-1, W] on the CPU, of a request whose text has L tokens now; None where it was not read whole."""
        recorded = self._recorded.pop(request, None)
        if recorded is None or recorded.positions < request.length - 1:
            return None
        return torch.cat(recorded.parts)[: request.length - 1]  # a stop may have cut the last run

    def _states(self) -> Tensor:
        """[B, N, W] of the forward that just ran."""
        return torch.cat([*self._layers.take_each(), self._last.take()], dim=-1)

    # -- following the target ------------------------------------------------------------------------------------------

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        self.inner.admit(first_row, requests, tokens)
        states = self._states()
        for row, request in enumerate(requests):
            if request.n_read == 0:  # new, or read anew after it had lost its pages
                self._recorded[request] = _Recorded()
            recorded = self._recorded.get(request)
            if recorded is None or recorded.positions != request.n_read:
                self._recorded.pop(request, None)
                continue
            # A copy, since the padding of the others would stay with it.
            recorded.append(states[row, : min(tokens, request.unread)].to("cpu", copy=True))

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        self.inner.observe(requests, result)
        states = self._states()
        if states.shape[1] > 1:
            states = states.gather(1, result.path[:, :, None].expand(-1, -1, states.shape[2]))
        states = states.cpu()
        for row, (request, accepted) in enumerate(zip(requests, result.accepted, strict=True)):
            recorded = self._recorded.get(request)
            if recorded is not None:
                assert recorded.positions == request.length - 1, "a forward of the target passed unseen"
                recorded.append(
                    states[row, : accepted + 1].clone()
                )  # rejected nodes and other rows do not stay with it

    # -- as the inner drafter ------------------------------------------------------------------------------------------

    @property
    def lookahead(self) -> int:
        return self.inner.lookahead

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        return self.inner.reach(shape, skips=skips)

    def positions_read(self, row: int, request: Request) -> int:
        return self.inner.positions_read(row, request)

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        return self.inner.propose(requests, rows)

    def skip(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        return self.inner.skip(requests, rows)

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, Ranks]:
        return self.inner.probe(requests, rows, width)

    def move_row(self, destination: int, source: int) -> None:
        self.inner.move_row(destination, source)  # ours lie by request

    def set_shape(self, shape: DraftShape) -> None:
        self.inner.set_shape(shape)

    def close(self) -> None:
        self._unhook()
        self.inner.close()


def _remove(*captures: AuxCapture | LastCapture) -> None:
    for capture in captures:
        capture.remove()


def record_features(engine: Engine, layer_ids: Sequence[int]) -> FeatureRecorder:
    """Let a recorder stand before the engine's drafter from now on; closing the engine ends it.

    layer_ids: indices into HF `hidden_states`, ascending. The engine's prefix cache should be off: see the class.
    Raises EngineError where rounds run as graphs: a replay brings no states to anybody's hooks.
    """
    if engine.has_graphs:
        raise EngineError(
            "features were to be recorded of an engine whose rounds run as CUDA graphs, which leave their hidden "
            "states to nobody; open it without cuda_graph_max_bs (Engine: graphs=None)"
        )
    assert not engine.has_work(), "texts that are half read would have no states of their beginnings"
    engine.drafter = recorder = FeatureRecorder(engine.drafter, engine.target, layer_ids)
    return recorder
