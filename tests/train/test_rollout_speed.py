"""The time of plain decoding is estimated from plain rounds with the same number of rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from toolkit.infer.request.request import VerifyEvent
from toolkit.train.rollout_speed import RolloutSpeed


def _event(offered: int, committed: int, seconds: float, rows: int) -> VerifyEvent:
    return VerifyEvent(offered, offered, committed - 1, committed, False, seconds / 2, seconds / 4, seconds / 4, rows)


def test_plain_speed_at_the_same_number_of_rows() -> None:
    """A batch's seconds counted once a row, the pace of one row taken for a batch's, or a row without drafts in a
    drafted round taken for a plain one would make drafting look better or worse than it is."""
    speed = RolloutSpeed()
    assert not speed
    for row in range(4):  # together: a plain round of 2 s (0.5 s a token), a drafted one of 3 s for seven tokens
        speed.add(SimpleNamespace(events=[_event(0, 1, 2.0, 4), _event(3, 2, 3.0, 4) if row else _event(0, 1, 3.0, 4)]))
    assert speed.summary() == {
        "plain_tokens_per_s": pytest.approx(2.0),
        "decode_tokens_per_s": pytest.approx(11 / 5),
    }
    # One row goes on alone: 1 s a plain token, 1.5 s for three drafted ones.
    speed.add(SimpleNamespace(events=[_event(0, 1, 1.0, 1), _event(3, 3, 1.5, 1)]))
    assert speed and speed.summary() == {
        "plain_tokens_per_s": pytest.approx(15 / (11 * 0.5 + 4 * 1.0)),
        "decode_tokens_per_s": pytest.approx(15 / 7.5),
    }


def test_a_round_of_other_rows_is_priced_by_the_nearest_plain_round() -> None:
    """A tail of two rows takes almost as long as the batch did: by seconds a token it would seem four times as fast."""
    speed = RolloutSpeed()
    for row in range(8):
        speed.add(SimpleNamespace(events=[_event(0, 1, 2.0, 8), *([_event(3, 3, 1.75, 2)] if row < 2 else [])]))
    assert speed.summary()["plain_tokens_per_s"] == pytest.approx(14 / (2.0 + 3 * 2.0)), "three as of eight rows"
    speed.add(SimpleNamespace(events=[_event(0, 1, 1.0, 1)]))
    assert speed.summary()["plain_tokens_per_s"] == pytest.approx(15 / (2.0 + 3 * 1.0 + 1.0)), "one is nearer to two"


def test_without_a_plain_round_nothing_is_claimed() -> None:
    speed = RolloutSpeed()
    speed.add(SimpleNamespace(events=[_event(3, 2, 3.0, 4)]))
    assert speed.summary() == {"decode_tokens_per_s": pytest.approx(2 / 3), "plain_tokens_per_s": None}
