"""Acceptance statistics, computed from the event log; all reports use this module."""

from __future__ import annotations

from collections import Counter
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
    histogram[i]: counted steps that accepted exactly i drafted tokens.
    offered_by_depth[i]: counted steps that offered depth i+1.
    """

    verify_steps: int
    truncated_steps: int
    accept_length: float
    accept_rate: tuple[float, ...]
    accept_rate_unconditional: tuple[float, ...]
    offered: int
    accepted: int
    histogram: tuple[int, ...]
    offered_by_depth: tuple[int, ...]

    @property
    def accepted_by_depth(self) -> tuple[int, ...]:
        """[i]: counted steps that accepted depth i+1, so at least i+1 drafted tokens."""
        return tuple(sum(self.histogram[depth:]) for depth in range(1, len(self.histogram)))


def summarise(events: Iterable[VerifyEvent]) -> AcceptanceStats:
    """Summarise events of any requests. Plain decoding steps (offered == 0) are skipped; prefill logs no event."""
    drafted = [event for event in events if event.offered > 0]
    counted = [event for event in drafted if not event.truncated]
    deepest = max((event.depth_offered for event in counted), default=0)
    conditional, unconditional, offering_by_depth = [], [], []
    for depth in range(1, deepest + 1):
        offering = [event.accepted for event in counted if event.depth_offered >= depth]
        reaching = [accepted for accepted in offering if accepted >= depth - 1]
        passed = sum(accepted >= depth for accepted in reaching)
        conditional.append(passed / len(reaching) if reaching else float("nan"))
        unconditional.append(passed / len(offering))
        offering_by_depth.append(len(offering))
    by_accepted = Counter(event.accepted for event in counted)
    accepted_total = sum(accepted * steps for accepted, steps in by_accepted.items())
    return AcceptanceStats(
        verify_steps=len(counted),
        truncated_steps=len(drafted) - len(counted),
        accept_length=1 + accepted_total / len(counted) if counted else float("nan"),
        accept_rate=tuple(conditional),
        accept_rate_unconditional=tuple(unconditional),
        offered=sum(event.offered for event in counted),
        accepted=accepted_total,
        histogram=tuple(by_accepted[accepted] for accepted in range(deepest + 1)) if counted else (),
        offered_by_depth=tuple(offering_by_depth),
    )
