"""Forecast of accept_length on held-out rollouts, teacher-forced: no engine, no decoding.

On a greedy rollout the verified output is the rollout itself, so which drafts a chain of K would get right at every
position is known from one unroll; replaying the jumps t -> t + accepted + 1 counts the verify steps the engine would
take (field standard: accept_length counts the bonus token; steps cut by the answer's end are left out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Forecast:
    """accept_length of a chain of `num_steps` with its 95 % bootstrap interval over rollouts.

    accept_rate[i] is conditional: share of verify steps that reached depth i+1 and accepted it.
    """

    accept_length: float
    interval: tuple[float, float]
    accept_rate: list[float]
    verify_steps: int
    num_steps: int


def chain_depths(hits: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], positions: int) -> torch.Tensor:
    """Accepted drafts [positions] at every root: leading hits over the steps; -1 where step 0 is not supervised.

    hits[k] [S] bool belongs to the flat positions roots[k] [S].
    """
    depth = torch.full((positions,), -1, dtype=torch.long)
    depth[roots[0].cpu()] = 0
    alive = torch.zeros(positions, dtype=torch.bool)
    alive[roots[0].cpu()] = True
    for hit, root in zip(hits, roots, strict=True):
        right = torch.zeros(positions, dtype=torch.bool)
        right[root.cpu()] = hit.cpu()
        alive &= right
        depth += alive.long()
    return depth


def replay(depth: Sequence[int], response: Sequence[bool]) -> list[int]:
    """Accepted drafts of each whole verify step over one rollout's answers.

    depth [L]: accepted drafts if a chain started at root t; response [L]. The first root of an answer is the position
    before it: its first token comes from prefill. A step whose tokens reach past the answer's end is left out.

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


def summarise_replays(per_rollout: Sequence[Sequence[int]], num_steps: int, seed: int = 0) -> Forecast:
    """Pool the verify steps of all rollouts; the interval resamples rollouts 1,000 times."""
    sums = torch.tensor([float(sum(steps) + len(steps)) for steps in per_rollout])
    counts = torch.tensor([float(len(steps)) for steps in per_rollout])
    total = int(counts.sum())
    if total == 0:
        return Forecast(float("nan"), (float("nan"), float("nan")), [], 0, num_steps)
    draws = torch.randint(len(sums), (1000, len(sums)), generator=torch.Generator().manual_seed(seed))
    means = (sums[draws].sum(1) / counts[draws].sum(1).clamp(min=1)).sort().values
    every = [step for steps in per_rollout for step in steps]
    reached = [sum(step >= depth for step in every) for depth in range(num_steps + 1)]
    return Forecast(
        accept_length=float(sums.sum() / total),
        interval=(float(means[25]), float(means[974])),
        accept_rate=[after / before if before else 0.0 for before, after in zip(reached, reached[1:], strict=False)],
        verify_steps=total,
        num_steps=num_steps,
    )
