"""Train an EAGLE-1/2 head: `accelerate launch toolkit/train/eagle2.py [--recipe R] [a.b=c ...]`.

It learns the target's next last state beside its next token, which the target's own output matrix reads of it.

Without arguments it trains by the demo recipe. Rollouts and token map come from the recipe's run folder. Where they are
absent, or made by other settings than these, the stages before training make them first.
"""

import sys
from pathlib import Path

if not __package__:
    # Run by path: the repository takes the place of toolkit/train at the head of the search path.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Sequence

from toolkit.pipeline.train_entry import train_from_command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, make what is missing, train. Returns an exit status."""
    return train_from_command_line("eagle2", argv)


if __name__ == "__main__":
    sys.exit(main())
