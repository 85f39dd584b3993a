"""Which errors are one line for the user, and which show their traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_INTERRUPTED = 130  # 128 + SIGINT, the shell's convention


def is_for_users(error: BaseException) -> bool:
    """Errors about the user's input: our own ValueErrors, and files that cannot be opened.

    With TOOLKIT_LOG=debug none is: every error then shows its traceback.
    """
    if os.environ.get("TOOLKIT_LOG", "").lower() == "debug":
        return False
    ours = isinstance(error, ValueError) and type(error).__module__.partition(".")[0] == "toolkit"
    return ours or isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)


def exit_status(work: Callable[[], int]) -> int:
    """What `work` returns; after one line on stderr, 2 for an error that is for the user and 130 for Ctrl-C."""
    try:
        return work()
    except (ValueError, OSError) as error:
        if not is_for_users(error):
            raise
        print(f"toolkit: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntoolkit: interrupted; what was written so far is kept", file=sys.stderr)
        return _INTERRUPTED
