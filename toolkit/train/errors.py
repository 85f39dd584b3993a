"""What can be wrong with a training before or while it starts; each message is one line for the user."""

from __future__ import annotations


class TrainError(ValueError):
    """A training that cannot start as asked: launcher, batch sizes, earlier stages, a folder in use."""


class ResumeError(TrainError):
    """A stored state belongs to other settings or another number of processes."""
