"""The engine on a CUDA device that is not there writes what it writes on the CPU. Rounds wait for the device once and
upload from pinned memory; a read or an upload while a round is recorded would end the recording."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pretend_cuda.program import said_by

TYPICAL = ("none//cut", "eagle3/3,1,4/greedy", "eagle3/3,3,8/cut", "mtp-three-layers/3,1,4/drawn/block")
CHAIN, TREE = "3,1,4", "3,3,8"
SHAPES = ((CHAIN, "greedy"), (CHAIN, "asking"), (TREE, "cut"), (TREE, "drawn"))
OTHER_HEADS = (
    *(f"none//{settings}" for settings in ("greedy", "drawn", "asking")),
    *(f"{draft}/{shape}/{settings}" for draft in ("eagle2", "mtp", "mtp-three-layers") for shape, settings in SHAPES),
    f"adaptive/{CHAIN}/greedy",
    f"adaptive/{TREE}/asking",
)
RULES = (
    *(f"eagle3/{CHAIN}/{settings}" for settings in ("drawn", "cut", "asking")),
    *(f"eagle3/{TREE}/{settings}" for settings in ("greedy", "drawn", "asking")),
    *(f"{draft}/{shape}/{settings}" for draft in ("ngram", "composed") for shape, settings in SHAPES),
    *(
        f"eagle3/{CHAIN}/{settings}/{verify}"
        for verify in ("rejection", "block", "auto")
        for settings in ("cut", "asking")
    ),
    *(f"composed/{CHAIN}/asking/{verify}" for verify in ("rejection", "auto")),
)
READS = {"adaptive": 2}  # a probe of what the head would have drafted reads its ranks
NEVER_RECORDED = ("ngram", "composed", "adaptive")  # the host chooses their drafts


def check(cases: tuple[str, ...]) -> dict[str, Any]:
    found = said_by("engine_cases", *cases)
    assert set(found) == set(cases)
    for case, kinds in found.items():
        draft = case.split("/")[0]
        for kind, one in kinds.items():
            assert not one["different"], (case, kind, one["different"][0])
            assert one["reads"] <= READS.get(draft, 1), (case, kind, one["lines"])
            assert not one["uploads"], (case, kind, one["lines"])
        assert bool(kinds["recorded"]["replays"]) == (draft not in NEVER_RECORDED), (case, "which rounds are recorded")
    return found


def test_the_engine_writes_what_it_writes_on_the_cpu() -> None:
    """Chains and trees, eager and recorded: a tensor left on the host, a table of the wrong device, or a number that
    was the host's when a round was recorded."""
    found = check(TYPICAL)
    # Rows, settings and pages are uploaded where they change; most rounds find all of it on the device.
    assert not {case: kinds for case, kinds in found.items() if any(one["pinned"] for one in kinds.values())}
    assert found["eagle3/3,3,8/cut"]["recorded"]["accepted"], "nothing was accepted, so little was walked or moved"


def test_deterministic_engines_write_what_they_write_on_the_cpu() -> None:
    """Other attention and products, in recorded rounds too. The case is alone, since the target's modules change."""
    found = check(("eagle3/3,3,8/asking/target/deterministic",))
    assert all(one["accepted"] for kinds in found.values() for one in kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "accepting"), [(OTHER_HEADS, {"eagle2", "mtp"}), (RULES, {"eagle3", "ngram", "composed"})]
)
def test_every_drafter_verifier_and_setting(cases: tuple[str, ...], accepting: set[str]) -> None:
    """The rest of the sweep: other heads, lookup, composed and adaptive drafting, verify rules, log-probabilities,
    penalties and biases."""
    found = check(cases)
    assert {case.split("/")[0] for case, kinds in found.items() if kinds["eager"]["accepted"]} >= accepting
