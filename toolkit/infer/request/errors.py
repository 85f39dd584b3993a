"""What a user may have asked of the engine that it cannot do."""

from __future__ import annotations

from toolkit.targets.errors import TargetError


class SamplingError(ValueError):
    """A sampling setting outside its range; `field` is the setting's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class DraftShapeError(ValueError):
    """A draft shape that cannot be, or that this head cannot draft."""


class EngineError(ValueError):
    """An engine, or a request to it, that cannot work as it was asked for."""


class UnsupportedTargetError(TargetError):
    """The target's attention does something that the engine's does not, so its answers would not be the target's."""


class CompileError(EngineError):
    """Layers that cannot be compiled: this machine lacks something, or the target's code is not for it."""
