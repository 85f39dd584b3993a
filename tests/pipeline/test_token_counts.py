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
from toolkit.tokenmap.counts import Counts, parse_corpora
from toolkit.tokenmap.token_map import TokenMapError

WORDS = ["the", " quick", " fox", " rivers,", " é", "\u3000", " trains.\n"]


@pytest.fixture(autouse=True)
def small_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(token_counts, "TEXT_CHARACTERS", 100)
    monkeypatch.setattr(token_counts, "BATCH", 8)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def count(tiny_target: Target) -> Callable[..., Counts]:
    def call(*specs: str, held_out: tuple[str, ...] = (), num_proc: int = 1) -> Counts:
        given = parse_corpora(specs), parse_corpora(held_out)
        size = tiny_target.vocab_size
        parts = count_corpora(*given, tiny_target.tokenizer, ("assistant",), size, Path("cache"), num_proc)
        return Counts(tuple(parts), {"vocab_size": size, "forced_ids": []})

    return call


@pytest.fixture
def expected(tiny_target: Target) -> Callable[..., torch.Tensor]:
    """Counts of texts, each of which is encoded at once."""

    def call(*texts: str) -> torch.Tensor:
        ids = [one for text in texts for one in tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"]]
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
    """A byte order mark is no text."""
    import pyarrow as pa
    from pyarrow import parquet

    text = "".join(random.Random(1).choices(WORDS, k=1500)) + " end\n"
    rows = [{"text": part} for part in text.split("\n")]
    Path("a.txt").write_bytes(text.encode("utf-8-sig"))
    Path("a.md.gz").write_bytes(gzip.compress(text.encode()))
    jsonl("a.jsonl.gz", rows)
    Path("a.json").write_text(json.dumps(rows), encoding="utf-8-sig")
    parquet.write_table(pa.Table.from_pylist(rows), "a.parquet", row_group_size=7)
    assert "".join(texts("a.txt")) == text == "".join(texts("a.md.gz")) and len(texts("a.txt")) > 10
    of_text, of_rows = expected(*texts("a.txt")), expected(*(row["text"] for row in rows))
    parts = count("a.txt", "a.md.gz", "a.jsonl.gz", "a.json", "a.parquet", num_proc=num_proc).parts
    for one, wanted in zip(parts, (of_text, of_text, of_rows, of_rows, of_rows), strict=True):
        assert torch.equal(one.counts, wanted), one.spec


def test_each_kind_of_row(count) -> None:
    """Only the answers of conversations are counted, by task; of rollouts the response ids, by their split."""
    parts = [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}]
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}], "category": "math"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "two"}]},
        {"text": "three", "id": 4, "task": "code"},
        {"messages": [{"role": "tool", "content": "9"}, {"role": "assistant", "content": None}]},
        {"turns": ["four", "five"]},
        {"prompt": [{"role": "user", "content": "six"}]},
        {"input_ids": [1, 2, 3, 4, 5, 6], "response_spans": [[1, 3], [5, 6]], "split": "train"},
        {"input_ids": [7, 8], "response_spans": [[0, 2]], "split": "held_out", "task": "math"},
    ]
    assert texts(jsonl("a.jsonl", rows)) == ["one", "two", "three", [2, 3], [6], [7, 8]]
    assert texts("a.jsonl", ("user",))[:6] == ["q", "q", "three", "four", "five", "six"]
    counts = count("a.jsonl")
    assert [(one.held_out, one.task) for one in counts.parts] == [
        (False, ""), (False, "code"), (False, "math"), (True, "math"),
    ]  # fmt: skip
    assert counts.total(held_out=True).nonzero().flatten().tolist() == [7, 8]
    assert (counts.total()[[2, 3, 6]] >= 1).all()


def test_rollouts_are_counted_in_this_process(tiny_target) -> None:
    rows = [{"input_ids": [1, 2, 2], "response_spans": [[0, 3]]} for _ in range(20)]
    jsonl("r.jsonl", [*rows, {"input_ids": [3], "response_spans": [[0, 1]], "split": "held_out"}])
    ranked, held_out = count_rollouts(Path("r.jsonl"), tiny_target.vocab_size)
    assert ranked.counts[:4].tolist() == [0, 20, 40, 0] and held_out.held_out and held_out.counts[3] == 1
    with pytest.raises(TokenMapError, match="target's own tokenizer"):
        count_rollouts(Path("r.jsonl"), 3)


