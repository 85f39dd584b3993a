"""Rollouts that a training cannot take as they are."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from toolkit.jsonl import DataError
from toolkit.train.training_data import _pad_id, read_data
from toolkit.train_settings import DataSettings, TrainSettings

SETTINGS = TrainSettings(data=DataSettings(max_length=5000, global_batch=1))


def _write(path, *texts: list[int]) -> None:
    with path.open("w") as handle:
        for at, ids in enumerate(texts):
            row = {"id": str(at), "split": "train" if at else "held_out", "input_ids": ids}
            handle.write(json.dumps({**row, "response_spans": [[1, len(ids)]]}) + "\n")


def test_an_answer_longer_than_the_context(tiny_target, tmp_path, monkeypatch, caplog):
    """The target was not trained on positions past its context: features there are useless, or indexing fails."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level("INFO")
    path = tmp_path / "rollouts.jsonl"
    _write(path, [5] * 9, [5] * (tiny_target.max_context + 7), [6] * 9)
    data = read_data(SETTINGS, path, tiny_target, seed=0)
    assert sorted(len(one.input_ids) for one in data.train) == [9, tiny_target.max_context]
    assert f"1 train rollouts are longer than {tiny_target.max_context} ids" in caplog.text


def test_prompts_are_supervised_where_asked(tiny_target, tmp_path):
    """Held-out rollouts are judged by their answers under either setting, or forecasts would not be comparable."""
    path = tmp_path / "rollouts.jsonl"
    with path.open("w") as handle:
        for at, split in enumerate(("held_out", "train")):
            row = {"id": str(at), "split": split, "input_ids": [5, 6, 7, 8, 9, 10], "response_spans": [[3, 5]]}
            handle.write(json.dumps(row) + "\n")

    def supervised(choice):
        settings = replace(SETTINGS, data=replace(SETTINGS.data, supervise=choice))
        data = read_data(settings, path, tiny_target, seed=0)
        return data.train[0].response, data.train[0].greedy, data.held_out[0].response.tolist()

    answer = [False, False, False, True, True, False]
    assert supervised("answers") == (answer, False, [answer])
    assert supervised("all") == ([True] * 6, False, [answer])


def test_ids_the_target_has_no_rows_for(tiny_target, tmp_path):
    """Rollouts of another tokenizer: the embedding would fail deep in a forward, on a GPU with no message at all."""
    path = tmp_path / "rollouts.jsonl"
    _write(path, [5] * 9, [5, 6, tiny_target.vocab_size, 7])
    with pytest.raises(DataError, match=rf"rollout 1 has ids from 5 to {tiny_target.vocab_size}.*another tokenizer"):
        read_data(SETTINGS, path, tiny_target, seed=0)


def test_a_pad_id_without_a_row():
    """Some tokenizers got a pad token that the model got no row for; padding is never read, but it is embedded."""

    def chosen(pad_id):
        tokenizer = SimpleNamespace(pad_token_id=pad_id)
        return _pad_id(SimpleNamespace(tokenizer=tokenizer, vocab_size=10, stop_ids=frozenset([8, 2])))

    assert [chosen(pad_id) for pad_id in (9, 10, None)] == [9, 2, 2]
