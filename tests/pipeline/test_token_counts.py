"""Counts of corpora: those of one pass over their texts, whatever the format and the number of processes."""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.jsonl import DataError
from toolkit.pipeline import token_counts
from toolkit.pipeline.token_counts import count_corpora, count_rollouts, documents_of, files_of
from toolkit.targets.target import Target
from toolkit.tokenmap.counts import Corpus, CorpusCounts, Counts, parse_corpora
from toolkit.tokenmap.token_map import TokenMapError

WORDS = ["the", " quick", " fox", "\n", "\n\n", "  12", " rivers,", "\n    if x:", " é", "\u3000", "trains\n"]


def some_text(seed: int, words: int = 1500) -> str:
    return "".join(random.Random(seed).choices(WORDS, k=words)) + " end\n"


@pytest.fixture(autouse=True)
def small_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(token_counts, "TEXT_CHARACTERS", 100)
    monkeypatch.setattr(token_counts, "BATCH", 8)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def count(tiny_target: Target) -> Callable[..., tuple[CorpusCounts, ...]]:
    def call(*specs: str, held_out: tuple[str, ...] = (), num_proc: int = 1, roles=("assistant",)):
        given = parse_corpora(specs), parse_corpora(held_out)
        return count_corpora(*given, tiny_target.tokenizer, roles, tiny_target.vocab_size, Path("cache"), num_proc)

    return call


@pytest.fixture
def expected(tiny_target: Target) -> Callable[[str], torch.Tensor]:
    """Counts of a text that is encoded at once."""

    def call(text: str) -> torch.Tensor:
        ids = tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.from_numpy(np.bincount(ids, minlength=tiny_target.vocab_size))

    return call


def jsonl(path: str, rows: list[dict]) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    Path(path).write_bytes(gzip.compress(data) if path.endswith(".gz") else data)
    return path


def texts(path: str, roles: tuple[str, ...] = ("assistant",)) -> list:
    return [one["ids"] if one["text"] is None else one["text"] for one in documents_of(path, roles)]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_every_format_has_the_counts_of_its_text(count, expected, num_proc) -> None:
    """A byte order mark is no text; a text is cut into documents only where the cut changes no token."""
    import pyarrow as pa
    from pyarrow import parquet

    text = some_text(1)
    rows = [{"text": part} for part in text.split("\n\n")]
    Path("a.txt").write_bytes(text.encode("utf-8-sig"))
    Path("a.md.gz").write_bytes(gzip.compress(text.encode()))
    jsonl("a.jsonl", rows)
    jsonl("a.jsonl.gz", rows)
    Path("a.json").write_text(json.dumps(rows), encoding="utf-8-sig")
    parquet.write_table(pa.Table.from_pylist(rows), "a.parquet", row_group_size=7)
    whole, of_rows = expected(text), sum(expected(row["text"]) for row in rows)
    names = ("a.txt", "a.md.gz", "a.jsonl", "a.jsonl.gz", "a.json", "a.parquet")
    for one in count(*names, num_proc=num_proc):
        wanted = whole if one.corpus.spec in names[:2] else of_rows
        assert torch.equal(one.ranked_counts(), wanted), one.corpus.spec
        assert one.documents > 10
    assert "".join(texts("a.txt")) == text == "".join(texts("a.md.gz"))


def test_each_kind_of_row(count) -> None:
    """Only the answers of conversations are counted, by task; of rollouts the response ids, by their split."""
    parts = [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}]
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}], "category": "math"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "two"}]},
        {"text": "three", "id": 4, "task": "code"},
        {"messages": [{"role": "tool", "content": "9"}, {"role": "assistant", "content": None}]},
        {"input_ids": [1, 2, 3, 4, 5, 6], "response_spans": [[1, 3], [5, 6]], "split": "train"},
        {"input_ids": [7, 8], "response_spans": [[0, 2]], "split": "held_out", "task": "math"},
    ]
    assert texts(jsonl("a.jsonl", rows)) == ["one", "two", "three", [2, 3], [6], [7, 8]]
    assert texts("a.jsonl", ("user",))[:3] == ["q", "q", "three"]
    (one,) = count("a.jsonl")
    assert one.documents == 6 and one.held_out_counts().nonzero().flatten().tolist() == [7, 8]
    assert one.by_task().keys() == {"math", "code"} and (one.ranked_counts()[[2, 3, 6]] >= 1).all()


def test_rollouts_are_counted_in_this_process(tiny_target) -> None:
    rows = [{"input_ids": [1, 2, 2], "response_spans": [[0, 3]]} for _ in range(20)]
    jsonl("r.jsonl", [*rows, {"input_ids": [3], "response_spans": [[0, 1]], "split": "held_out"}])
    one = count_rollouts(Path("r.jsonl"), tiny_target.vocab_size)
    assert one.ranked_counts()[:4].tolist() == [0, 20, 40, 0] and one.held_out_counts()[3] == 1 and one.documents == 21
    with pytest.raises(TokenMapError, match="target's own tokenizer"):
        count_rollouts(Path("r.jsonl"), 3)


def test_many_tasks_are_none(count, expected) -> None:
    """An id in a field `task` would make a table of millions of rows."""
    jsonl("a.jsonl", [{"text": "rivers", "task": f"task {n}"} for n in range(70)])
    (one,) = count("a.jsonl")
    assert not one.by_task() and torch.equal(one.ranked_counts(), 70 * expected("rivers"))


