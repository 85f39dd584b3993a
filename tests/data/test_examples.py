"""Examples from rollouts are sorted by id, truncated instead of dropped, and read on access."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from toolkit.data.batches import Example
from toolkit.data.examples import load_examples
from toolkit.jsonl import DataError


def row(identity: str, split: str, ids: list[int], spans: list[list[int]]) -> dict[str, object]:
    return {"id": identity, "split": split, "input_ids": ids, "response_spans": spans}


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_examples_keep_their_ids_and_are_cut_not_dropped(tmp_path: Path, caplog) -> None:
    """A long rollout keeps its beginning. One without supervised ids, such as a text that a base model continues after
    `max_length`, is not counted as data, and its number is told."""
    path = write(
        tmp_path / "rollouts.jsonl",
        [
            row("a", "train", [1, 2, 3, 4, 5, 6], [[2, 6]]),
            row("b", "held_out", [1, 2, 3], [[1, 3]]),
            row("c", "train", [1, 2, 3, 4, 5, 6], [[4, 6]]),
        ],
    )
    examples, cut = load_examples(path, "train", 4)
    assert list(examples) == [Example("a", [1, 2, 3, 4], [False, False, True, True])] and cut == 2
    assert "skipped 1 train rollouts without supervised ids within 4 ids" in caplog.text
    assert load_examples(path, "held_out", 4)[1] == 0


@pytest.mark.parametrize(
    ("max_length", "kept", "warning"),
    [
        (10, 10, None),
        (9, 6, "1 were cut at the end of a turn, 0 within their first answer; 2 response ids"),
        (5, 5, "0 were cut at the end of a turn, 1 within their first answer; 3 response ids"),
    ],
)
def test_long_conversations_end_at_a_turn(
    tmp_path: Path, caplog, max_length: int, kept: int, warning: str | None
) -> None:
    """Otherwise the end of an answer, or a whole conversation, would be lost without a warning."""
    row = {"id": "a", "split": "train", "input_ids": list(range(10)), "response_spans": [[2, 6], [8, 10]]}
    (example,), cut = load_examples(write(tmp_path / "r.jsonl", [row]), "train", max_length)
    assert len(example.input_ids) == len(example.response) == kept and cut == (warning is not None)
    assert (warning in caplog.text) if warning else not caplog.text


def test_an_answer_by_this_target_at_temperature_0_is_greedy(tmp_path: Path) -> None:
    """Its ids are taken as the target's argmax. A server's engine rounds in another way."""
    by = {"target": "t", "temperature": 0}
    for provenance, greedy in ((by, True), (by | {"temperature": 1}, False), (by | {"server": {"model": "t"}}, False)):
        one = row("a", "train", [1, 2, 3, 4], [[1, 4]]) | {"provenance": provenance}
        examples, _ = load_examples(write(tmp_path / "r.jsonl", [one]), "train", 8, "t")
        assert examples[0].greedy == greedy


def test_examples_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    """The order in the file depends on the batch size of the rollouts, which must not change the training."""
    rows = [row(name, "train", [1, 2, 3, 4], [[1, 4]]) for name in ("b", "c", "a")]
    examples, _ = load_examples(write(tmp_path / "r.jsonl", rows), "train", 8)
    assert [example.id for example in examples] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"id": "x", "split": "train"}, "input_ids, response_spans"),
        (row("x", "train", [1, 2], [[1, 3]]), "outside"),
        (row("x", "held_out", [1, 2, 3], [[1, 3]]), "no usable 'train'"),
    ],
)
def test_unusable_rollouts_are_refused(tmp_path: Path, bad: dict[str, object], message: str) -> None:
    """A wrong file must not become an empty or shifted data set."""
    with pytest.raises(DataError, match=message):
        load_examples(write(tmp_path / "r.jsonl", [bad]), "train", 16)


def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    """A corpus larger than memory: 120,000 ids would take 5 MB as lists."""
    path = tmp_path / "rollouts.jsonl"
    with path.open("w") as handle:
        for at in range(60):
            handle.write(json.dumps(row(str(at), "train", list(range(1000, 3000)), [[500, 2000]])) + "\n")
    tracemalloc.start()
    examples, _ = load_examples(path, "train", 2000)
    read = sum(len(example.input_ids) for example in examples)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == sum(examples.lengths) == 120_000 and peak < 4 * read


def test_examples_are_found_again_and_no_others(tmp_path: Path) -> None:
    """Characters of several bytes, empty lines and appended rows must not shift the reading. A row that changed, even
    with the same id and length, must be refused, since it was not checked."""
    rows = [row(name, "train", [1, 2, 3, 4 + at], [[1, 4]]) | {"said": "東京"} for at, name in enumerate("cab")]
    path = tmp_path / "r.jsonl"
    path.write_text("\n\n".join(json.dumps(one, ensure_ascii=False) for one in rows) + "\n")
    examples, _ = load_examples(path, "train", 8)
    with path.open("a") as handle:
        handle.write(json.dumps(row("aa", "train", [1, 2, 3], [[1, 3]])) + "\n")
    assert [(one.id, one.input_ids[3], one.response[0]) for one in examples] == [("a", 5, 0), ("b", 6, 0), ("c", 4, 0)]
    path.write_text(path.read_text().replace("3, 5]", "3, 9]"))
    assert examples[1].input_ids == [1, 2, 3, 6]
    with pytest.raises(DataError, match="r.jsonl:3 was changed while the file was in use"):
        examples[0]
    path.unlink()
    with pytest.raises(DataError, match="r.jsonl does not exist"):
        examples[1]
    with pytest.raises(DataError, match="gzipped.*gunzip"):
        load_examples(tmp_path / "r.jsonl.gz", "train", 8)
