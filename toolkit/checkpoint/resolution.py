"""How the ambiguous settings of a foreign checkpoint were read: each one's value and the rule that decided it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.checkpoint.errors import DraftDirError
from toolkit.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Resolution:
    """`warning`: the value may well be wrong, or something was left out; the rule says what to do about it."""

    key: str
    value: Any
    rule: str
    warning: bool = False

    @property
    def line(self) -> str:
        """The text that is printed."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return f"{self.key} = {value}: {self.rule}"


class Resolver:
    """Collects resolutions. overrides: the user's values of keys (--set), which take precedence over every rule."""

    def __init__(self, overrides: Mapping[str, Any] | None = None) -> None:
        self.lines: list[Resolution] = []
        self._overrides = dict(overrides or {})
        self._settled: set[str] = set()

    def settle(self, key: str, value: Any, rule: str, *, warning: bool = False) -> Any:
        """Notes `value` for `key`, or the user's own; returns what holds."""
        self._settled.add(key)
        if key in self._overrides:
            said = self._overrides[key]
            _check_alike(key, said, value)
            value, rule, warning = said, f"given with --set (the files say {value})", False
        self.lines.append(Resolution(key, value, rule, warning))
        return value

    def overridden(self, key: str) -> bool:
        """Whether the user gave `key` a value."""
        return key in self._overrides

    def note(self, key: str, value: Any, rule: str, *, warning: bool = False) -> None:
        """Notes what was found or left out; nothing to override."""
        self.lines.append(Resolution(key, value, rule, warning))

    def check_all_used(self) -> None:
        """Raises `DraftDirError` for an override that no rule asked for: it would be ignored silently."""
        unused = sorted(self._overrides.keys() - self._settled)
        if unused:
            raise DraftDirError(
                f"--set {unused[0]}: this checkpoint has no such setting; it has {', '.join(sorted(self._settled))}"
            )


def _check_alike(key: str, said: Any, found: Any) -> None:
    """Raises `DraftDirError` when the user's value has another type than the one it replaces."""
    if isinstance(found, tuple):
        fits = isinstance(said, tuple) and all(type(one) is int for one in said)
        wanted = "whole numbers such as 2,16,29 are"
    elif isinstance(found, bool):
        fits, wanted = isinstance(said, bool), "true or false is"
    else:
        fits, wanted = isinstance(said, int | float) and not isinstance(said, bool), "a number is"
    if not fits:
        raise DraftDirError(f"--set {key}={said}: {wanted} needed")


def log_resolutions(lines: list[Resolution]) -> None:
    """Log every resolution, warnings at that level."""
    for one in lines:
        (log.warning if one.warning else log.info)("%s", one.line)
