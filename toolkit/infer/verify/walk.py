"""Find the path through a draft tree that the target accepts.

The target chooses a token at every node (argmax, or a seeded draw). The path starts at the root and steps to the child
that carries the chosen token, until no child does. Plain decoding writes the tokens chosen on this path:

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
    """The accepted path of every row of a batch of B.

    On the device:
    path [B, A]: node numbers, root first, then 0 after the end of a row's path. A = min(depth of the tree + 1, nodes).
    tokens [B, A]: the target's choice at each node of the path. These tokens are committed.

    On the host, by row:
    accepted: number of drafts accepted (path length - 1).
    path_nodes, path_tokens: `path` and `tokens` cut to the row's path.
    ranks: rank of each accepted node among its siblings, from 0, in the drafter's order of preference.
    offered: number of drafted nodes.
    depth_offered: depth of the deepest drafted node.
    extra_numbers: the values of `extra` in `read_result`, for the whole batch.
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
    """Returns the accepted paths. choices [B, N]: the target's token at every node. extra: see `read_result`."""
    return read_result(follow(tree, choices), extra)


def follow(tree: DraftTree, choices: Tensor) -> Followed:
    """Returns the accepted paths on the device, padded to A nodes (see `VerifyResult`)."""
    follow_choices = ops_for(choices.device.type).follow_choices
    parts = (tree.tokens, tree.parents, tree.depths, tree.mask, tree.valid)
    return follow_choices(*parts, choices, min(tree.deepest + 1, tree.nodes), tree.is_chain)


def read_result(followed: Followed, extra: Callable[[Tensor], Tensor] | None = None) -> VerifyResult:
    """Copies the accepted paths to the host in one transfer.

    extra: maps `path` [B, A] to more numbers for the host, int64 of one dimension. The same transfer copies them.
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
    """Returns rows [B, C] as lists and `extra_numbers` (one dimension) as a list, with one copy to the host."""
    if extra_numbers is None:
        return rows.tolist(), []
    count, width = rows.shape
    flat = torch.cat((rows.flatten(), extra_numbers)).tolist()
    return [flat[start : start + width] for start in range(0, count * width, width)], flat[count * width :]
