"""Train a DSpark head: `accelerate launch toolkit/train/dspark.py [--recipe R] [a.b=c ...]`.

One pass of the head drafts a block of train.unroll.ttt_steps tokens.

Without arguments it trains with the demo recipe. Rollouts and token map are read from the recipe's run folder. If they
are missing or were made with other settings, the stages before training run first.
"""

import sys
from pathlib import Path

if not __package__:
    # Run by path: sys.path[0] is toolkit/train and must be the repository instead.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from toolkit.pipeline.train_entry import train_from_command_line

if __name__ == "__main__":
    sys.exit(train_from_command_line("dspark", sys.argv[1:]))