def test_many_tasks_are_none(count, expected) -> None:
    """An id in a field `task` would make a table of millions of rows."""
    jsonl("a.jsonl", [{"text": "rivers", "task": f"task {n}"} for n in range(80)])
    (one,) = count("a.jsonl").parts
    assert not one.task and torch.equal(one.counts, 80 * expected("rivers"))


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("r.jsonl", b'{"input_ids": [1, 2], "response_spans": [[1, 3]]}', r"r.jsonl:1: response span \[1, 3\) is"),
        ("r.jsonl", b'{"text": "a"}\n{"score": 1}', "r.jsonl:2: no text field among score"),
        ("r.jsonl", b'{"text": "\\ud83d"}', "r.jsonl:1: text is not valid unicode"),
        ("r.jsonl", b'{"messages": [{"role": "user", "content": "q"}]}', "no text found in r.jsonl .roles: assistant."),
        ("a.parquet", b"PAR1", "a.parquet: cannot be read"),
    ],
)  # fmt: skip
def test_a_bad_row_names_its_line(count, name, content, words) -> None:
    """Skipping a row of the user's own file would silently change the counts."""
    Path(name).write_bytes(content)
    with pytest.raises((DataError, TokenMapError), match=words):
        count(name)


def test_only_what_changed_is_counted_again(count, expected, monkeypatch) -> None:
    """Counts of an older file would be silently wrong; another weight changes nothing."""
    read = []
    own = token_counts.read_lines
    monkeypatch.setattr(token_counts, "read_lines", lambda path: read.append(path.name) or own(path))
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("a quick fox")
    count("a.txt")
    assert count("a.txt:7", "b.txt").parts[0].weight == 7 and read == ["a.txt", "b.txt"]
    Path("a.txt").write_text("two rivers")
    assert torch.equal(count("a.txt").total(), expected("two rivers")) and read == ["a.txt", "b.txt", "a.txt"]


def test_datasets(count, expected, monkeypatch, caplog) -> None:
    """Rows without text, which users cannot correct, are skipped and named; a dataset of none is refused early."""
    datasets = pytest.importorskip("datasets")

    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(Path("hub").resolve()))
    rows = [{"text": f"the fox {n}" if n % 5 else None, "task": "even" if n % 2 else "odd"} for n in range(40)]
    Path("files").mkdir()
    jsonl("files/train-0.jsonl", rows[:30])
    jsonl("files/train-1.jsonl", rows[30:])
    Path("images").mkdir()
    jsonl("images/train.jsonl", [{"image": n} for n in range(200)])
    wanted = expected(*(row["text"] for row in rows if row["text"]))
    spec = f"hub:{Path('files').resolve()}:train"
    counts = count(spec, num_proc=2)
    assert torch.equal(counts.total(), wanted) and [one.task for one in counts.parts] == ["even", "odd"]
    assert f"{spec}: 8 of 40 rows were skipped; the first: {spec} row 0" in caplog.text
    with pytest.raises(DataError, match="none of the first 100 rows holds a text"):
        count(f"hub:{Path('images').resolve()}")


def test_held_out_text_is_not_ranked(count, expected) -> None:
    """Held-out text measures the map, so no token of it may be counted, under any spelling of its path."""
    Path("a.txt").write_text("fox")
    Path("h.txt").write_text("rivers")
    counts = count("a.txt", held_out=("h.txt:2",))
    assert torch.equal(counts.total(), expected("fox"))
    assert torch.equal(counts.total(held_out=True), 2 * expected("rivers"))
    for spec in ("*.*", str(Path("h.txt").resolve())):
        with pytest.raises(TokenMapError, match="h.txt is counted and held out as well"):
            count("a.txt", spec, held_out=("h.txt",))


def test_weights_of_specs() -> None:
    """An existing path that ends like a weight is a path; weights of one corpus add up."""
    Path("odd:3").write_text("x")
    assert parse_corpora(["odd:3", "a:2", "hub:o/n:train", "a"]) == {"odd:3": 1, "a": 3, "hub:o/n:train": 1}
    for text in ("a:0", "a:1.5", "a:-2"):
        with pytest.raises(TokenMapError, match="whole number from 1"):
            parse_corpora([text])


def test_files_of_a_folder_and_a_glob() -> None:
    """Hidden files and other kinds are left out of a folder."""
    for name in ("d/b.txt", "d/e/a.jsonl.gz", "d/.git/x.txt", "d/x.bin", "d/c.parquet"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    assert [str(one) for one in files_of("d")] == ["d/b.txt", "d/c.parquet", "d/e/a.jsonl.gz"]
    assert [str(one) for one in files_of("d/*.bin")] == ["d/x.bin"]
    with pytest.raises(DataError, match="does not exist"):
        files_of("none/*")
