"""Corpora whose tokens are counted: how they are named, and how their files are cut into shards.

The shards of a file depend on its content alone, never on the number of processes that count them. Text is cut only
between two lines where no tokenizer that splits text into words first would join them, so the cuts change no token.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from toolkit.errors import TokenMapError
from toolkit.jsonl import DataError
from toolkit.log import get_logger

logger = get_logger(__name__)

SHARD_BYTES = 8 << 20
# Lines that are looked at for a good place to cut, before any line end will do.
LINES_TO_CUT = 1000
ROW_SUFFIXES, TEXT_SUFFIXES, PARQUET = (".jsonl", ".json"), (".txt", ".md"), ".parquet"


@dataclass(frozen=True)
class Corpus:
    """A named corpus. weight: how often each of its tokens counts."""

    spec: str
    weight: int = 1

    def __str__(self) -> str:
        return self.spec if self.weight == 1 else f"{self.spec}:{self.weight}"

    @classmethod
    def parse(cls, text: str) -> Corpus:
        """Read SPEC or SPEC:WEIGHT; an existing path that ends like a weight is a path. Raises `TokenMapError`."""
        spec, colon, weight = text.rpartition(":")
        if not colon or not _is_number(weight) or Path(text).exists():
            return cls(text)
        if not weight.isdecimal() or int(weight) < 1:
            raise TokenMapError(
                f"the weight of corpus {spec} is {weight}; expected a whole number from 1, so that counts stay exact: "
                "write 1.5 to 1 as 3 and 2"
            )
        return cls(spec, int(weight))


class Piece(NamedTuple):
    """A part of a source: bytes of a text or .jsonl file, row groups of a .parquet file, shards of a dataset."""

    source: str
    start: int
    end: int


Shard = tuple[Piece, ...]
"""What one process counts at a time."""


def parse_corpora(texts: Iterable[str]) -> list[Corpus]:
    """Read several of SPEC[:WEIGHT]. Weights of a corpus that is given more than once are added."""
    found: dict[str, Corpus] = {}
    for one in map(Corpus.parse, texts):
        earlier = found.get(one.spec)
        found[one.spec] = one if earlier is None else replace(one, weight=one.weight + earlier.weight)
    return list(found.values())


def files_of(spec: str) -> list[Path]:
    """Return the files that a path, a folder or a glob names, sorted.

    A folder stands for its .txt, .md, .json, .jsonl (each gzipped or not) and .parquet files, also in its folders.
    Raises `DataError` when there is none.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        found = sorted(one for one in map(Path, glob.glob(str(path), recursive=True)) if one.is_file())
        if not found:
            raise DataError(f"{spec} does not exist; give a file, a folder, a glob, or hub:org/name[/config][:split]")
        return found
    inside = sorted(one for one in path.rglob("*") if one.is_file() and not _is_hidden(one.relative_to(path)))
    found = [one for one in inside if _suffix(one) in (*ROW_SUFFIXES, *TEXT_SUFFIXES, PARQUET)]
    if not found:
        raise DataError(f"{spec} has no .txt, .md, .json, .jsonl or .parquet file; give other files by a glob")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(map(_suffix, found)).items()))
    left = len(inside) - len(found)
    logger.info(f"{spec}: {kinds}" + (f"; {left} files of other kinds are not counted" if left else ""))
    return found


def shards_of(paths: Iterable[Path]) -> list[Shard]:
    """Cut files into shards of about `SHARD_BYTES`, in order. Small files share a shard.

    A file that cannot be read from its middle (.gz, .json) stays whole. Raises `DataError` for a damaged .parquet file.
    """
    shards: list[Shard] = []
    waiting: list[Piece] = []
    size = 0
    for piece, piece_bytes in (one for path in paths for one in _pieces(path)):
        waiting.append(piece)
        size += piece_bytes
        if size >= SHARD_BYTES:
            shards.append(tuple(waiting))
            waiting, size = [], 0
    return [*shards, tuple(waiting)] if waiting else shards


def is_rows(path: Path) -> bool:
    """Whether a file holds JSON rows."""
    return _suffix(path) in ROW_SUFFIXES


def is_whole(path: Path) -> bool:
    """Whether a file can only be read from its beginning."""
    return path.suffix == ".gz" or _suffix(path) == ".json"


def _pieces(path: Path) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces of a file, each with its size in bytes."""
    name = str(path)
    if path.suffix == PARQUET:
        for group, group_bytes in enumerate(_row_groups(path)):
            yield Piece(name, group, group + 1), group_bytes
        return
    size = path.stat().st_size
    start = 0
    for cut in [*([] if is_whole(path) else _cuts(path, size)), size]:
        if cut > start:
            yield Piece(name, start, cut), cut - start
        start = cut


def _row_groups(path: Path) -> list[int]:
    """Return the bytes of each row group."""
    from pyarrow import ArrowException, parquet  # takes a second to import, and only this format needs it

    try:
        metadata = parquet.ParquetFile(path).metadata
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is no readable .parquet file ({error}); copy the file again") from error
    return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


def _cuts(path: Path, size: int) -> Iterator[int]:
    """Yield offsets that cut a file into pieces of about `SHARD_BYTES`."""
    with path.open("rb") as handle:
        at = SHARD_BYTES
        while at < size:
            handle.seek(at)
            line = handle.readline()
            for _ in range(LINES_TO_CUT):
                at += len(line)
                after = handle.readline()
                if not after or may_cut(line.decode(errors="replace"), after.decode(errors="replace")):
                    break
                line = after
            yield at
            at += SHARD_BYTES


def may_cut(line: str, after: str) -> bool:
    """Whether a tokenizer sees the same words on both sides of a cut between two lines: no further white space."""
    body = line.rstrip("\r\n")
    return bool(body) and not body[-1].isspace() and not after[:1].isspace()


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
