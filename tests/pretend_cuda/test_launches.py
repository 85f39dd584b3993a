"""How many kernels a recorded round launches. On a GPU each takes some microseconds, however little it computes."""

from __future__ import annotations

from tests.pretend_cuda.program import said_by

# By round and part, as `python -m tests.pretend_cuda.launches` prints them. These numbers may only fall.
PARTS = (
    "draft bookkeeping", "head layers", "draft logits", "build tree", "target", "choose", "walk", "keep features",
    "compaction", "advance", "the rest", "outside",
)  # fmt: skip
BUDGETS = {
    "plain greedy":             (0, 0, 0, 0, 81, 5, 1, 0, 0, 3, 9, 18),
    "plain drawn":              (0, 0, 0, 0, 81, 11, 1, 0, 0, 3, 9, 24),
    "plain cut":                (0, 0, 0, 0, 81, 34, 1, 0, 0, 3, 9, 47),
    "eagle3 3,1,4 greedy":      (17, 61, 6, 1, 88, 5, 1, 4, 0, 3, 9, 107),
    "eagle3 3,1,4 cut":         (17, 61, 6, 1, 88, 34, 1, 4, 0, 3, 9, 136),
    "eagle3 7,8,32 greedy":     (35, 147, 14, 3, 88, 5, 1, 5, 1, 3, 9, 223),
    "mtp 3,1,4 greedy":         (16, 70, 3, 1, 88, 5, 1, 3, 0, 3, 9, 111),
    "mtp 7,8,32 greedy":        (34, 168, 7, 3, 88, 5, 1, 4, 1, 3, 9, 235),
    "eagle3 3,1,4 greedy bf16": (17, 61, 6, 1, 84, 5, 1, 4, 0, 3, 9, 107),
    "eagle3 7,8,32 greedy bf16":(35, 147, 14, 3, 91, 5, 1, 5, 1, 3, 9, 223),
}  # fmt: skip


def test_a_round_launches_no_more_than_its_budget() -> None:
    """A small operation in a loop over levels or layers costs a percent of a round, and nobody would notice it."""
    found = said_by("launches", "json")
    assert set(found) == set(BUDGETS)
    over = {
        (name, part): (count, budget)
        for name, budgets in BUDGETS.items()
        for part, budget in zip(PARTS, budgets, strict=True)
        if (count := found[name].get(part, 0)) > budget
    }
    assert not over, f"(round, part): (launches, budget) {over}"
    assert not {part for counts in found.values() for part in counts} - set(PARTS), "a part without a budget"
