"""What a round has found becomes part of the answers, cut exactly at stops and limits, with one event a request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from toolkit.infer.request.request import Request, VerifyEvent
from toolkit.infer.verify.logprobs import NodeLogprobs
from toolkit.infer.verify.walk import VerifyResult


def commit(
    requests: Sequence[Request], result: VerifyResult, logprobs: NodeLogprobs | None, started: float, proposed: float
) -> list[Request]:
    """Append what was accepted and the target's own token behind it. Returns the requests that it was for.

    requests: by row; those that had ended before get nothing: their round was one too many. logprobs: of the rows that
    asked. started, proposed: when the round began, and when its trees were drafted (perf_counter).
    """
    verified = time.perf_counter()
    rows = [row for row, request in enumerate(requests) if not request.finished]
    counts = [requests[row].append_run(result.path_tokens[row], result.accepted[row]) for row in rows]
    if logprobs is not None:
        logprobs.record(requests, result)
    times = (proposed - started, verified - proposed, time.perf_counter() - verified)
    for row, count in zip(rows, counts, strict=True):
        accepted, offer = result.accepted[row], (result.offered[row], result.depth_offered[row])
        cut = count < accepted + 1
        requests[row].events.append(VerifyEvent(*offer, accepted, count, cut, *times, len(rows)))
    return [requests[row] for row in rows]
