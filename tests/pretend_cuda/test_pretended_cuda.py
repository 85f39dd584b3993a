"""On a CUDA device that is not there the engine and training write what they write on the CPU. Counted is what a GPU
waits for: reads, uploads from pageable memory and launches of a round and of a training step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.program import said_by


def test_the_device_refuses_waits_and_counts() -> None:
    """Operations on both devices, reads, uploads, launches, and graphs that run without the host: else the tests below
    would say nothing."""
    found = said_by("pretend_cuda.device_checks")
    wrong = {name: text for name, text in found.items() if text is not None}
    assert len(found) == 5 and not wrong, "\n".join(wrong.values())


# -- rounds ------------------------------------------------------------------------------------------------------------

# The last case is alone at its end: it changes the target's modules.
TYPICAL = (
    "eagle3/3,3,8/cut", "mtp-three-layers/3,1,4/drawn/block",
    "eagle3/3,3,8/asking/target/deterministic",
)  # fmt: skip
SWEEP = (
    "none//cut", "eagle3/3,1,4/drawn", "eagle3/3,1,4/penalty",
    "eagle2/3,1,4/asking", "mtp/3,3,8/drawn", "adaptive/3,3,8/asking",
    "ngram/3,1,4/asking", "composed/3,3,8/asking", "eagle3/3,1,4/cut/rejection", "eagle3/3,1,4/asking/auto",
    "composed/3,1,4/asking/rejection",
)  # fmt: skip
READS = {"adaptive": 2}  # a probe of what the head would have drafted reads its ranks


def check_rounds(cases: tuple[str, ...]) -> dict[str, Any]:
    found = said_by("pretend_cuda.engine_cases", *cases)
    assert set(found) == set(cases)
    for case, kinds in found.items():
        draft = case.split("/")[0]
        for kind, one in kinds.items():
            assert not one["different"], (case, kind, one["different"][0])
            assert one["reads"] <= READS.get(draft, 1), (case, kind, one["lines"])
            assert not one["uploads"], (case, kind, one["lines"])
        assert kinds["recorded"]["replays"] and not kinds["recorded"]["eager_rounds"], (case, "a forward ran eagerly")
    return found


def test_the_engine_writes_what_it_writes_on_the_cpu() -> None:
    """Chains and trees, eager and recorded: a tensor left on the host, a table of the wrong device, or a number that
    was the host's when a round was recorded; other attention and products where the bits have to be the same."""
    found = check_rounds(TYPICAL)
    # Rows, settings and pages are uploaded where they change; most rounds find all of it on the device.
    plain = {case: kinds for case, kinds in found.items() if "deterministic" not in case}
    assert not {case: kinds for case, kinds in plain.items() if any(one["pinned"] for one in kinds.values())}
    assert all(found[case]["recorded"]["accepted"] for case in (TYPICAL[0], TYPICAL[2])), "little was walked or moved"


@pytest.mark.slow
def test_every_drafter_verifier_and_setting() -> None:
    """Other heads, lookup, composed and adaptive drafting, verify rules, log-probabilities, penalties and biases."""
    found = check_rounds(SWEEP)
    accepting = {case.split("/")[0] for case, kinds in found.items() if kinds["eager"]["accepted"]}
    assert accepting >= {"eagle2", "mtp", "eagle3", "ngram", "composed"}


# -- launches ----------------------------------------------------------------------------------------------------------

# By round and part, as `python -m tests.pretend_cuda.launches` prints them. These numbers may only fall.
PARTS = (
    "draft bookkeeping", "head layers", "draft logits", "build tree", "target", "choose", "walk", "keep features",
    "compaction", "advance", "the rest", "outside",
)  # fmt: skip
BUDGETS = {
    "plain cut":                (0, 0, 0, 0, 81, 34, 1, 0, 0, 3, 9, 47),
    "eagle3 3,1,4 greedy":      (17, 61, 6, 1, 89, 5, 1, 3, 0, 3, 9, 107),
    "eagle3 7,8,32 greedy":     (35, 147, 14, 3, 89, 5, 1, 4, 1, 3, 9, 223),
    "mtp 7,8,32 greedy":        (34, 168, 7, 3, 88, 5, 1, 4, 1, 3, 9, 235),
    "eagle3 7,8,32 greedy bf16":(35, 147, 14, 3, 92, 5, 1, 4, 1, 3, 9, 223),
}  # fmt: skip


def test_a_round_launches_no_more_than_its_budget() -> None:
    """A small operation in a loop over levels or layers costs a percent of a round, and nobody would notice it."""
    found = said_by("pretend_cuda.launches", "json")
    assert set(found) == set(BUDGETS)
    over = {
        (name, part): (count, budget)
        for name, budgets in BUDGETS.items()
        for part, budget in zip(PARTS, budgets, strict=True)
        if (count := found[name].get(part, 0)) > budget
    }
    assert not over, f"(round, part): (launches, budget) {over}"
    assert not {part for counts in found.values() for part in counts} - set(PARTS), "a part without a budget"


# -- training ----------------------------------------------------------------------------------------------------------

TRAINED = ("eagle3", "mtp,anchors")
OTHERS = ("eagle3,pack", "eagle3-window,anchors", "eagle3,hybrid", "eagle2,anchors", "mtp,checkpointing")
FORWARD = "_local_scalar_dense at transformers/masking_utils.py"
LOSSES, WEIGHTS = {"fp32": 1e-5, "bf16": 1e-3}, {"fp32": 1e-5, "bf16": 1e-2}  # relative


def check_training(cases: tuple[str, ...]) -> None:
    found = said_by("pretend_cuda.training_cases", *cases)
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
    check_training(TRAINED)


@pytest.mark.slow
def test_every_head_and_option() -> None:
    check_training(OTHERS)
