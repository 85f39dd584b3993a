"""What can be wrong with a draft checkpoint."""

from __future__ import annotations


class DraftDirError(ValueError):
    """A draft directory is incomplete, damaged, of an unknown kind, or does not belong to the target at hand."""


class ExportError(ValueError):
    """A head cannot be written in the format that was asked for without changing what it computes."""
