"""Run `python -m toolkit`, for environments whose scripts are not on the PATH."""

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
