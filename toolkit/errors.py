"""Errors that several rooms raise, and which errors are printed as one line for users instead of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_INTERRUPTED = 130  # 128 + SIGINT, the shell's convention


class TargetError(ValueError):
    """The target is not found, is not a supported causal LM, or does not match its tokenizer."""


class UnknownFamilyError(TargetError):
    """The target's family is not in transformers. The code of a model's repository is never run."""


class TokenMapError(ValueError):
    """Ids that cannot form a token map, or a corpus, counts or a file of one that cannot be read."""


class PlanError(ValueError):
    """A deployment cannot be planned: the configuration is not supported, does not fit, or lacks a figure."""


class TrainError(ValueError):
    """A training cannot start: launcher, batch sizes, earlier stages, or a run folder in use."""


class ResumeError(TrainError):
    """The stored state was written with other settings or by another number of processes."""


def is_for_users(error: BaseException) -> bool:
    """Return whether an error is about the user's input: a ValueError class of this package, or a file error.

    With TOOLKIT_LOG=debug the result is always False, so that every error shows its traceback.
    """
    if os.environ.get("TOOLKIT_LOG", "").lower() == "debug":
        return False
    ours = isinstance(error, ValueError) and type(error).__module__.partition(".")[0] == "toolkit"
    return ours or isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)


def exit_status(work: Callable[[], int]) -> int:
    """Return the result of `work`; 2 after printing a user error as one line on stderr, 130 after Ctrl-C."""
    try:
        return work()
    except (ValueError, OSError) as error:
        if not is_for_users(error):
            raise
        print(f"toolkit: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntoolkit: interrupted; files written so far are kept", file=sys.stderr)
        return _INTERRUPTED
