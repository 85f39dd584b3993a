"""What the target would say: its distribution on the draft vocabulary, and its choice on the whole vocabulary.

Shapes: M rows (positions whose next token is supervised), H target hidden size, V and D target and draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from toolkit.heads.draft_head import Project
from toolkit.targets.load import Target
from toolkit.tokenmap.token_map import TokenMap

# Scores in one piece: [M, V] of all rows are what makes trainers run out of memory. With fewer rows than the least the
# output matrix would come from memory too often.
CHOICE_SCORES, LEAST_ROWS = 2**25, 128


@dataclass(frozen=True)
class TeacherRows:
    """states [M, H], final-normed; choice [M]: the target's own argmax (target ids); kept [M]: whether that argmax is
    in the draft vocabulary. Rows that are not kept get no loss. `distribution` turns states into probabilities: those
    of all rows would be the largest tensor of a training, so they are made where they are read."""

    states: torch.Tensor
    choice: torch.Tensor
    kept: torch.Tensor
    distribution: Callable[[torch.Tensor], torch.Tensor]

    def probs(self, rows: slice) -> torch.Tensor:
        """[m, D] fp32 of these rows, renormalised on the draft vocabulary."""
        return self.distribution(self.states[rows])


@dataclass(frozen=True)
class SharedMatrix:
    """The target's output matrix [V, H], its bias, and its family's logit factor and soft cap (None: it has none)."""

    matrix: torch.Tensor
    bias: torch.Tensor | None
    finish: Callable[[torch.Tensor], torch.Tensor] | None

    def score(self, states: torch.Tensor, project: Project) -> Any:
        """What `project` makes of states [N, H], the matrix, its bias and `finish`. The product is in the target's
        dtype, as the engine's is."""
        return project(states.to(self.matrix.dtype), self.matrix, self.bias, self.finish)


class Teacher:
    """The target's output matrix, its draft rows gathered once."""

    def __init__(self, target: Target, token_map: TokenMap) -> None:
        self.target = target
        self.in_draft = token_map.t2d.to(target.device)
        self.draft_ids = token_map.ids.to(target.device)
        weight, bias = target.lm_head.weight, target.lm_head.bias
        whole = token_map.size == len(weight)
        self.draft_weight = weight if whole else weight[self.draft_ids].contiguous()
        self.draft_bias = bias if bias is None or whole else bias[self.draft_ids]

    def shared_matrix(self) -> SharedMatrix:
        """The draft rows, for a head that is scored by them."""
        probe = torch.zeros(1)
        plain = self.target.finish_scores(probe) is probe
        return SharedMatrix(self.draft_weight, self.draft_bias, None if plain else self.target.finish_scores)

    @torch.no_grad()
    def choice(self, hidden: torch.Tensor) -> torch.Tensor:
        """Target argmax [M] of final-normed states [M, H], a piece of the rows at a time."""
        rows = max(CHOICE_SCORES // self.target.vocab_size, LEAST_ROWS)
        # By the layer itself: of quantised weights its product is what the target answers with.
        return torch.cat([self.target.lm_head(part).max(-1).indices for part in hidden.split(rows)])

    @torch.no_grad()
    def distribution(self, hidden: torch.Tensor) -> torch.Tensor:
        """Probabilities [m, D] fp32 on the draft vocabulary, from final-normed states [m, H]."""
        scores = self.target.finish_scores(F.linear(hidden, self.draft_weight, self.draft_bias))
        return scores.float().softmax(-1)

    def __call__(
        self, hidden: torch.Tensor, written: torch.Tensor | None = None, greedy: torch.Tensor | None = None
    ) -> TeacherRows:
        """Rows of final-normed states [M, H]. Where greedy [M], written [M] is the target's argmax and is not computed:
        a product with its whole output matrix is among the largest of a step."""
        if written is None or greedy is None:
            choice = self.choice(hidden)
        else:
            choice, open_rows = written.clone(), ~greedy
            choice[open_rows] = self.choice(hidden[open_rows])
        return TeacherRows(hidden, choice, self.in_draft[choice], self.distribution)
