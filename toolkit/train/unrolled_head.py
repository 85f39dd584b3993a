"""What the unroll and the loss ask of a head, and how each kind of head answers.

Serving's counterpart is `infer/drafters/drafting_head.py`; a parity test holds the two together.

Shapes: T = B*L tokens, W feature width, H head hidden size, N states, V rows of an output matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from toolkit.checkpoint.head_kinds import DraftHead
from toolkit.heads.decoder_layer import Attend
from toolkit.heads.eagle2 import Eagle2Head
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.heads.mtp import MtpHead

# (states [N, H], matrix [V, H], bias [V] or None, what the family does to scores or None) -> whatever it makes of them.
Project = Callable[..., Any]


class UnrolledHead(Protocol):
    """stages: modules that predict one step each, the last one all further steps (MTP layers); 1 for a head that always
    feeds itself. layers: attention layers of a stage. window: positions that its attention sees, None: all."""

    @property
    def stages(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    @property
    def layers(self) -> int: ...

    def first_hidden(self, features: Tensor) -> Tensor:
        """[T, W] -> [T, H]: what step 0 reads."""
        ...

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        """One pass over [T, H] -> [T, H]: what the next step reads as hidden."""
        ...

    def read(self, stage: int, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]: what `score` reads of a stage's output."""
        ...

    def score(self, states: Tensor, project: Project) -> Any:
        """Hand what was read, [N, H], and the output matrix to `project`."""
        ...


@dataclass(frozen=True)
class SharedMatrix:
    """The target's output matrix [V, H], its bias, and its family's logit factor and soft cap (None: it has none)."""

    matrix: Tensor
    bias: Tensor | None
    finish: Callable[[Tensor], Tensor] | None

    def score(self, states: Tensor, project: Project) -> Any:
        """As the engine does: in the target's dtype."""
        return project(states.to(self.matrix.dtype), self.matrix, self.bias, self.finish)


class Eagle3Unrolled:
    """Features fused by the head; an output matrix of its own."""

    stages = 1

    def __init__(self, head: Eagle3Head) -> None:
        self._head = head
        self.layers, self.window = head.config.num_hidden_layers, head.config.sliding_window

    def first_hidden(self, features: Tensor) -> Tensor:
        return self._head.fuse(features)

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        return self._head(embeds, hidden, positions, attend, reach)

    def read(self, stage: int, hidden: Tensor) -> Tensor:
        return hidden

    def score(self, states: Tensor, project: Project) -> Any:
        return self._head.logits(states, project)


class Eagle2Unrolled:
    """What the head writes is the next feature, and what the target's output matrix reads."""

    stages = 1

    def __init__(self, head: Eagle2Head, output: SharedMatrix) -> None:
        self._head, self._output = head, output
        self.layers, self.window = head.config.num_hidden_layers, head.config.sliding_window

    def first_hidden(self, features: Tensor) -> Tensor:
        return features

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        return self._head(embeds, hidden, positions, attend, reach)

    def read(self, stage: int, hidden: Tensor) -> Tensor:
        return hidden

    def score(self, states: Tensor, project: Project) -> Any:
        return self._output.score(states, project)


class MtpUnrolled:
    """A stage for every MTP layer; the target's output matrix reads its state after the layer's own norm."""

    layers = 1

    def __init__(self, head: MtpHead, output: SharedMatrix) -> None:
        self._head, self._output = head, output
        self.stages, self.window = head.config.num_mtp_layers, head.config.sliding_window

    def first_hidden(self, features: Tensor) -> Tensor:
        return features

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        return self._head(embeds, hidden, positions, attend, reach, stage)

    def read(self, stage: int, hidden: Tensor) -> Tensor:
        return self._head.normed(hidden, stage)

    def score(self, states: Tensor, project: Project) -> Any:
        return self._output.score(states, project)


def unrolled_head(head: DraftHead | nn.Module, output: SharedMatrix | None = None) -> UnrolledHead:
    """The head as the unroll sees it; `output` is what eagle2 and mtp heads are scored by."""
    if isinstance(head, Eagle3Head):
        return Eagle3Unrolled(head)
    assert output is not None, "a head without an output matrix is scored by the target's"
    if isinstance(head, Eagle2Head):
        return Eagle2Unrolled(head, output)
    assert isinstance(head, MtpHead), f"{type(head).__name__} is no draft head"
    return MtpUnrolled(head, output)
