"""Corrections of a block drafter's scores by the token before the predicted one, its parent.

One pass scores all places of a block before any of its tokens is chosen; a correction tells the children of one parent
from those of another. With x the parent, h the normed state of the place, e(x) the target's embedding of x and s(h) the
scores of the output matrix:

    none       s(h)
    markov     s(h) + markov_w2(markov_w1[x])                     DSpark (arXiv 2607.05147)
    dfly       s(h + SwiGLU([norm(h), norm(e(x))]))               DFly (Tencent's AngelSpec)

Training reads `read` and `extended`, with all parents known; drafting reads `scores`, place by place.

Shapes: H head hidden size, D draft vocabulary, V target vocabulary, r rank, n parents of a place. In drafting B rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.heads.decoder_layer import RMSNorm
from toolkit.heads.draft_head import OutputMatrix, Project
from toolkit.heads.head_config import HeadError

if TYPE_CHECKING:
    from toolkit.heads.dspark import DSparkConfig

Embed = Callable[[Tensor], Tensor]  # ids [..] -> the target's embeddings [.., H]


class Serving(NamedTuple):
    """What a drafter has for `scores`. output: normed states [.., H] -> scores [.., D]; rows: of `Correction.rows`."""

    embed: Embed
    output: Callable[[Tensor], Tensor]
    rows: Tensor | None


class Correction(nn.Module):
    """No correction, and what each of the others defines.

    name: of its parameters in the head. zeroed: its parameters that start at zero, so that a new head has the scores of
    its states. reads_scores: `scores` reads the scores of the states.
    """

    name: ClassVar[str] = "uncorrected"
    zeroed: ClassVar[tuple[str, ...]] = ()
    reads_scores: ClassVar[bool] = True

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()

    def read(self, normed: Tensor, parents: Tensor, embed: Embed) -> Tensor:
        """The input of the output layer in training: normed states [.., H] and parents [..] -> [.., H or H + r]."""
        return normed

    def extended(self, project: Project) -> Project:
        """`project` as it is called with outputs of `read` and an output matrix [D, H]."""
        return project

    def rows(self, ids: Tensor | None) -> Tensor | None:
        """A copy of the weights with a row for each draft id, for these ids [D] (None: all); None without such."""
        return None

    def map_rows(self, places: Tensor) -> None:
        """As `DraftHead.map_rows`."""

    def scores(self, normed: Callable[[], Tensor], base: Tensor, parents: Tensor, serving: Serving) -> Tensor:
        """Scores [B, n, D] of the children of parents [B, n]. normed: gives the normed states [B, n, H] of the place,
        base [B, n, D]: the scores of these; or one of each for all parents of a row, as is the result without a
        correction."""
        return base


class MarkovHead(Correction):
    """`markov_w1` [V, r] reads the parent, `markov_w2` [D, r] gives the bias."""

    name = "markov_head"

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = OutputMatrix(config.markov_rank, config.draft_vocab_size, bias=False)

    def read(self, normed: Tensor, parents: Tensor, embed: Embed) -> Tensor:
        return torch.cat((normed, self.markov_w1(parents).to(normed.dtype)), dim=-1)

    def extended(self, project: Project) -> Project:
        """The bias' matrix stands beside the output matrix: [D, H + r]."""

        def joined(states: Tensor, matrix: Tensor, *more: Any) -> Any:
            _refuse_finished(more)
            # A sharded weight is whole only inside its layer's forward.
            return self.markov_w2(
                states, lambda x, bias: project(x, torch.cat((matrix, bias.to(matrix.dtype)), dim=1), *more)
            )

        return joined

    def rows(self, ids: Tensor | None) -> Tensor:
        rows = self.markov_w2.weight.T
        return rows.clone() if ids is None else rows[:, ids]

    def map_rows(self, places: Tensor) -> None:
        self.markov_w2 = _mapped(self.markov_w2, places)

    def scores(self, normed: Callable[[], Tensor], base: Tensor, parents: Tensor, serving: Serving) -> Tensor:
        assert serving.rows is not None, "the bias has rows"
        return base + self.markov_w1(parents).to(base.dtype) @ serving.rows.to(base.dtype)


class DFlyCorrection(Correction):
    """Corrects the state before the output matrix, as wide as the state inside."""

    name, zeroed, reads_scores = "dfly", ("down_proj.weight",), False

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.state_norm, self.embed_norm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        self.gate_proj, self.up_proj = (nn.Linear(2 * width, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, width, bias=False)

    def read(self, normed: Tensor, parents: Tensor, embed: Embed) -> Tensor:
        state = self.state_norm(normed).expand(*parents.shape, -1)
        both = torch.cat((state, self.embed_norm(embed(parents).to(normed.dtype))), dim=-1)
        return normed + self.down_proj(F.silu(self.gate_proj(both)) * self.up_proj(both))

    def scores(self, normed: Callable[[], Tensor], base: Tensor, parents: Tensor, serving: Serving) -> Tensor:
        return serving.output(self.read(normed(), parents, serving.embed))


# By the value of train.head.correction.
CORRECTIONS: dict[str, type[Correction]] = {
    "none": Correction,
    "markov": MarkovHead,
    "dfly": DFlyCorrection,
}


def plain_scores(states: Tensor, matrix: Tensor) -> Tensor:
    """The `Project` that returns the scores [.., D] themselves."""
    return F.linear(states, matrix)


def _refuse_finished(more: tuple[Any, ...]) -> None:
    """more: what follows an output matrix in the call of a `Project`."""
    if more and more[-1] is not None:
        raise HeadError(
            "the target has a logit factor or soft cap, which other engines do not apply to the bias of a DSpark head; "
            "train a head with an output matrix of its own"
        )


def _mapped(old: OutputMatrix, places: Tensor) -> OutputMatrix:
    """The rows at `places`, and zeros at -1."""
    new = OutputMatrix(old.in_features, len(places), bias=False).to(old.weight)
    new.weight.copy_(old.weight[places.clamp(min=0)] * (places >= 0).to(old.weight.dtype)[:, None])
    return new
