import gzip
import json
import random
from pathlib import Path

import pytest

from toolkit.jsonl import DataError
from toolkit.tokenmap import corpus as corpora
from toolkit.tokenmap import documents as documents_module
from toolkit.tokenmap.corpus import shards_of
from toolkit.tokenmap.documents import Document, documents_of, row_documents
from toolkit.tokenmap.token_map import TokenMapError


def read(path: Path, roles: tuple[str, ...] = ("assistant",)) -> list[Document]:
    """All documents of a file, over all its pieces."""
    return [one for shard in shards_of([path]) for piece in shard for one in documents_of(piece, roles)]


def texts(path: Path, roles: tuple[str, ...] = ("assistant",)) -> list[str]:
    return [str(one.content) for one in read(path, roles)]


def jsonl(path: Path, rows: list[dict]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_response_tokens_of_rollouts_are_counted_by_their_split(tmp_path):
    """Prompt tokens are never drafted; counting held-out answers would inflate the coverage measured on them."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "response_spans": [[1, 3], [5, 6]], "split": "train"},
        {"input_ids": [7, 8], "response_spans": [[0, 2]], "split": "held_out", "task": "math"},
        {"input_ids": [9, 9], "response_spans": [[1, 2]]},
    ]
    assert read(jsonl(tmp_path / "rollouts.jsonl", rows)) == [
        Document([2, 3]), Document([6]), Document([7, 8], "math", True), Document([9]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "row, words",
    [
        ({"input_ids": [1, 2]}, "r.jsonl:2: no text field among input_ids; .* or input_ids and response_spans"),
        ({"input_ids": [1, 2], "response_spans": [[1, 3]]}, "r.jsonl:2: response span \\[1, 3\\) is outside"),
        ({"score": 1}, "r.jsonl:2: no text field among score"),
        ({"text": "\ud83d"}, "r.jsonl:2: text is not valid unicode"),
    ],
)
def test_a_bad_row_names_its_line(tmp_path, row, words):
    """Skipping a row of the user's own file would silently change the counts."""
    path = jsonl(tmp_path / "r.jsonl", [{"text": "fine"}, row])
    with pytest.raises((DataError, TokenMapError), match=words):
        read(path)


def test_messages_are_read_as_those_of_prompts(tmp_path):
    """What prompts.sources takes was refused here, and what has no text ended in a traceback."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"from": None, "role": "assistant", "content": parts}]}
    assert texts(jsonl(tmp_path / "r.jsonl", [row])) == ["ab"]
    for message in ("hi", {"role": "user", "content": 5}, {"role": "assistant", "content": [{"type": "text"}]}):
        with pytest.raises(DataError, match="r.jsonl:1: a message"):
            read(jsonl(tmp_path / "r.jsonl", [{"messages": [message]}]))


def test_a_torn_last_line_names_its_line(tmp_path):
    """A file that is still being written, or was cut by a kill, must not be counted as complete."""
    (tmp_path / "r.jsonl").write_text('{"input_ids": [1], "response_spans": []}\n{"input_ids": [1')
    with pytest.raises(DataError, match="r.jsonl:2: not valid JSON"):
        read(tmp_path / "r.jsonl")


def test_lines_are_numbered_in_the_file_and_not_in_its_pieces(tmp_path, monkeypatch):
    """A process reads a piece from its middle; the error must still lead to the line."""
    monkeypatch.setattr(corpora, "SHARD_BYTES", 40)
    rows = [{"text": f"row {n}"} for n in range(20)]
    path = jsonl(tmp_path / "r.jsonl", [*rows, {"none": 1}])
    assert len(shards_of([path])) > 5
    with pytest.raises(TokenMapError, match="r.jsonl:21: no text field"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_each_kind_of_row(tmp_path, name):
    """Messages and plain text are read alike in every format; only answers are counted, by task."""
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one"}], "category": "math"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "two"}]},
        {"text": "three", "id": 4, "task": "code"},
        {"messages": [{"role": "tool", "content": "9"}, {"role": "assistant", "content": None}]},
    ]
    path = tmp_path / name
    if path.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows, _parquet_schema(pa)), path, row_group_size=3)
    else:
        jsonl(path, rows)
    assert read(path) == [Document("one", "math"), Document("two"), Document("three", "code")]
    assert texts(path, ("user",)) == ["q", "q", "three"]


def _parquet_schema(pa):
    turns = {
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "conversations": pa.list_(pa.struct({"from": pa.string(), "value": pa.string()})),
    }
    return pa.schema({**turns, "text": pa.string(), "id": pa.int64(), "category": pa.string(), "task": pa.string()})


def test_parquet_without_text_names_its_columns(tmp_path):
    """Only columns of text are read from the disk, but the error must say what there is."""
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(TokenMapError, match="a.parquet row group 0 row 0: no text field among body, id"):
        read(tmp_path / "a.parquet")


def test_a_json_list_of_rows(tmp_path):
    """ShareGPT dumps are one JSON list."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    assert texts(tmp_path / "a.json") == ["one", "two"]
    (tmp_path / "b.json").write_text('{"text": "one"}')
    with pytest.raises(DataError, match="a list of rows"):
        read(tmp_path / "b.json")


def test_bad_rows_of_a_dataset_are_handed_over():
    """Users cannot correct them, so the caller counts them; the rows around them are read."""
    bad: list[str] = []
    rows = [("row 0", {"text": "a"}), ("row 1", {"none": 1}), ("row 2", {"text": "b"})]
    found = list(row_documents(rows, (), lambda error: bad.append(str(error))))
    assert [one.content for one in found] == ["a", "b"] and len(bad) == 1 and bad[0].startswith("row 1: no text field")


@pytest.mark.parametrize("shard_bytes", [1, 30, 10**6])
def test_nothing_is_lost_where_text_is_cut(tmp_path, monkeypatch, shard_bytes):
    """Cutting inside a word, dropping line ends, or reading a line twice would count tokens that are not there."""
    monkeypatch.setattr(corpora, "SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(documents_module, "TEXT_CHARACTERS", 12)
    text = "first line\nsecond\n\nthird line here\n  indented é\n\nno end"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = texts(tmp_path / "a.txt")
    assert len(found) > 1 and "".join(found) == text and all(one.endswith("\n") for one in found[:-1])


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    """Editors write it first; it was counted as tokens, and made JSON unreadable."""
    text = {"a.jsonl": '{"text": "first"}', "a.json": '[{"text": "first"}]'}.get(name, "first")
    data = text.encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert texts(tmp_path / name) == ["first"]


def test_documents_end_at_the_best_place_in_reach(tmp_path, monkeypatch):
    """A safe line end, else any line end, else a blank, else anywhere: a file of one line must not fill the memory."""
    monkeypatch.setattr(documents_module, "TEXT_CHARACTERS", 4)
    monkeypatch.setattr(documents_module, "LONGEST", 4)
    (tmp_path / "a.txt").write_text("ab\n\ncd\nefgh\n\n\n\n\n\n\n\n\n\nabcdefg hijklmnopqrstuvwxyzABCDEFGH")
    found = texts(tmp_path / "a.txt")
    assert found == [
        "ab\n\ncd\n", "efgh\n", "\n\n\n\n", "\n\n\n\n", "\nabcdefg", " hijklmnopqrstuv", "wxyzABCDEFGH",
    ]  # fmt: skip


def test_gzip_gives_the_same_documents(tmp_path, monkeypatch):
    """A .gz comes line by line, plain text at once: where documents end must not depend on that."""
    monkeypatch.setattr(documents_module, "TEXT_CHARACTERS", 20)
    draw = random.Random(3)
    text = "".join(draw.choice(["a", "bc ", "\n", "\n\n", " d", "efghi\n"]) for _ in range(5000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert texts(tmp_path / "a.txt") == texts(tmp_path / "a.txt.gz")


@pytest.mark.parametrize(
    "name, content",
    [("a.jsonl.gz", b"not gzip"), ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:-9]), ("a.txt", b"\xff\xfe\x00")],
)
def test_damaged_files_are_named(tmp_path, name, content):
    """A truncated download must not be counted as a corpus."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}:1: .*expected UTF-8 text"):
        read(tmp_path / name)
