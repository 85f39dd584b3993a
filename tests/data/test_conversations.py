"""All forms of prompt files give the same conversations, and errors name file and line of an invalid row."""

from __future__ import annotations

import gzip
import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.conversations import Conversation, read_conversations, user_turns, write_conversations
from toolkit.jsonl import DataError, RowAppender, read_rows

SHAREGPT = {
    "id": "s1",
    "conversations": [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi?"},
        {"from": "gpt", "value": "Yes."},
        {"from": "user", "value": "And?"},
    ],
}
PARTS = [{"type": "text", "text": "Hi?"}]
OPENAI = {"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": ""}]}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["One.", "Two."], "prompt": "ignored beside turns"}
PROMPT = {"prompt": "Only this."}
ROWS = [SHAREGPT, OPENAI, MT_BENCH, PROMPT]


def write(path: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress((json.dumps(rows) if ".json" in path.suffixes else text).encode()))
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else text)
    return path


@pytest.mark.parametrize("name", ["mixed.jsonl", "mixed.json.gz"])
def test_every_form_in_every_container(tmp_path: Path, name: str) -> None:
    """ShareGPT's names and OpenAI's must become the same roles, and MT-bench's turns the user's messages."""
    read = read_conversations(write(tmp_path / name, ROWS))
    assert [[message["role"] for message in one.messages] for one in read] == [
        ["system", "user", "assistant", "user"],
        ["user", "assistant"],
        ["user", "user"],
        ["user"],
    ]
    assert read[0].id == "s1" and read[2].id == "mixed-81" and len({one.id for one in read}) == 4
    assert read[1].messages[0]["content"] == "Hi?"
    assert [message["content"] for message in user_turns(read[0]).messages] == ["Be kind.", "Hi?", "And?"]


def test_bad_rows_are_named(tmp_path: Path) -> None:
    """Skipping the row would silently lose data."""
    for row, message in (
        ({"body": "x"}, "keys are body; expected one of conversations"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "none of the 1 messages is a user message"),
        ({"messages": [{"role": "user", "content": None}]}, "content is missing; expected a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"prompt": "\ud83d"}, "content is not valid unicode"),
        ([1], "is a list; expected a JSON object"),
    ):
        path = write(tmp_path / "bad.jsonl", [PROMPT, row])
        with pytest.raises(DataError, match=message) as caught:
            read_conversations(path)
        assert f"{path}:2" in str(caught.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    """A missing, truncated or wrongly encoded file, or one of another kind, must not be read as empty."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": ')
    zipped = write(tmp_path / "cut.jsonl.gz", ROWS * 50)
    zipped.write_bytes(zipped.read_bytes()[:-20])
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (tmp_path / "text.txt").write_text("hello")
    for name, message in [
        ("broken.jsonl", r"broken.jsonl:2: not valid JSON"),
        ("cut.jsonl.gz", "copy the file again"),
        ("latin.jsonl", "UTF-8"),
        ("text.txt", "expected .jsonl, .jsonl.gz, .json"),
        ("absent.jsonl", "does not exist"),
    ]:
        with pytest.raises(DataError, match=message):
            read_conversations(tmp_path / name)


@pytest.mark.parametrize("name", ["many.jsonl", "many.json"])
def test_limit_takes_the_first_or_a_seeded_sample(tmp_path: Path, name: str) -> None:
    """A recipe with a limit must give the same prompts in every version, compressed or not."""
    path = write(tmp_path / name, [{"prompt": f"question {i}"} for i in range(50)])
    assert [one.id for one in read_conversations(path, limit=3)] == ["many-0", "many-1", "many-2"]
    sample = read_conversations(path, limit=10, seed=1)
    chosen = [4, 16, 21, 22, 25, 27, 30, 40, 42, 48]
    assert sample.ids == [f"many-{i}" for i in chosen]
    assert [one.messages[0]["content"] for one in sample] == [f"question {i}" for i in chosen]
    assert sample.ids != read_conversations(path, limit=10, seed=2).ids
    assert len(read_conversations(path, limit=60, seed=1)) == 50


@pytest.mark.parametrize("name, limit", [("long.jsonl", None), ("long.jsonl.gz", 9)])
def test_memory_does_not_grow_with_the_messages(tmp_path: Path, name: str, limit: int | None) -> None:
    """For a file larger than memory, here 8 MB of text, only the ids, a sample and the current row may be held."""
    path = write(tmp_path / name, [{"prompt": f"{i} " * 7000} for i in range(300)])
    tracemalloc.start()
    read = read_conversations([path], limit=limit, seed=None if limit is None else 3)
    total = sum(len(one.messages[0]["content"]) for one in read)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(read) == (limit or 300) and total > 14_000 * len(read) and peak < 1_000_000


def test_several_sources_take_turns_and_keep_ids_apart(tmp_path: Path) -> None:
    """A limit must not be used up by the first file, and equal ids must not overwrite each other's rollouts."""
    one = write(tmp_path / "one.jsonl", [{"id": name, "prompt": name} for name in "abc"])
    two = write(tmp_path / "two.jsonl", [{"id": "a", "prompt": "4"}])
    assert [c.id for c in read_conversations([one, two], limit=3)] == ["a", "a#2", "b"]


def test_written_conversations_are_read_again(tmp_path: Path) -> None:
    """The prompts stage writes what the rollouts stage reads."""
    conversations = [Conversation("a", ({"role": "user", "content": "naïve 東京\n\u2028?"},))]
    assert write_conversations(tmp_path / "p.jsonl", conversations, {"a": {"source": "test"}}) == 1
    assert list(read_conversations(tmp_path / "p.jsonl")) == conversations
    assert next(read_rows(tmp_path / "p.jsonl"))[1]["provenance"] == {"source": "test"}


@pytest.mark.parametrize("limit, seed", [(None, None), (2, 5)])
def test_datasets_from_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, seed: int | None
) -> None:
    """`hub:` and directories are read through `datasets`; a local path replaces the hub, also for streaming."""
    datasets = pytest.importorskip("datasets")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"question {i}"} for i in range(5)]
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / "train.jsonl", rows)
    for source in (f"hub:{folder}:train", str(folder)):
        read = read_conversations(source, limit=limit, seed=seed)
        assert len(read) == len({one.messages[0]["content"] for one in read}) == (limit or 5)
    with pytest.raises(DataError, match="split 'nope'"):
        read_conversations(f"hub:{folder}:nope")


