"""Errors that several packages raise, and which errors are printed as one line for users instead of a traceback."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from toolkit.log import wants_debug

_INTERRUPTED = 130  # 128 + SIGINT, the shell's convention
# safetensors has a class of its own for this, and torch's writer gives no reason.
_DISK_FULL = ("No space left on device", "Disk quota exceeded", "inline_container.cc")
_FREE_SPACE = "free some space and run the same command again, which goes on with the files it has"
_INSTALLED_AS = {"yaml": "pyyaml"}  # where pip's name is another one


class TargetError(ValueError):
    """The target is not found, is not a supported causal LM, or does not match its tokenizer."""


class UnknownFamilyError(TargetError):
    """The target's family is not in transformers. The code of a model's repository is never run."""


class DraftDirError(ValueError):
    """A draft directory is incomplete, damaged, of an unknown kind, or does not belong to the target at hand."""


class ExportError(ValueError):
    """A head cannot be written in the format that was asked for without changing what it computes."""


class TokenMapError(ValueError):
    """Ids that cannot form a token map, or a corpus, counts or a file of one that cannot be read."""


class PlanError(ValueError):
    """A deployment cannot be planned: the configuration is not supported, does not fit, or lacks a figure."""


class TrainError(ValueError):
    """A training cannot start: launcher, batch sizes, earlier stages, or a run folder in use."""


class ResumeError(TrainError):
    """The stored state was written with other settings or its layout cannot be converted."""


class MissingPackageError(ModuleNotFoundError):
    """A package that only some of the features need is not installed."""

    def __init__(self, package: str, needed_by: str) -> None:
        install = _INSTALLED_AS.get(package, package)
        super().__init__(
            f"{needed_by} needs the Python package {package}, which is not installed: pip install {install}",
            name=package,
        )
        self.needed_by = needed_by

    def __reduce__(self) -> tuple[type[MissingPackageError], tuple[str, str]]:
        """A process that unpickles it calls it again with both arguments."""
        return type(self), (str(self.name), self.needed_by)


def optional_package(name: str, needed_by: str) -> ModuleType:
    """Import a package where it is used: who does not use that feature need not install it.

    Raises `MissingPackageError`, whose message says that `needed_by` needs it and how to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # it is installed, and something that it needs is not
            raise
        raise MissingPackageError(name, needed_by) from error


def is_for_users(error: BaseException) -> bool:
    """Return whether an error is about the user's input: a ValueError class of this package, or a file error.

    With TOOLKIT_LOG=debug the result is always False, so that every error shows its traceback.
    """
    if wants_debug():
        return False
    ours = isinstance(error, ValueError) and type(error).__module__.partition(".")[0] == "toolkit"
    return ours or isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)


def exit_status(work: Callable[[], int]) -> int:
    """Return the result of `work`; 2 after printing a user error or a missing package as one line on stderr, 130 after
    Ctrl-C."""
    try:
        return work()
    except ModuleNotFoundError as error:
        package = (error.name or "toolkit").partition(".")[0]
        if package == "toolkit" or wants_debug():
            raise
        told: object = error if isinstance(error, MissingPackageError) else MissingPackageError(package, "this command")
    except Exception as error:
        full = any(said in str(error) for said in _DISK_FULL) and not wants_debug()
        if not full and not is_for_users(error):
            raise
        told = f"the disk is full ({str(error).splitlines()[0]}); {_FREE_SPACE}" if full else error
    except KeyboardInterrupt:
        print("\ntoolkit: interrupted; files written so far are kept", file=sys.stderr)
        return _INTERRUPTED
    print(f"toolkit: error: {told}", file=sys.stderr)
    return 2