@pytest.mark.parametrize(
    "row, words",
    [
        ({"input_ids": [1, 2], "response_spans": [[1, 3]]}, "r.jsonl:2: response span \\[1, 3\\) is outside"),
        ({"score": 1}, "r.jsonl:2: no text field among score"),
        ({"text": "\ud83d"}, "r.jsonl:2: text is not valid unicode"),
        ({"messages": ["hi"]}, "r.jsonl:2: a message"),
        (None, "no text found in r.jsonl .roles: assistant."),
    ],
)
def test_a_bad_row_names_its_line(count, row, words) -> None:
    """Skipping a row of the user's own file would silently change the counts."""
    jsonl("r.jsonl", [{"text": "fine"}, row] if row else [{"messages": [{"role": "user", "content": "q"}]}])
    with pytest.raises((DataError, TokenMapError), match=words):
        count("r.jsonl")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("r.jsonl", b'{"text": "a"}\n{"text": "b', "r.jsonl:2: not valid JSON"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz:1: .*expected UTF-8 text"),
        ("a.parquet", b"PAR1", "a.parquet: cannot be read"),
        ("b.json", b'{"text": "one"}', "a list of rows"),
    ],
)
def test_damaged_files_are_named(count, name, content, words) -> None:
    """A truncated download must not be counted as a corpus."""
    Path(name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        count(name)


def test_only_what_changed_is_counted_again(count, expected, monkeypatch) -> None:
    """Counts of an older file, tokenizer or roles would be silently wrong; another weight changes nothing."""
    read = []
    own = token_counts.read_lines
    monkeypatch.setattr(token_counts, "read_lines", lambda path: read.append(path.name) or own(path))
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(some_text(1), encoding="utf-8")
    count("a.txt")
    assert count("a.txt:7", "b.txt")[0].corpus.weight == 7 and read == ["a.txt", "b.txt"]
    Path("a.txt").write_text(some_text(2), encoding="utf-8")
    (one,) = count("a.txt")
    assert read == ["a.txt", "b.txt", "a.txt"] and torch.equal(one.ranked_counts(), expected(some_text(2)))


def test_datasets(count, expected, monkeypatch, caplog) -> None:
    """Rows without text, which users cannot correct, are skipped and named; a dataset of none is refused early."""
    datasets = pytest.importorskip("datasets")

    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(Path("hub").resolve()))
    rows = [{"text": f"the fox {n}" if n % 5 else None, "task": "even" if n % 2 else "odd"} for n in range(40)]
    Path("files").mkdir()
    jsonl("files/train-0.jsonl", rows[:30])
    jsonl("files/train-1.jsonl", rows[30:])
    datasets.Dataset.from_list(rows).save_to_disk("saved")
    datasets.Dataset.from_list([{"image": n} for n in range(200)]).save_to_disk("images")
    wanted = sum(expected(row["text"]) for row in rows if row["text"])
    for spec in (f"hub:{Path('files').resolve()}:train", "saved"):
        (one,) = count(spec, num_proc=2)
        assert (
            torch.equal(one.ranked_counts(), wanted) and one.documents == 32 and set(one.by_task()) == {"even", "odd"}
        )
        assert f"{spec}: 8 of 40 rows were skipped; the first: {spec} row 0" in caplog.text
    with pytest.raises(DataError, match="none of the first 100 rows holds a text: images row 99"):
        count("images")


def test_held_out_text_is_not_ranked(count, expected, tiny_target) -> None:
    """Held-out text measures the map, so no token of it may be counted, under any spelling of its path."""
    Path("a.txt").write_text("fox")
    Path("h.txt").write_text("rivers")
    counts = Counts(count("a.txt", held_out=("h.txt:2",)), {"vocab_size": tiny_target.vocab_size, "forced_ids": []})
    assert torch.equal(counts.total(), expected("fox"))
    assert torch.equal(counts.held_out_counts(), 2 * expected("rivers"))
    for spec in ("*.*", str(Path("h.txt").resolve())):
        with pytest.raises(TokenMapError, match="h.txt is counted and held out as well"):
            count("a.txt", spec, held_out=("h.txt",))


def test_weights_of_specs() -> None:
    """An existing path that ends like a weight is a path; weights of one corpus add up."""
    Path("odd:3").write_text("x")
    assert parse_corpora(["odd:3", "a:2", "hub:o/n:train", "a"]) == [
        Corpus("odd:3"), Corpus("a", 3), Corpus("hub:o/n:train"),
    ]  # fmt: skip
    for text in ("a:0", "a:1.5", "a:-2"):
        with pytest.raises(TokenMapError, match="whole number from 1"):
            Corpus.parse(text)


def test_files_of_a_folder_and_a_glob() -> None:
    """Hidden files and other kinds are left out of a folder."""
    for name in ("d/b.txt", "d/e/a.jsonl.gz", "d/.git/x.txt", "d/x.bin", "d/c.parquet"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    assert [str(one) for one in files_of("d")] == ["d/b.txt", "d/c.parquet", "d/e/a.jsonl.gz"]
    assert [str(one) for one in files_of("d/*.bin")] == ["d/x.bin"]
    for spec, words in (("none/*", "does not exist"), ("d/.git/none", "does not exist")):
        with pytest.raises(DataError, match=words):
            files_of(spec)
