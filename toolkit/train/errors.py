"""Errors of a training; each message is one line for the user."""

from __future__ import annotations


class TrainError(ValueError):
    """A training cannot start: launcher, batch sizes, earlier stages, or a run folder in use."""


class ResumeError(TrainError):
    """The stored state was written with other settings or by another number of processes."""