@pytest.mark.parametrize("limit, kept", [(None, ["q0", "q3", "q4"]), (2, ["q0", "q3"])])
def test_rows_of_a_dataset_that_hold_no_conversation_are_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: int | None,
    kept: list[str],
) -> None:
    """Some rows of hub datasets have empty conversations or other roles, and users cannot remove them."""
    datasets = pytest.importorskip("datasets")

    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "files").mkdir()
    texts = [[("human", "q0")], [], [("bing", "q2")], [("human", "q3")], [("human", "q4")]]
    rows = [
        {"id": f"c{at}", "conversations": [{"from": a, "value": b} for a, b in row]} for at, row in enumerate(texts)
    ]
    # Arrow gives every message all keys of the others, null where it has none.
    rows[4]["conversations"] = [{"role": "user", "content": "q4"}]
    write(tmp_path / "files" / "train.jsonl", rows)
    read = read_conversations(f"hub:{tmp_path / 'files'}", limit=limit)
    assert [one.messages[0]["content"] for one in read] == kept and read.ids == [f"c{name[1]}" for name in kept]
    assert f"2 of {5 if limit is None else 4} rows were skipped; the first: " in caplog.text
    assert "row 1: none of the 0 messages is a user message" in caplog.text
    if limit is not None:  # the limit counts conversations, not rows, also of a sample
        sample = read_conversations(tmp_path / "files", limit=limit, seed=1)
        assert len({one.messages[0]["content"] for one in sample}) == limit
    with pytest.raises(DataError, match="none of the 0 messages"):
        read_conversations(tmp_path / "files" / "train.jsonl", limit=limit)


def test_a_torn_line_is_cut_before_the_next_row(tmp_path: Path) -> None:
    """Appending to an incomplete line would corrupt two rows and make every later reader fail."""
    path = tmp_path / "rows.jsonl"
    for torn in ('{"a": 1}\n{"b": ', '{"a": 1}\n' + '{"b": "' + "x" * 200_000, '{"a": 1}\n'):
        path.write_text(torn)
        with RowAppender(path) as rows:
            rows.append({"c": "東"})
        assert [row for _, row in read_rows(path)] == [{"a": 1}, {"c": "東"}]
    path.write_text("torn from the first byte")
    with RowAppender(path) as rows:
        rows.append({"c": 3})
    assert [row for _, row in read_rows(path)] == [{"c": 3}]
