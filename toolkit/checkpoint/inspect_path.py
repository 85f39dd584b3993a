"""A report of whatever a path or a hub id names: a draft head or a target."""

from __future__ import annotations

from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.files import locate, target_named
from toolkit.checkpoint.inspect_head import Report, inspect_head
from toolkit.checkpoint.inspect_target import inspect_target


def inspect_path(path: str, compare_with: str | None = None) -> Report:
    """The report of a draft head or a target. compare_with: the target that a head is checked against.

    Raises `DraftDirError` for what is neither and for a target that is to be compared, `TargetError`.
    """
    target = target_named(path)
    if target is None:
        return inspect_head(locate(path), compare_with)
    if compare_with is not None:
        raise DraftDirError(
            f"{path} is a target, and `target` {compare_with} is given, which is for draft heads only; leave it out"
        )
    return inspect_target(*target)
