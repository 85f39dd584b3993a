"""On a CUDA device that is not there the engine and training write what they write on the CPU. Counted is what a GPU
waits for: reads, uploads from pageable memory and launches of a round and of a training step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.program import said_by

ROUND, STEP = "round:eagle3/3,3,8/cut", "training:eagle3"
SERVED = "round:eagle3/3,1,4/served"
ROUNDS = [
    f"round:{case}"
    for case in (
        "eagle3/3,1,4/served", "eagle2/3,3,8/asking", "mtp-three-layers/3,1,4/cut/block",
        "mtp/3,3,8/cut", "adaptive/3,3,8/asking", "ngram/3,1,4/asking", "perfect/3,1,4/cut",
        "composed/3,3,8/asking", "dspark/256/cut", "dflash/16/cut", "eagle3/3,1,4/asking/auto",
        "eagle3/3,3,8/asking/target/deterministic",  # the last one: it changes the target's modules
    )
]  # fmt: skip
STEPS = [f"training:{case}" for case in ("mtp,anchors", "eagle3,pack", "eagle2,anchors")]
READS = {"adaptive": 2}  # a probe of what the head would have drafted reads its ranks


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Of one process, since its start takes longest."""
    return said_by("pretend_cuda.run", "checks", "launches", "loss", ROUND, STEP)


@pytest.mark.slow
def test_the_device_refuses_waits_and_counts(found) -> None:
    """Operations on both devices, reads, uploads, launches, and graphs that run without the host."""
    assert not found["checks"], "\n".join(found["checks"])


# -- rounds ------------------------------------------------------------------------------------------------------------


def check_rounds(case: str, kinds: dict[str, Any]) -> None:
    draft = case.partition(":")[2].split("/")[0]
    for kind, one in kinds.items():
        assert not one["different"], (case, kind, one["different"][0])
        assert one["reads"] <= READS.get(draft, 1), (case, kind, one["lines"])
        assert not one["uploads"], (case, kind, one["lines"])
    assert kinds["recorded"]["replays"] and not kinds["recorded"]["eager_rounds"], (case, "a forward ran eagerly")


@pytest.mark.slow
def test_the_engine_writes_what_it_writes_on_the_cpu(found) -> None:
    """A tree, eager and recorded: a tensor left on the host, a table of the wrong device, or a number that was the
    host's when a round was recorded."""
    check_rounds(ROUND, found[ROUND])
    # Rows, settings and pages are uploaded where they change; most rounds find all of it on the device.
    assert not any(one["pinned"] for one in found[ROUND].values())
    assert found[ROUND]["recorded"]["accepted"], "little was walked or moved"


@pytest.mark.slow
def test_every_drafter_verifier_and_setting() -> None:
    """Other heads, lookup, composed and adaptive drafting, perfect drafts, verify rules, log-probabilities, penalties
    and biases; other attention and products where the bits have to be the same."""
    found = said_by("pretend_cuda.run", *ROUNDS)
    for case, kinds in found.items():
        check_rounds(case, kinds)
    accepting = {case.partition(":")[2].split("/")[0] for case, kinds in found.items() if kinds["eager"]["accepted"]}
    assert found[SERVED]["recorded"]["replays"] == 2, "draft and forward; penalties have a choice by the host"
    assert accepting >= {"eagle2", "mtp", "eagle3", "ngram", "composed", "perfect"}


# -- launches ----------------------------------------------------------------------------------------------------------

BUDGETS = {  # these numbers may only fall
    "plain cut": {"forward": 81, "choice": 47},
    "eagle3 3,1,4": {"draft": 85, "forward": 89, "choice": 21},
    "eagle3 7,8,32": {"draft": 199, "forward": 89, "choice": 23},
    "mtp 7,8,32": {"draft": 212, "forward": 88, "choice": 23},
    "eagle3 7,8,32 bf16": {"draft": 199, "forward": 92, "choice": 23},
}


@pytest.mark.slow
def test_a_round_launches_no_more_than_its_budget(found) -> None:
    """A small operation in a loop over levels or layers costs a percent of a round, and nobody would notice it."""
    for name, budgets in BUDGETS.items():
        launched = found["launches"][name]
        assert launched.keys() == budgets.keys()
        assert all(launched[part] <= budget for part, budget in budgets.items()), (name, launched, budgets)


# -- training ----------------------------------------------------------------------------------------------------------

FORWARD = "_local_scalar_dense at transformers/masking_utils.py"
STEP_LAUNCHES = {"fp32": 655, "bf16": 714}  # of STEP, with its backward and the optimizer; they may only fall
LOSSES, WEIGHTS = {"fp32": 1e-5, "bf16": 1e-3}, {"fp32": 1e-5, "bf16": 1e-2}  # relative


def check_training(case: str, precisions: dict[str, Any]) -> None:
    for precision, one in precisions.items():
        assert one["losses"] <= LOSSES[precision] and one["weights"] <= WEIGHTS[precision], (case, one)
        assert len(one["kernels"]) == 7, (case, one["kernels"])
        # transformers looks for packed sequences before the target's forward, when nothing of the step is queued.
        assert all(line.startswith(FORWARD) for line in one["waits"]) and len(one["waits"]) <= 1, (case, one["waits"])


@pytest.mark.slow
def test_a_step_is_that_of_the_cpu(found) -> None:
    """Losses and weights after two steps, in fp32 and bf16. The host does not wait for the target's forward, the
    teacher or the head, and launches no more than the budget."""
    check_training(STEP, found[STEP])
    launched = {precision: one["launches"] for precision, one in found[STEP].items()}
    assert all(launched[precision] <= budget for precision, budget in STEP_LAUNCHES.items()), launched


@pytest.mark.slow
def test_the_loss_moves_few_bytes(found) -> None:
    """Over those of its logits. In the chunks of a CPU each of 110 reads and writes the matrix's gradient: 294."""
    of_cpu, of_gpu = found["loss"]["8388608"], found["loss"]["268435456"]
    assert of_gpu <= 19.3 and of_cpu > 10 * of_gpu, "counted, and the chunks show"


@pytest.mark.slow
def test_every_head_and_option() -> None:
    for case, precisions in said_by("pretend_cuda.run", *STEPS).items():
        check_training(case, precisions)
