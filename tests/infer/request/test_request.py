"""Statistics and the request's own bookkeeping, against counts made by hand."""

from __future__ import annotations

import math

import pytest

from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, VerifyEvent, summarise


def event(accepted: int, *, offered: int = 4, depth: int = 4, committed: int | None = None) -> VerifyEvent:
    count = accepted + 1 if committed is None else committed
    return VerifyEvent(offered, depth, accepted, count, count < accepted + 1, 0.0, 0.0, 0.0, 1)


def test_hand_counted_steps():
    """Six steps of a chain of 4, one of them cut, one of them plain: 4 count, (0 + 4 + 2 + 1) accepted."""
    stats = summarise([event(0), event(4), event(2), event(1), event(3, committed=2), event(0, offered=0, depth=0)])
    assert (stats.verify_steps, stats.truncated_steps, stats.accepted, stats.offered) == (4, 1, 7, 16)
    assert stats.accept_length == 1 + 7 / 4
    assert stats.accept_rate == pytest.approx((3 / 4, 2 / 3, 1 / 2, 1.0))
    assert stats.accept_rate_unconditional == pytest.approx((3 / 4, 2 / 4, 1 / 4, 1 / 4))
    assert stats.histogram == (1, 1, 1, 0, 1) and stats.offered_by_depth == (4, 4, 4, 4)
    assert stats.accepted_by_depth == (3, 2, 1, 1)


def test_depths_that_were_not_offered_do_not_count():
    """A re-ranked tree may be shallow in one step: depth 3 was offered once and accepted once."""
    stats = summarise([event(2, offered=5, depth=2), event(3, offered=5, depth=3)])
    assert stats.accept_rate == pytest.approx((1.0, 1.0, 1.0)) and len(stats.accept_rate_unconditional) == 3
    assert (stats.offered_by_depth, stats.accepted_by_depth) == ((2, 2, 1), (2, 2, 1))


def test_nothing_drafted_gives_no_number():
    """nan, not 1 or 0: nobody may read a plain run as measured acceptance."""
    stats = summarise([event(0, offered=0, depth=0)])
    assert math.isnan(stats.accept_length) and stats.accept_rate == () and stats.verify_steps == 0
    assert stats.histogram == stats.accepted_by_depth == ()


def test_a_run_ends_at_the_first_stop_id_or_at_the_limit():
    """Tokens behind the end are dropped with their marks."""
    request = Request([1], SamplingParams(), stop_set=frozenset({9}), token_limit=6)
    assert request.append_run([4], 0) == 1 and request.first_token_at is not None
    assert request.append_run([5, 6, 7], 2) == 3 and not request.finished
    assert request.append_run([8, 9, 3], 2) == 2
    assert request.output_ids == [4, 5, 6, 7, 8, 9] and request.finish_reason == "stop"
    assert request.token_from_draft == [False, True, True, False, True, True] and request.length == 7
    short = Request([1], SamplingParams(), token_limit=2)
    assert short.append_run([4, 5, 6], 2) == 2 and short.finish_reason == "length"
