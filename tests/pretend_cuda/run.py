"""What runs on a CUDA device that is not there. A program, since it patches torch:

    python -m tests.pretend_cuda.run checks launches round:eagle3/3,3,8/cut training:eagle3 ..

Prints one JSON object: what was found, by argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from tests.pretend_cuda.device_checks import wrong
from tests.pretend_cuda.engine_cases import compare_rounds
from tests.pretend_cuda.launches import counted
from tests.pretend_cuda.training_cases import compare_training, loss_bytes

PROGRAMS: dict[str, Callable[..., Any]] = {
    "checks": wrong, "launches": counted, "round": compare_rounds, "training": compare_training,
    "loss": loss_bytes,
}  # fmt: skip

if __name__ == "__main__":
    found = {}
    for one in sys.argv[1:]:
        name, _, case = one.partition(":")
        found[one] = PROGRAMS[name](*([case] if case else []))
    print(json.dumps(found))
