"""The pretended device itself: else the tests on it would say nothing."""

from __future__ import annotations

from tests.pretend_cuda.program import said_by


def test_the_device_refuses_waits_and_counts() -> None:
    """Operations on both devices, reads, uploads, launches, and graphs that run without the host."""
    found = said_by("device_checks")
    wrong = {name: text for name, text in found.items() if text is not None}
    assert len(found) == 7 and not wrong, "\n".join(wrong.values())
