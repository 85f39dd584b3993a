"""Counting by several workers: the counts are those of one pass, also after a kill, and nothing is counted twice."""

from __future__ import annotations

import gzip
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from toolkit.jsonl import DataError
from toolkit.pipeline import corpus_counts
from toolkit.pipeline.corpus_counts import count_corpora, count_here
from toolkit.pipeline.corpus_worker import ShardCounter
from toolkit.targets.target import Target
from toolkit.tokenmap import corpus as corpora
from toolkit.tokenmap import count as count_module
from toolkit.tokenmap.corpus import parse_corpora
from toolkit.tokenmap.counts import CorpusCounts, Counts
from toolkit.tokenmap.token_map import TokenMapError

WORDS = ["the", " quick", " fox", "\n", "\n\n", "  12", " rivers,", "\n    if x:", " é", "\u3000", "trains\n"]


def some_text(seed: int, words: int = 3000) -> str:
    return "".join(random.Random(seed).choices(WORDS, k=words)) + " end\n"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Many shards of small files."""
    monkeypatch.setattr(corpora, "SHARD_BYTES", 1000)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def counter(tiny_target: Target) -> ShardCounter:
    text = tiny_target.tokenizer.backend_tokenizer.to_str()
    return ShardCounter("tiny", text, ("assistant",), tiny_target.vocab_size)


@pytest.fixture
def expected(tiny_target: Target) -> Callable[[str], np.ndarray]:
    """Counts of a text that is encoded at once, in one process."""

    def count(text: str) -> np.ndarray:
        ids = tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.bincount(ids, minlength=tiny_target.vocab_size)

    return count


def count(
    counter: ShardCounter, *specs: str, held_out: tuple[str, ...] = (), out: str = "out", num_proc: int = 2
) -> list[CorpusCounts]:
    return count_corpora(parse_corpora(specs), parse_corpora(held_out), counter, Path(out), num_proc)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Shards are counted here. Returns (corpus, shard, documents that were skipped) of each."""
    asked: list[tuple[str, int, int]] = []

    def counted(todo: list, counter: ShardCounter, num_proc: int) -> Iterator[tuple]:
        for one, shard in todo:
            pieces, skip = one.task(shard)
            asked.append((one.corpus.spec, shard, skip))
            tallies = list(counter.count(pieces, skip))
            for at, tally in enumerate(tallies, 1):
                yield (one, shard), tally, at == len(tallies)

    monkeypatch.setattr(corpus_counts, "_counted", counted)
    return asked


