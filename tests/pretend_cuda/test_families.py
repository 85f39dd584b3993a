"""Model families on a CUDA device that is not there: what a family's own code makes on the host."""

from __future__ import annotations

import pytest

from tests.infer.attention.test_hybrid_targets import FAMILIES as HYBRIDS
from tests.pretend_cuda.program import said_by

TYPICAL = ("llama", "gpt_oss")
# Reads of a round of families whose rounds run eagerly: a dynamic rope asks for the longest position; rounds of linear
# attention are not recorded.
EAGER = {"llama-dynamic": 3, **dict.fromkeys(HYBRIDS, 1)}
BY_RELEASE = {"phi3-longrope": 2}  # transformers 5.17 compares the longest position on the host, 5.24 does not


def check(families: tuple[str, ...]) -> None:
    found = said_by("family_cases", *families)
    assert found
    for family, one in found.items():
        assert not one["different"], (family, one["different"])
        most = {**EAGER, **BY_RELEASE}.get(family, 1)
        assert one["reads"] <= most and not one["uploads"], (family, one)
        eager = one["reads"] > 1 if family in BY_RELEASE else family in EAGER
        assert bool(one["replays"]) != eager, (family, one)


def test_a_family_writes_what_it_writes_on_the_cpu() -> None:
    """Recorded trees behind prompts in chunks."""
    check(TYPICAL)


@pytest.mark.slow
def test_every_family_writes_what_it_writes_on_the_cpu() -> None:
    check(())
