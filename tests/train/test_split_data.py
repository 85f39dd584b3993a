"""Rollouts that a training cannot take as they are."""

from __future__ import annotations

import json
import logging

import pytest

from toolkit.data.jsonl import DataError
from toolkit.recipe import TrainSettings
from toolkit.target.load import Target
from toolkit.train.split_data import read_data

SETTINGS = TrainSettings(max_length=5000, global_batch=1)


def _write(path, *texts: list[int]) -> None:
    with path.open("w") as handle:
        for at, ids in enumerate(texts):
            row = {"id": str(at), "split": "train" if at else "held_out", "input_ids": ids}
            handle.write(json.dumps({**row, "response_spans": [[1, len(ids)]]}) + "\n")


def test_an_answer_longer_than_the_context(tiny_target, tmp_path, monkeypatch, caplog):
    """Positions behind it were never trained in the target: its features there mean nothing, or the table ends."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level("INFO")
    path = tmp_path / "rollouts.jsonl"
    _write(path, [5] * 9, [5] * (tiny_target.max_context + 7), [6] * 9)
    data = read_data(SETTINGS, path, tiny_target, seed=0)
    assert sorted(len(one.input_ids) for one in data.train) == [9, tiny_target.max_context]
    assert f"1 of 2 train rollouts were cut to the target's context, {tiny_target.max_context} ids" in caplog.text


def test_ids_the_target_has_no_rows_for(tiny_target, tmp_path):
    """Rollouts of another tokenizer: the embedding would fail deep in a forward, on a GPU with no message at all."""
    path = tmp_path / "rollouts.jsonl"
    _write(path, [5] * 9, [5, 6, tiny_target.vocab_size, 7])
    with pytest.raises(DataError, match=rf"rollout 1 has ids from 5 to {tiny_target.vocab_size}.*another tokenizer"):
        read_data(SETTINGS, path, tiny_target, seed=0)


def test_a_pad_id_without_a_row(tiny_target, tmp_path, monkeypatch):
    """Some tokenizers got a pad token that the model got no row for; padding is never read, but it is embedded."""
    path = tmp_path / "rollouts.jsonl"
    _write(path, [5] * 9, [6] * 9)
    monkeypatch.setattr(Target, "vocab_size", property(lambda self: 10))
    monkeypatch.setattr(type(tiny_target.tokenizer), "pad_token_id", property(lambda self: 11))
    monkeypatch.setitem(tiny_target.__dict__, "stop_ids", frozenset([8, 2]))
    assert read_data(SETTINGS, path, tiny_target, seed=0).pad_id == 2
