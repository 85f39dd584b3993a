"""No request waits for a Triton kernel to be compiled: what serving launches was launched at the engine's start."""

from __future__ import annotations

import pytest

from tests.pretend_cuda.program import said_by

MOST_AT_START = 60  # variants of target and head together; each takes about a second, once on a machine
REQUESTS = 60  # the program serves 200 where nothing else is said
RECORDED = ("none", "eagle3", "windowed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [("none", "eagle3/4,1,5", "ngram/4,1,5"), ("eagle3/5,4,16", "adaptive/4,3,12", "windowed/4,1,5")]
)
def test_serving_compiles_nothing(cases: tuple[str, ...]) -> None:
    """Requests of all lengths and kinds of sampling: a kernel that takes a length or a count of rows as a part of its
    variant, or a way through the engine that the warm-up does not go. Rounds are recorded where they can be."""
    found = said_by("compilations", "--requests", str(REQUESTS), *cases)
    assert set(found) == set(cases)
    for case, one in found.items():
        assert not one["late"], (case, one["late"])
        assert one["at_start"] <= MOST_AT_START, (case, one["at_start"])
        assert bool(one["replays"]) == (case.split("/")[0] in RECORDED), (case, one["replays"])
