"""A report of whatever a path or a hub id names: a draft head, a target or a token map."""

from __future__ import annotations

from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.files import locate, target_named
from toolkit.checkpoint.inspect_head import Report, inspect_head
from toolkit.checkpoint.inspect_map import inspect_map, is_map_file
from toolkit.checkpoint.inspect_target import inspect_target


def inspect_path(path: str, compare_with: str | None = None) -> Report:
    """The report of a draft head, a target or a token map. compare_with: the target that heads and maps are checked
    against.

    Raises `DraftDirError` for what is none of them and for a target that is to be compared, `TargetError`,
    `TokenMapError`.
    """
    if is_map_file(path):
        return inspect_map(path, compare_with)
    target = target_named(path)
    if target is None:
        return inspect_head(locate(path), compare_with)
    if compare_with is not None:
        raise DraftDirError(
            f"{path} is a target, and `target` {compare_with} is given, which is for draft heads only; leave it out"
        )
    return inspect_target(*target)
