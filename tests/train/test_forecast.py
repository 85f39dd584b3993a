"""The forecast counts verify steps the way an engine takes them."""

from __future__ import annotations

import pytest
import torch

from toolkit.bench.bootstrap import summarise_replays
from toolkit.train.forecast import chain_depths, replay


def test_replay_by_hand():
    """root 2 reads A0 (position 3): accepts 2 (A1, A2), bonus A3; root 5 reads A3: accepts 0, bonus A4; root 6
    reads A4: one token (E) is left, accepted 0, bonus E at position 8: a whole step. Three steps, 3 + 1 + 1 tokens."""
    #          p  p  p  A0 A1 A2 A3 A4 E
    response = [False] * 3 + [True] * 6
    depth = [0, 0, 2, 9, 9, 0, 0, 0, 0]
    assert replay(depth, response) == [2, 0, 0]


def test_a_step_cut_by_the_end_is_left_out():
    """The draft of E is right, so the bonus token lies past the end: the engine cuts that step, and so do we."""
    response = [False] * 3 + [True] * 4
    assert replay([0, 0, 0, 2, 0, 0, 0], response) == [0]


def test_turns_are_replayed_apart():
    response = [False, False, True, True, True, False, False, True, True, True]
    assert replay([0] * 10, response) == [0, 0, 0, 0]


def test_an_answer_of_one_token_has_no_verify_step():
    assert replay([0, 0, 0], [False, True, False]) == []


def test_chain_depths_stop_at_the_first_miss():
    """A hit after a miss is unreachable for a chain."""
    roots = [torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]), torch.tensor([0, 1])]
    hits = [torch.tensor([True, False, True]), torch.tensor([True, True, True]), torch.tensor([True, True])]
    # root 0 has no supervised step 0; root 1 hits all three; root 2 misses first; root 3 has only step 0.
    assert chain_depths(hits, roots, 5).tolist() == [-1, 3, 0, 1, -1]


def test_summary():
    forecast = summarise_replays([[2, 0], [1, 1, 0]], num_steps=2)
    assert forecast.accept_length == pytest.approx((3 + 1 + 2 + 2 + 1) / 5)
    assert forecast.accept_rate == [3 / 5, 1 / 3]
    assert forecast.verify_steps == 5
    assert forecast.interval[0] <= forecast.accept_length <= forecast.interval[1]


def test_what_no_step_reached_is_unknown():
    """A depth that no step reached has no rate, and no steps have no length: 0 or NaN would be drawn and compared."""
    forecast = summarise_replays([[0, 0], [0]], num_steps=3)
    assert forecast.accept_rate == [0.0, None, None] and forecast.accept_length == 1.0
    nothing = summarise_replays([[], []], num_steps=3)
    assert nothing.accept_length is None and nothing.interval is None and nothing.verify_steps == 0