@pytest.mark.parametrize("threads, num_proc", [(4, 2), (1, 2), (2, 3)])
def test_workers_count_what_one_pass_counts(counter, expected, monkeypatch, threads, num_proc) -> None:
    """Every format, cut into shards and given to threads of one or more processes, has the counts of its text."""
    import pyarrow as pa
    from pyarrow import parquet

    text = some_text(1)
    rows = [{"text": part} for part in text.split("\n\n")]
    Path("a.txt").write_text(text, encoding="utf-8")
    Path("a.md.gz").write_bytes(gzip.compress(text.encode()))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path("a.jsonl").write_text(lines)
    Path("a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    Path("a.json").write_text(json.dumps(rows))
    parquet.write_table(pa.Table.from_pylist(rows), "a.parquet", row_group_size=7)
    texts, by_rows = ("a.txt", "a.md.gz"), ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet")
    monkeypatch.setattr(corpus_counts, "THREADS", threads)
    found = count(counter, *texts, *by_rows, num_proc=num_proc)
    whole = expected(text)
    of_rows = sum(expected(row["text"]) for row in rows)
    assert len(corpora.shards_of([Path("a.txt")])) > 10 and len(corpora.shards_of([Path("a.parquet")])) > 10
    for one in found:
        wanted = whole if one.corpus.spec in texts else of_rows
        assert (one.tally.total(False) == wanted).all(), one.corpus.spec
        assert (count_here(one.corpus, counter).tally.total(False) == wanted).all()


def test_weights_equal_one_pass_over_the_repeated_text(counter) -> None:
    """A weight of 3 must mean neither more nor less than reading the corpus three times."""
    first, second = some_text(1), some_text(2, 1000)
    Path("a.txt").write_text(first, encoding="utf-8")
    Path("b.txt").write_text(second, encoding="utf-8")
    Path("all.txt").write_text(first * 3 + second, encoding="utf-8")
    about = {"vocab_size": counter.vocab_size, "forced_ids": []}
    merged = Counts(tuple(count(counter, "a.txt:3", "b.txt")), about).total()
    repeated = Counts(tuple(count(counter, "all.txt")), about).total()
    assert merged.tolist() == repeated.tolist() and merged.sum() > 1000


@pytest.mark.process
def test_a_tokenizer_without_a_json_is_loaded_by_its_name(counter, expected, tiny_target_directory) -> None:
    """Some tokenizers are written in Python: slower, but the same counts."""
    Path("a.txt").write_text(some_text(1), encoding="utf-8")
    slow = ShardCounter(str(tiny_target_directory), "", counter.roles, counter.vocab_size)
    (one,) = count(slow, "a.txt", num_proc=1)
    assert (one.tally.total(False) == expected(some_text(1))).all()


KILLED = """
import os, signal, sys
from pathlib import Path
from toolkit.pipeline import corpus_counts
from toolkit.pipeline.corpus_worker import ShardCounter
from toolkit.tokenmap import corpus
corpus.SHARD_BYTES, corpus_counts.SAVE_SHARE = 1000, 0
add = corpus_counts._Counting.add
left = 5
def add_and_die(self, *given):
    global left
    add(self, *given)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
corpus_counts._Counting.add = add_and_die
counter = ShardCounter("tiny", sys.argv[1], ("assistant",), int(sys.argv[2]))
if __name__ == "__main__":
    corpus_counts.count_corpora(corpus.parse_corpora(["a.txt"]), [], counter, Path("out"), 2)
"""


@pytest.mark.process
def test_a_killed_count_goes_on(counter, expected, in_this_process, caplog, monkeypatch) -> None:
    """A kill leaves no time to tidy up. What is in the file must fit together, and is not counted again."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level("INFO")
    Path("a.txt").write_text(some_text(1), encoding="utf-8")
    Path("killed.py").write_text(KILLED)
    command = [sys.executable, "killed.py", counter.tokenizer_json, str(counter.vocab_size)]
    assert subprocess.run(command, timeout=120, env={**os.environ}).returncode == -signal.SIGKILL
    (one,) = count(counter, "a.txt")
    shards = len(corpora.shards_of([Path("a.txt")]))
    kept = shards - len(in_this_process)
    assert kept == 5
    assert f"{kept} of {shards} shards were counted before" in caplog.text
    assert (one.tally.total(False) == expected(some_text(1))).all()


def test_a_worker_that_is_killed(counter, expected, monkeypatch) -> None:
    """The system ends processes when the memory is full. The command must end with the reason, and go on later."""
    Path("a.txt").write_text(some_text(1), encoding="utf-8")
    add = corpus_counts._Counting.add

    def add_and_kill(self, *given: object) -> None:
        add(self, *given)
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(corpus_counts._Counting, "add", add_and_kill)
        with pytest.raises(TokenMapError, match="a process that counts was killed.*what is counted is kept"):
            count(counter, "a.txt")
    assert not multiprocessing.active_children()
    (one,) = count(counter, "a.txt")
    assert (one.tally.total(False) == expected(some_text(1))).all()


def test_a_file_that_stays_whole_goes_on_in_its_middle(counter, expected, in_this_process, monkeypatch) -> None:
    """A .gz of many gigabytes is one shard; a kill near its end must not cost all of it."""
    monkeypatch.setattr(count_module, "PART_CHARACTERS", 2000)
    monkeypatch.setattr(count_module, "BATCH_CHARACTERS", 1000)
    rows = [{"text": part} for part in some_text(1).split("\n")]
    Path("a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    add, calls = corpus_counts._Counting.add, 0

    def add_and_stop(self, *given: object) -> None:
        nonlocal calls
        add(self, *given)
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(corpus_counts._Counting, "add", add_and_stop)
        count(counter, "a.jsonl.gz")
    (one,) = count(counter, "a.jsonl.gz")
    assert in_this_process[0] == ("a.jsonl.gz", 0, 0) and 0 < in_this_process[1][2] < len(rows)
    assert (one.tally.total(False) == sum(expected(row["text"]) for row in rows)).all()
    assert one.tally.documents == len(rows)


def test_only_what_changed_is_counted_again(counter, expected, in_this_process, caplog, monkeypatch) -> None:
    """Counts of an older file, tokenizer or roles would be silently wrong; other weights and corpora change nothing."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(some_text(1), encoding="utf-8")
    count(counter, "a.txt")
    in_this_process.clear()
    assert count(counter, "a.txt:7")[0].corpus.weight == 7 and not in_this_process
    count(counter, "a.txt", "b.txt")
    assert {spec for spec, _, _ in in_this_process} == {"b.txt"}
    assert "counted again" not in caplog.text
    in_this_process.clear()
    Path("a.txt").write_text(some_text(2), encoding="utf-8")
    one, _ = count(counter, "a.txt", "b.txt")
    assert {spec for spec, _, _ in in_this_process} == {"a.txt"}
    assert "a.txt is counted again: files changed since it was counted" in caplog.text
    assert (one.tally.total(False) == expected(some_text(2))).all()
    in_this_process.clear()
    count(ShardCounter(counter.tokenizer, counter.tokenizer_json, ("user",), counter.vocab_size), "a.txt")
    assert in_this_process and "a.txt is counted again: roles changed" in caplog.text


def test_a_file_that_changes_meanwhile(counter, in_this_process, monkeypatch) -> None:
    """Its counts would be of a text that never was."""
    Path("a.txt").write_text(some_text(1), encoding="utf-8")
    add = corpus_counts._Counting.add

    def add_and_write(self, *given: object) -> None:
        add(self, *given)
        Path("a.txt").write_text(some_text(2), encoding="utf-8")

    monkeypatch.setattr(corpus_counts._Counting, "add", add_and_write)
    with pytest.raises((TokenMapError, DataError)):
        count(counter, "a.txt")


def test_datasets(counter, expected, in_this_process, monkeypatch, caplog) -> None:
    """A dataset is streamed by its own shards. Rows without text, which users cannot correct, are counted."""
    datasets = pytest.importorskip("datasets")

    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(Path("cache").resolve()))
    rows = [{"text": f"the fox {n}" if n % 5 else None, "task": "even" if n % 2 else "odd"} for n in range(40)]
    Path("files").mkdir()
    for at in range(4):
        part = "".join(json.dumps(row) + "\n" for row in rows[10 * at : 10 * at + 10])
        Path(f"files/train-{at}.jsonl").write_text(part)
    datasets.Dataset.from_list(rows).save_to_disk("saved")
    wanted = sum(expected(row["text"]) for row in rows if row["text"])
    for spec, shards in ((f"hub:{Path('files').resolve()}:train", 4), ("saved", 1)):
        in_this_process.clear()
        (one,) = count(counter, spec)
        assert len(in_this_process) == shards and (one.tally.total(False) == wanted).all()
        assert one.tally.documents == 32 and one.tally.skipped == 8 and set(one.by_task()) == {"even", "odd"}
        assert f"{spec}: 8 rows without text were skipped; one of them: {spec} shard 0 row 0" in caplog.text
        in_this_process.clear()
        count(counter, spec)
        assert not in_this_process, "its files did not change"
    corpus_counts.dataset_shards.__globals__["_opened"].cache_clear()
    with Path("files/train-2.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    spec = f"hub:{Path('files').resolve()}:train"
    (one,) = count(counter, spec)
    assert f"{spec} is counted again: files changed" in caplog.text and one.tally.documents == 33


@pytest.mark.process
def test_a_dataset_is_streamed_by_workers(counter, expected) -> None:
    """What a worker needs to open a dataset must reach it."""
    Path("files").mkdir()
    for at in range(3):
        Path(f"files/train-{at}.jsonl").write_text(json.dumps({"text": f"rivers {at}"}) + "\n")
    (one,) = count(counter, f"hub:{Path('files').resolve()}")
    assert (one.tally.total(False) == sum(expected(f"rivers {at}") for at in range(3))).all()


def test_a_dataset_of_another_kind(counter, in_this_process, monkeypatch) -> None:
    """Hours of download that end with an empty count help nobody."""
    datasets = pytest.importorskip("datasets")

    from toolkit.data import dataset_rows

    stream = datasets.IterableDataset.from_generator(lambda: ({"image": n} for n in range(200)))
    dataset_rows._opened.cache_clear()
    monkeypatch.setattr(dataset_rows, "load_rows", lambda *_: stream)
    monkeypatch.setattr(corpus_counts, "dataset_shards", lambda spec: (1, "mark"))
    with pytest.raises(TokenMapError, match="none of the first 100 rows holds a text: hub:org/name shard 0 row 99"):
        count(counter, "hub:org/name")
    dataset_rows._opened.cache_clear()


def test_held_out_rows_and_corpora(counter, expected) -> None:
    """Held-out text measures the map, so no token of it may be counted."""
    rows = [
        {"input_ids": [1, 2], "response_spans": [[0, 2]], "split": "train"},
        {"input_ids": [3], "response_spans": [[0, 1]], "split": "held_out"},
    ]
    Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("h.txt").write_text("rivers")
    counts = Counts(
        tuple(count(counter, "r.jsonl", held_out=("h.txt:2",))), {"vocab_size": counter.vocab_size, "forced_ids": []}
    )
    assert counts.total().nonzero().flatten().tolist() == [1, 2]
    wanted = 2 * expected("rivers")
    wanted[3] += 1
    held_out = counts.held_out_counts()
    assert held_out is not None and held_out.tolist() == wanted.tolist()
    with pytest.raises(TokenMapError, match="h.txt is counted and held out as well"):
        count(counter, "*.*", held_out=("h.txt",))


def test_a_source_is_counted_or_held_out_under_any_spelling(counter, in_this_process) -> None:
    """Text that is counted and held out is covered too well; an absolute path or a link hid that it is the same."""
    datasets = pytest.importorskip("datasets")

    Path("a.txt").write_text("rivers")
    Path("copy.txt").write_text("rivers")
    Path("link.txt").symlink_to("a.txt")
    datasets.Dataset.from_list([{"text": "rivers"}]).save_to_disk("saved")
    datasets.DatasetDict(
        {split: datasets.Dataset.from_list([{"text": split}]) for split in ("train", "test")}
    ).save_to_disk("splits")
    pairs = [("a.txt", str(Path("a.txt").resolve())), ("a.txt", "./link.txt"), ("saved", "hub:./saved:train")]
    for counted, held_out in pairs:
        with pytest.raises(TokenMapError, match="(a.txt|saved:train) is counted and held out as well"):
            count(counter, counted, held_out=(held_out,))
    assert len(count(counter, "a.txt", held_out=("copy.txt",))) == 2
    assert len(count(counter, "hub:splits", held_out=("hub:splits:test",))) == 2


def test_errors_of_workers_reach_the_user(counter) -> None:
    """A traceback of a process that the user did not start says little."""
    Path("a.jsonl").write_text('{"text": "fine"}\n{"none": 1}\n')
    with pytest.raises(TokenMapError, match="a.jsonl:2: no text field"):
        count(counter, "a.jsonl")
    Path("a.jsonl").write_text('{"messages": [{"role": "user", "content": "only a question"}]}\n')
    with pytest.raises(TokenMapError, match="no text found in a.jsonl \\(roles: assistant\\)"):
        count(counter, "a.jsonl")
    Path("b.jsonl").write_text('{"input_ids": [9999], "response_spans": [[0, 1]]}\n')
    with pytest.raises(TokenMapError, match="ids range from 9999 to 9999"):
        count(counter, "b.jsonl")
