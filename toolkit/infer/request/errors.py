"""Errors for settings, requests and targets that the engine does not support."""

from __future__ import annotations

from typing import Literal

from toolkit.errors import TargetError


class SamplingError(ValueError):
    """A sampling setting outside its range; `field` is the setting's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class DraftShapeError(ValueError):
    """An impossible draft shape, or one that this draft head cannot draft."""


class EngineError(ValueError):
    """Engine settings, or a request, that cannot work as given."""


Cause = Literal["deadline", "shutdown"]  # why a request was cut


class RequestCutError(RuntimeError):
    """A request was cut before the engine took it."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(f"the request was cut ({cause}) before the engine took it")
        self.cause: Cause = cause


class VerifyError(EngineError):
    """A request asks for a rule of verification that its engine does not have."""


class UnsupportedTargetError(TargetError):
    """The target's attention has a feature that the engine does not implement, so the answers would differ."""


class CompileError(EngineError):
    """The target's layers cannot be compiled: the machine lacks a tool, or torch.compile rejects the target's code."""
