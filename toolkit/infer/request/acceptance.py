"""Acceptance statistics, computed from the event log; all reports use this module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.infer.request.request import VerifyEvent


@dataclass(frozen=True)
class AcceptanceStats:
    """Statistics over verify steps that offered drafts and were not truncated.

    verify_steps: counted steps. truncated_steps: skipped steps, cut by a stop id, a stop string or max_tokens.
    accept_length: mean tokens committed per counted step, bonus token included, so >= 1 (nan without steps).
    accept_rate[i]: of the steps that offered depth i+1 and accepted depth i, the share that accepted depth i+1.
    accept_rate_unconditional[i]: of the steps that offered depth i+1, the share that accepted depth i+1.
    offered, accepted: drafted nodes and accepted nodes, summed over counted steps.
    """

    verify_steps: int
    truncated_steps: int
    accept_length: float
    accept_rate: tuple[float, ...]
    accept_rate_unconditional: tuple[float, ...]
    offered: int
    accepted: int


def summarise(events: Iterable[VerifyEvent]) -> AcceptanceStats:
    """Summarise events of any requests. Plain decoding steps (offered == 0) are skipped; prefill logs no event."""
    drafted = [event for event in events if event.offered > 0]
    counted = [event for event in drafted if not event.truncated]
    deepest = max((event.depth_offered for event in counted), default=0)
    conditional, unconditional = [], []
    for depth in range(1, deepest + 1):
        offering = [event.accepted for event in counted if event.depth_offered >= depth]
        reaching = [accepted for accepted in offering if accepted >= depth - 1]
        passed = sum(accepted >= depth for accepted in reaching)
        conditional.append(passed / len(reaching) if reaching else float("nan"))
        unconditional.append(passed / len(offering))
    accepted_total = sum(event.accepted for event in counted)
    return AcceptanceStats(
        verify_steps=len(counted),
        truncated_steps=len(drafted) - len(counted),
        accept_length=1 + accepted_total / len(counted) if counted else float("nan"),
        accept_rate=tuple(conditional),
        accept_rate_unconditional=tuple(unconditional),
        offered=sum(event.offered for event in counted),
        accepted=accepted_total,
    )
