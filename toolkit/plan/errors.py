"""What can be wrong with a plan."""

from __future__ import annotations


class PlanError(ValueError):
    """A deployment cannot be planned: its configuration is not modelled, it does not fit, a figure is missing."""
