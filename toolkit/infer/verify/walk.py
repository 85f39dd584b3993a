"""Follow the target's own choices through a draft tree.

The target chooses a token at every node (argmax, or a seeded draw); starting at the root we step to the child that
carries the chosen token until there is none. The tokens chosen on the way are exactly what plain decoding writes:

    node on the path      root   p1    p2          counts = 2 drafts accepted
    its token             x      a     b
    target's choice       a      b     c           committed: a b c; a and b were drafted, c is the target's own
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.tree_reference import Followed
from toolkit.infer.request.draft_tree import DraftTree


@dataclass(frozen=True)
class VerifyResult:
    """The accepted path of every row.

    path [B, A]: nodes on it, root first; A = depth of the tree + 1, or its nodes where these are fewer. Entries after
    a row's own path are 0.
    tokens [B, A]: the target's choice at each of them (what is committed).

    On the host, by row: accepted: drafts accepted, path length - 1. path_nodes and path_tokens: the row's own path.
    ranks: which child of its parent each accepted node was, from 0, in the order in which the drafter prefers them.
    offered: drafted nodes. depth_offered: depth of the deepest one. extra_numbers: what was read with these.
    """

    path: Tensor
    tokens: Tensor
    accepted: list[int]
    path_nodes: list[list[int]]
    path_tokens: list[list[int]]
    ranks: list[list[int]]
    offered: list[int]
    depth_offered: list[int]
    extra_numbers: list[int]


def walk(tree: DraftTree, choices: Tensor, extra: Callable[[Tensor], Tensor] | None = None) -> VerifyResult:
    """choices [B, N]: the target's token at every node; extra as in `read_result`."""
    return read_result(follow(tree, choices), extra)


def follow(tree: DraftTree, choices: Tensor) -> Followed:
    """The accepted paths on the device; A, the most nodes that one can have."""
    follow_choices = ops_for(choices.device.type).follow_choices
    parts = (tree.tokens, tree.parents, tree.depths, tree.mask, tree.valid)
    return follow_choices(*parts, choices, min(tree.deepest + 1, tree.nodes), tree.is_chain)


def read_result(followed: Followed, extra: Callable[[Tensor], Tensor] | None = None) -> VerifyResult:
    """What the host needs to know of the accepted paths, read from the device at once.

    extra: from `path` to whatever else the host will need, int64 [.], which is read with it.
    """
    rows, extra_numbers = _read(followed.numbers, None if extra is None else extra(followed.path))
    longest = (followed.numbers.shape[1] - 3) // 3
    of_path, of_tokens, of_ranks = (
        [row[start : start + 1 + row[0]] for row in rows] for start in (3, 3 + longest, 3 + 2 * longest)
    )
    return VerifyResult(
        followed.path, followed.tokens, [row[0] for row in rows], of_path, of_tokens, [row[1:] for row in of_ranks],
        [row[1] for row in rows], [row[2] for row in rows], extra_numbers,
    )  # fmt: skip


def _read(rows: Tensor, extra_numbers: Tensor | None) -> tuple[list[list[int]], list[int]]:
    """rows [B, C] by row, and `extra_numbers` [.] with them: one copy to the host."""
    if extra_numbers is None:
        return rows.tolist(), []
    count, width = rows.shape
    flat = torch.cat((rows.flatten(), extra_numbers)).tolist()
    return [flat[start : start + width] for start in range(0, count * width, width)], flat[count * width :]
