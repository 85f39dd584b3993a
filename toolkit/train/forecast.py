"""Forecast of accept_length on held-out rollouts, teacher-forced: no engine, no decoding.

The verified output is the rollout itself (at any temperature: the target's draws depend on seed and position alone), so
which drafts a chain of K would get right at every position is known from one unroll; replaying the jumps
t -> t + accepted + 1 counts the verify steps the engine would take (field standard: accept_length counts the bonus
token; steps cut by the answer's end are left out).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.bench.bootstrap import ratio_interval
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.request import VerifyEvent


@dataclass(frozen=True)
class Forecast:
    """accept_length of a chain of `num_steps` with its 95 % bootstrap interval over rollouts.

    accept_length is None without verify steps, interval with fewer than two rollouts that have some. accept_rate[i] is
    conditional: of the verify steps that accepted depth i, the share that accepted depth i+1; None if there were none.
    """

    accept_length: float | None
    interval: tuple[float, float] | None
    accept_rate: list[float | None]
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


def chained_counts(
    hits: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """By depth [K] float: chains whose earlier drafts were all right and that are supervised here too, and those of
    them that are right here. A chain starts where step 0 is supervised; arguments as of `chain_depths`."""
    alive = torch.zeros(positions, dtype=torch.bool, device=hits[0].device)
    alive[roots[0]] = True
    reached, passed = [], []
    for hit, root in zip(hits, roots, strict=True):
        reached.append(alive[root].sum())
        right = torch.zeros_like(alive)
        right[root] = hit
        alive = alive & right
        passed.append(alive.sum())
    return torch.stack(reached).float(), torch.stack(passed).float()


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


def summarise_replays(per_rollout: Sequence[Sequence[int]], num_steps: int) -> Forecast:
    """Pool the verify steps of all rollouts, by the rules that the engine's own steps are counted by."""
    events = [
        VerifyEvent(num_steps, num_steps, accepted, accepted + 1, False, 0.0, 0.0, 0.0, 1)
        for steps in per_rollout
        for accepted in steps
    ]
    stats = summarise(events)
    tokens = [sum(steps) + len(steps) for steps in per_rollout]
    return Forecast(
        accept_length=stats.accept_length if events else None,
        interval=ratio_interval(tokens, [len(steps) for steps in per_rollout]),
        accept_rate=[None if math.isnan(rate) else rate for rate in stats.accept_rate],
        verify_steps=stats.verify_steps,
        num_steps=num_steps,
    )
