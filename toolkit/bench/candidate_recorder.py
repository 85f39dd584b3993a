"""Records what a head would draft after every token of an answer, while the target reads it token by token.

From the candidates of the largest tree at every position follows what any smaller tree of the same top_k would have
accepted there (`nodes_needed`): the first levels of a deep tree are the candidates of a shallow one, and a tree of n
nodes keeps the n - 1 best of them by score (EAGLE-2, arXiv 2406.16858).

Shapes: S levels of the largest tree, C candidates in level order, P drafted positions of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import WrappedDrafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.request.draft_tree import DraftTree, candidate_count, root_only
from toolkit.infer.request.request import Request

Array = npt.NDArray[np.int64]
NEVER = 1 << 30  # more nodes than any tree has


class CandidateRecorder(WrappedDrafter):
    """Proposes roots only. `needed` tells what the trees of the drafter's shape would have accepted."""

    inner: HeadDrafter

    def __init__(self, inner: HeadDrafter) -> None:
        super().__init__(inner)
        self._found: WeakKeyDictionary[Request, list[tuple[Array, Array, npt.NDArray[np.float32]]]] = (
            WeakKeyDictionary()
        )

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        if not any(self.inner.shape_of(request) for request in requests):
            return self.inner.skip(requests, rows)
        tokens, parents, scores = (part.cpu().numpy() for part in self.inner.candidates(requests, rows))
        for row, request in enumerate(requests):
            if self.inner.shape_of(request) is not None:
                found = self._found.setdefault(request, [])
                del found[len(request.output_ids) - 1 :]  # a failed round runs again
                found.append((tokens[row], parents[row], scores[row]))
        return root_only(rows.roots)

    def needed(self, request: Request) -> Array:
        """Returns `nodes_needed` after each token but the last of an answer, [P, S, S]; P is 0 if nothing drafts."""
        steps, width = self.inner.shape.num_steps, self.inner.shape.top_k
        found = self._found.pop(request, [])
        each = [
            nodes_needed(*one, request.output_ids[at + 1 : at + 1 + steps], steps, width)
            for at, one in enumerate(found)
        ]
        return np.stack(each) if each else np.zeros((0, steps, steps), dtype=np.int64)


def nodes_needed(
    tokens: Array,
    parents: Array,
    scores: npt.NDArray[np.floating],
    following: Sequence[int],
    steps: int,
    width: int,
) -> Array:
    """Returns [S, S]: entry [d-1, s-1] is the least num_draft_tokens with which a tree of s levels accepts d drafts.

    tokens, parents (-1: the root), scores [C]: as of `draft_beams`, `steps` levels of `width` beams. following: the
    tokens that come next. NEVER where no tree accepts so many. The order is that of `rank_candidates`: by score, on a
    tie by number.
    """
    needed = np.full((steps, steps), NEVER, dtype=np.int64)
    parent = -1
    for depth, token in enumerate(following[:steps], start=1):
        start = 0 if depth == 1 else candidate_count(depth - 1, width)
        level = slice(start, candidate_count(depth, width))
        hit = np.flatnonzero((tokens[level] == token) & (parents[level] == parent))
        if not len(hit):
            break
        parent = start + int(hit[0])
        before = scores > scores[parent]
        before[:parent] |= scores[:parent] == scores[parent]
        for deepest in range(depth, steps + 1):
            needed[depth - 1, deepest - 1] = 2 + int(before[: candidate_count(deepest, width)].sum())
    return np.maximum.accumulate(needed, axis=0)
