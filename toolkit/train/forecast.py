"""Forecast of accept_length on held-out rollouts, teacher-forced: without the engine and without decoding.

The verified output is the rollout itself (at any temperature, because the target's draws depend only on seed and
position). So one unroll shows which drafts of a chain of K are right at every position. Replaying the jumps
t -> t + accepted + 1 gives the verify steps of the engine. accept_length counts the bonus token; steps that the
answer's end cuts short are left out.
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

    accept_length: None without verify steps. interval: None if fewer than two rollouts have verify steps.
    accept_rate[i]: conditional, the share of the verify steps that accepted depth i and also accepted depth i+1; None
    if no step accepted depth i.
    """

    accept_length: float | None
    interval: tuple[float, float] | None
    accept_rate: list[float | None]
    verify_steps: int
    num_steps: int


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


def summarise_replays(per_rollout: Sequence[Sequence[int]], num_steps: int) -> Forecast:
    """Pool the verify steps of all rollouts; counted as the engine counts its steps."""
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
