from pathlib import Path

import pytest

from toolkit.jsonl import DataError
from toolkit.tokenmap import corpus as corpora
from toolkit.tokenmap.corpus import Corpus, Piece, files_of, may_cut, parse_corpora, shards_of
from toolkit.tokenmap.token_map import TokenMapError


def pieces_of(*paths: Path) -> list[Piece]:
    return [piece for shard in shards_of(paths) for piece in shard]


@pytest.mark.parametrize(
    "text, spec, weight",
    [
        ("a.jsonl", "a.jsonl", 1),
        ("a.jsonl:3", "a.jsonl", 3),
        ("hub:org/name:train", "hub:org/name:train", 1),
        ("hub:org/name:train:20", "hub:org/name:train", 20),
    ],
)
def test_a_weight_stands_after_the_last_colon(text, spec, weight):
    """The split of a dataset stands after a colon, too."""
    assert Corpus.parse(text) == Corpus(spec, weight)


@pytest.mark.parametrize("weight", ["0", "-1", "1.5"])
def test_other_weights_are_refused(weight):
    """A fraction of a count is no count; a weight of 0 or a path with a number at its end must not be guessed."""
    with pytest.raises(TokenMapError, match=f"the weight of corpus a.txt is {weight}; expected a whole number from 1"):
        Corpus.parse(f"a.txt:{weight}")


def test_a_file_whose_name_ends_like_a_weight(tmp_path):
    """The path exists, so it is meant."""
    (tmp_path / "a:2").write_text("x")
    assert Corpus.parse(str(tmp_path / "a:2")) == Corpus(str(tmp_path / "a:2"))


def test_weights_of_a_corpus_that_is_given_twice_are_added():
    """`--corpus a a b` asks for a's tokens twice."""
    assert parse_corpora(["a", "b", "a:2"]) == [Corpus("a", 3), Corpus("b", 1)]


def test_folders_and_globs(tmp_path):
    """A folder stands for the corpora in it, not for pictures and hidden files; a glob for all that it matches."""
    for name in ("b.jsonl", "in/a.txt.gz", "in/c.parquet", "in/d.png", ".git/e.txt", "f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".git" / "empty").mkdir()
    names = [str(path.relative_to(tmp_path)) for path in files_of(str(tmp_path))]
    assert names == ["b.jsonl", "in/a.txt.gz", "in/c.parquet"]
    assert files_of(f"{tmp_path}/*.py") == [tmp_path / "f.py"]
    assert files_of(f"{tmp_path}/**/*.png") == [tmp_path / "in" / "d.png"]
    with pytest.raises(DataError, match="does not exist; give a file, a folder, a glob, or hub:"):
        files_of(f"{tmp_path}/*.rs")
    with pytest.raises(DataError, match="has no .txt"):
        files_of(str(tmp_path / ".git" / "empty"))


def test_pieces_follow_each_other_and_end_at_line_ends(tmp_path, monkeypatch):
    """A byte between two pieces would be lost, a shared one counted twice; half a line is no JSON."""
    monkeypatch.setattr(corpora, "SHARD_BYTES", 50)
    path = tmp_path / "a.jsonl"
    lines = [f'{{"text": "{"x" * (n % 40)}"}}\n' for n in range(60)]
    path.write_text("".join(lines))
    found = pieces_of(path)
    assert len(found) > 10
    assert [one.start for one in found] == [0, *(one.end for one in found[:-1])]
    assert found[-1].end == path.stat().st_size
    content = path.read_bytes()
    assert all(content[one.start : one.end].endswith(b"}\n") for one in found)


def test_text_is_cut_where_no_tokenizer_joins_the_lines(tmp_path, monkeypatch):
    """Two line ends, or a line end and blanks, are one token for many tokenizers."""
    monkeypatch.setattr(corpora, "SHARD_BYTES", 3)
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n   three\nfour\r\nfive\n\u3000six\nseven", encoding="utf-8", newline="")
    content = path.read_bytes()
    assert [content[one.start : one.end].decode() for one in pieces_of(path)] == [
        "one\n\ntwo\n   three\n",
        "four\r\n",
        "five\n\u3000six\n",
        "seven",
    ]
    monkeypatch.setattr(corpora, "LINES_TO_CUT", 1)
    assert pieces_of(path)[0] == Piece(str(path), 0, 4), "after so many lines any line end will do"


def test_may_cut():
    """Only the line's own end is white space."""
    assert may_cut("a\n", "b") and may_cut("a\r\n", "b")
    assert (
        not may_cut("\n", "b") and not may_cut("a \n", "b") and not may_cut("a\n", "\tb") and not may_cut("a\n", "\n")
    )


def test_small_files_share_a_shard_and_gzip_stays_whole(tmp_path, monkeypatch):
    """A process that gets one small file at a time would mostly wait."""
    monkeypatch.setattr(corpora, "SHARD_BYTES", 100)
    paths = [tmp_path / f"{n}.txt" for n in range(5)] + [tmp_path / "big.txt.gz", tmp_path / "empty.txt"]
    for path in paths:
        path.write_bytes(b"x" * 30)
    paths[5].write_bytes(b"\n" * 1000)
    paths[6].write_bytes(b"")
    shards = shards_of(paths)
    assert [[Path(piece.source).name for piece in shard] for shard in shards] == [
        ["0.txt", "1.txt", "2.txt", "3.txt"],
        ["4.txt", "big.txt.gz"],
    ]
    assert shards[1][1] == Piece(str(paths[5]), 0, 1000)


def test_row_groups_of_parquet(tmp_path, monkeypatch):
    """A row group is the smallest part of the format that can be read alone."""
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setattr(corpora, "SHARD_BYTES", 1)
    parquet.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "a.parquet", row_group_size=2)
    assert pieces_of(tmp_path / "a.parquet") == [Piece(str(tmp_path / "a.parquet"), n, n + 1) for n in range(2)]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match="b.parquet is no readable .parquet file"):
        shards_of([tmp_path / "b.parquet"])
