"""The teacher: the target's distribution on the draft vocabulary, and its argmax on the full vocabulary.

Shapes: M rows (positions whose next token is supervised), H target hidden size, V and D target and draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from toolkit.data.batches import on_device
from toolkit.heads.draft_head import Project
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

# Scores computed at once (rows times vocabulary): [M, V] of all rows would not fit into memory. And the fewest rows:
# with fewer, reading the output matrix from memory would take most of the time.
CHOICE_SCORES, LEAST_ROWS = 2**25, 128
GPU_ROWS = 2048  # in place of both on a GPU
# A GPU's matrices have a multiple of so many rows. If rows of scores do not begin at multiples of 16 bytes, cuBLAS is
# left with kernels that take several times as long.
ALIGNED = 64


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """An output matrix [D, H] or bias [D], on a GPU with zeros behind it up to a multiple of `ALIGNED` rows."""
    missing = -len(rows) % ALIGNED if rows.device.type == "cuda" else 0
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


@dataclass(frozen=True)
class TeacherRows:
    """Rows of the teacher.

    states [M, H]: final-normed. choice [M]: the target's argmax, as target ids. kept [M]: whether that argmax is in the
    draft vocabulary; rows that are not kept get no loss. distribution: states -> probabilities, called for a few rows
    at a time, because the probabilities of all rows would be the largest tensor of a training.
    """

    states: torch.Tensor
    choice: torch.Tensor
    kept: torch.Tensor
    distribution: Callable[[torch.Tensor], torch.Tensor]

    def probs(self, rows: slice) -> torch.Tensor:
        """Probabilities [m, D] fp32 of these rows, renormalised on the draft vocabulary."""
        return self.distribution(self.states[rows])


@dataclass(frozen=True)
class SharedMatrix:
    """The target's output matrix [D, H], its bias, and its logit factor or soft cap (None: it has none)."""

    matrix: torch.Tensor
    bias: torch.Tensor | None
    logits_processor: Callable[[torch.Tensor], torch.Tensor] | None

    def score(self, states: torch.Tensor, project: Project) -> Any:
        """`project` of states [N, H] with matrix, bias and processor, in the target's dtype as in the engine."""
        return project(states.to(self.matrix.dtype), self.matrix, self.bias, self.logits_processor)


class Teacher:
    """Computes teacher rows with the target's output matrix; the rows of the draft vocabulary are gathered once."""

    def __init__(self, target: Target, token_map: TokenMap) -> None:
        self.target = target
        self.in_draft = token_map.t2d.to(target.device)
        self.draft_ids = token_map.ids.to(target.device)
        # Detached: a target may be in training itself (head_adapter.py), and the head's loss must not train it.
        head = target.lm_head
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        full = token_map.size == len(weight)
        self.draft_weight = weight if full else weight[self.draft_ids].contiguous()
        self.draft_bias = bias if bias is None or full else bias[self.draft_ids]
        self._aligned = aligned(self.draft_weight), None if bias is None else aligned(self.draft_bias)

    def shared_matrix(self) -> SharedMatrix:
        """The output matrix for a head without one of its own."""
        probe = torch.zeros(1)
        plain = self.target.finish_scores(probe) is probe
        return SharedMatrix(self.draft_weight, self.draft_bias, None if plain else self.target.finish_scores)

    @torch.no_grad()
    def choice(self, hidden: torch.Tensor) -> torch.Tensor:
        """Target argmax [M] of final-normed states [M, H], computed in pieces."""
        rows = max(CHOICE_SCORES // self.target.vocab_size, LEAST_ROWS) if hidden.device.type == "cpu" else GPU_ROWS
        # The layer itself, because a quantised layer's product is the one that the target decodes with.
        return torch.cat([self.target.lm_head(part).max(-1).indices for part in hidden.split(rows)])

    @torch.no_grad()
    def distribution(self, hidden: torch.Tensor) -> torch.Tensor:
        """Probabilities [m, D] fp32 on the draft vocabulary, from final-normed states [m, H]."""
        scores = F.linear(hidden, *self._aligned)[:, : len(self.draft_weight)]
        return self.target.finish_scores(scores).float().softmax(-1)

    def __call__(
        self, hidden: torch.Tensor, written: torch.Tensor | None = None, greedy: torch.Tensor | None = None
    ) -> TeacherRows:
        """Rows of final-normed states [M, H]. Where greedy [M] is true, written [M] is the target's argmax and is not
        computed again: the product with the full output matrix is one of the most expensive of a step. With `greedy` on
        the host nothing waits for a GPU."""
        if written is None or greedy is None:
            choice = self.choice(hidden)
        else:
            choice, open_rows = written.clone(), on_device((~greedy).nonzero().squeeze(-1), hidden.device)
            choice[open_rows] = self.choice(hidden[open_rows])
        return TeacherRows(hidden, choice, self.in_draft[choice], self.distribution)
