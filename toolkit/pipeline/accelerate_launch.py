"""`accelerate launch` as a child of ours: the workers' exit status and no traceback of the launcher.

The workers have printed what was wrong, or were told to end. The traceback of torch's launcher adds nothing to that.
"""

from __future__ import annotations

import sys

from accelerate.commands.launch import main as launch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Launch with the arguments of the command line; returns the exit status a shell would show."""
    try:
        launch()
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status >= 0 else 128 - status
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
