"""Which errors are one line for the user, and which are ours to see whole."""

from __future__ import annotations

import os


def is_for_users(error: BaseException) -> bool:
    """Errors that speak about the user's input: our own ValueErrors, and files that cannot be opened.

    With TOOLKIT_LOG=debug none is: every error then shows its traceback.
    """
    if os.environ.get("TOOLKIT_LOG", "").lower() == "debug":
        return False
    ours = isinstance(error, ValueError) and type(error).__module__.partition(".")[0] == "toolkit"
    return ours or isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)
