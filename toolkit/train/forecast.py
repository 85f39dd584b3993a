"""Forecast of accept_length on held-out rollouts, teacher-forced: without the engine and without decoding.

The verified output is the rollout itself (at any temperature, because the target's draws depend only on seed and
position). So one unroll shows which drafts of a chain of K are right at every position. Replaying the jumps
t -> t + accepted + 1 gives the verify steps of the engine. accept_length counts the bonus token; steps that the
answer's end cuts short are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def chain_depths(hits: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], positions: int) -> torch.Tensor:
    """Accepted drafts [positions] of every root: its hits before the first miss; -1 if step 0 is not supervised.

    hits[k] [S] bool: the hits of the flat positions roots[k] [S].
    """
    depth = torch.full((positions,), -1, dtype=torch.long, device=roots[0].device)
    depth[roots[0]] = 0
    for step, (hit, root) in enumerate(zip(hits, roots, strict=True)):
        depth[root] += hit & (depth[root] == step)
    return depth


def chained_counts(
    hits: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two counts by step [K] float: supervised chains whose earlier drafts are all right, and those of them that are
    right at this step too. A chain starts where step 0 is supervised. Arguments as of `chain_depths`."""
    depth = chain_depths(hits, roots, positions)
    reached = torch.stack([(depth[root] >= step).sum() for step, root in enumerate(roots)])
    passed = torch.stack([(depth > step).sum() for step in range(len(roots))])
    return reached.float(), passed.float()


def replay(depth: Sequence[int], response: Sequence[bool]) -> list[int]:
    """Accepted drafts of each complete verify step over the answers of one rollout.

    depth [L]: accepted drafts of a chain with root t. response [L]: response tokens. Prefill gives the first token of
    an answer, so its first root is the position before it. A step that reaches past the answer's end is left out.

        token      p   p   A0  A1  A2  A3  E
        root           t0 --accepts 1--> t0+2 ...      t0 reads A0, drafts A1, A2, ... and commits accepted + 1 of them
    """
    accepted: list[int] = []
    length = len(response)
    start = 0
    while start < length:
        if not response[start]:
            start += 1
            continue
        end = start
        while end < length and response[end]:
            end += 1
        root = start - 1
        while root >= 0 and root + 2 < end:
            right = int(depth[root])
            if root + 2 + right >= end:
                break
            accepted.append(right)
            root += right + 1
        start = end
    return accepted
