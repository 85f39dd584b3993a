"""Training on a CUDA device that is not there."""

from __future__ import annotations

import pytest

from tests.pretend_cuda.program import said_by

TYPICAL = ("eagle3", "mtp,anchors")
SWEEP = (
    "eagle3,pack", "eagle3-window", "eagle3-window,anchors", "eagle3,checkpointing", "eagle3,hybrid", "eagle2",
    "eagle2,pack", "eagle2,anchors", "mtp", "mtp,pack", "mtp,checkpointing",
)  # fmt: skip
FORWARD = "_local_scalar_dense at transformers/masking_utils.py"
LOSSES, WEIGHTS = {"fp32": 1e-5, "bf16": 1e-3}, {"fp32": 1e-5, "bf16": 1e-2}  # relative


def check(cases: tuple[str, ...]) -> None:
    found = said_by("training_cases", *cases)
    assert len(found) == 2 * len(cases)
    for name, one in found.items():
        precision = name.split()[1]
        assert one["losses"] <= LOSSES[precision] and one["weights"] <= WEIGHTS[precision], (name, one)
        assert len(one["kernels"]) == 7, (name, one["kernels"])
        # transformers looks for packed sequences before the target's forward, when nothing of the step is queued.
        assert all(line.startswith(FORWARD) for line in one["waits"]) and len(one["waits"]) <= 1, (name, one["waits"])


def test_a_step_is_that_of_the_cpu() -> None:
    """Losses and weights after two steps, in fp32 and bf16. The host does not wait for the target's forward, the
    teacher or the head."""
    check(TYPICAL)


@pytest.mark.slow
def test_every_head_and_option() -> None:
    check(SWEEP)
