"""Errors of planning."""

from __future__ import annotations


class PlanError(ValueError):
    """A deployment cannot be planned: the configuration is not supported, does not fit, or lacks a figure."""
