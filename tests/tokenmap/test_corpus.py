import gzip
import json

import pytest

from toolkit.jsonl import DataError
from toolkit.tokenmap.corpus import corpus_ids, read_texts, rollout_responses
from toolkit.tokenmap.token_map import TokenMapError


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def jsonl(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_only_response_tokens_of_the_training_split_are_counted(tmp_path):
    """Prompt tokens are never drafted; counting held-out answers would inflate the coverage measured on them."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "response_spans": [[1, 3], [5, 6]], "split": "train"},
        {"input_ids": [7, 8], "response_spans": [[0, 2]], "split": "held_out"},
        {"input_ids": [9, 9], "response_spans": [[1, 2]]},
    ]
    path = jsonl(tmp_path / "rollouts.jsonl", rows)
    assert list(rollout_responses(path)) == [[2, 3], [6], [9]]
    assert list(rollout_responses(path, split=None)) == [[2, 3], [6], [7, 8], [9]]
    assert list(rollout_responses(path, split="held_out")) == [[7, 8], [9]]


@pytest.mark.parametrize(
    "row, words",
    [
        ({"input_ids": [1, 2]}, "rollouts.jsonl:2: .*needs input_ids and response_spans"),
        ({"input_ids": [1, 2], "response_spans": [[1, 3]]}, "rollouts.jsonl:2: response span \\[1, 3\\) is outside"),
    ],
)
def test_a_bad_rollout_names_its_line(tmp_path, row, words):
    """Skipping the row would silently change the counts."""
    path = jsonl(tmp_path / "rollouts.jsonl", [{"input_ids": [], "response_spans": []}, row])
    with pytest.raises(TokenMapError, match=words):
        list(rollout_responses(path))


def test_a_torn_last_line_names_its_line(tmp_path):
    """A file that is still being written, or was cut by a kill, must not be counted as complete."""
    (tmp_path / "r.jsonl").write_text('{"input_ids": [1], "response_spans": []}\n{"input_ids": [1')
    with pytest.raises(DataError, match="r.jsonl:2: not valid JSON"):
        list(rollout_responses(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_each_kind_of_row(tmp_path, name):
    """OpenAI messages, ShareGPT and plain text rows are all read; only the answers of the first two are counted."""
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "two"}]},
        {"text": "three", "id": 4},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
    ]
    path = jsonl(tmp_path / name, rows)
    assert list(read_texts(path)) == ["one", "two", "three"]
    assert list(read_texts(path, roles=("user",))) == ["q", "q", "three"]


def test_a_json_list_of_rows(tmp_path):
    """ShareGPT dumps are one JSON list."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    assert list(read_texts(tmp_path / "a.json")) == ["one", "two"]
    (tmp_path / "b.json").write_text('{"text": "one"}')
    with pytest.raises(DataError, match="a list of rows"):
        list(read_texts(tmp_path / "b.json"))


@pytest.mark.parametrize("row", [{"score": 1}, {"messages": ["hi"]}, {"messages": [{"role": "user", "content": 5}]}])
def test_a_row_without_text_names_its_line(tmp_path, row):
    """A corpus with other field names must not silently count to zero."""
    with pytest.raises(TokenMapError, match="a.jsonl:1"):
        list(read_texts(jsonl(tmp_path / "a.jsonl", [row])))


def test_large_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, monkeypatch):
    """Cutting inside a word or dropping line ends would count tokens that are not in the text."""
    monkeypatch.setattr("toolkit.tokenmap.corpus.TEXT_CHARACTERS", 12)
    text = "first line\nsecond\n\nthird line here\nno end"
    (tmp_path / "a.txt").write_text(text)
    pieces = list(read_texts(tmp_path / "a.txt"))
    assert len(pieces) > 1 and "".join(pieces) == text and all(piece.endswith("\n") for piece in pieces[:-1])


def test_a_corpus_without_text_is_an_error(tmp_path):
    """From empty counts the map would keep the lowest ids, which are bytes and control tokens."""
    path = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "only a question"}]}])
    with pytest.raises(TokenMapError, match="no text found in .*roles: assistant"):
        list(corpus_ids([path], encode))


@pytest.mark.parametrize(
    "name, content",
    [("a.jsonl.gz", b"not gzip"), ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:-9]), ("a.txt", b"\xff\xfe\x00")],
)
def test_damaged_files_are_named(tmp_path, name, content):
    """A truncated download must not be counted as a corpus."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}:1: .*expected UTF-8 text"):
        list(corpus_ids([tmp_path / name], encode))
    with pytest.raises(DataError, match="does not exist"):
        list(corpus_ids([tmp_path / "absent.txt"], encode))
