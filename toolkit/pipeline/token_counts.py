"""Counts the tokens of corpora: reads their documents one by one, encodes them on several cores by `datasets.map`, and
adds up.

A document is a text, or the response ids of a rollout. `datasets` keeps the documents and what is counted of them in
its cache, so that a corpus that has not changed is not counted again.

Shapes: V = target vocabulary.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.chat_rows import ROLES, encodable, read_message
from toolkit.data.dataset_rows import is_dataset, load_rows, streamed_rows, valid_rows
from toolkit.errors import TokenMapError, optional_package
from toolkit.jsonl import DataError, read_lines, read_placed_rows
from toolkit.tokenmap.counts import Corpus, CorpusCounts, Key
from toolkit.weights import sha256_json

ROW_SUFFIXES, TEXT_SUFFIXES, PARQUET = (".jsonl", ".json"), (".txt", ".md"), ".parquet"
TEXT_FIELDS = ("text", "content", "response", "output", "completion", "answer", "prompt")
MESSAGE_FIELDS, TASK_FIELDS = ("messages", "conversations"), ("task", "category")
ROLLOUT_FIELDS = ("input_ids", "response_spans")
TEXT_CHARACTERS = 1 << 14  # text files are read as documents of at least so many
BATCH = 256  # documents that are encoded at once
# A corpus with more tasks than this is counted as one: such a field is no small set of tasks.
MAX_TASKS = 64

Document = dict[str, Any]
"""text (None for ids), ids, task: what the row says that it is, held_out: of a rollout that is not trained on."""
Encode = Callable[[list[str]], Iterable[Sequence[int]]]


def count_corpora(
    corpora: Sequence[Corpus],
    held_out: Sequence[Corpus],
    tokenizer: Any,
    roles: Sequence[str],
    vocab_size: int,
    cache: Path,
    num_proc: int,
) -> tuple[CorpusCounts, ...]:
    """Count corpora and held-out corpora on `num_proc` cores. roles: whose turns are counted in conversations.

    Disk: `cache` holds a copy of their text. Raises `TokenMapError` for a corpus without text, one that is held out as
    well, and ids outside [0, V); `DataError` for a file that cannot be read or changes meanwhile.
    """
    both = _sources(corpora) & _sources(held_out)
    if both:
        raise TokenMapError(f"{min(both)} is counted and held out as well; leave it out of one of them")
    return tuple(
        _count(one, one_held_out, tokenizer, roles, vocab_size, cache, num_proc)
        for group, one_held_out in ((corpora, False), (held_out, True))
        for one in group
    )


def count_rollouts(path: Path, vocab_size: int) -> CorpusCounts:
    """Count the response ids of a rollouts file in this process. Raises as `count_corpora`."""
    documents = 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal documents
        for one in documents_of(str(path), ()):
            documents += 1
            yield from _rows(count_batch({name: [value] for name, value in one.items()}, None, vocab_size))

    counts = _added(counted(), vocab_size)
    return CorpusCounts(Corpus(str(path)), counts, documents)


def _count(
    corpus: Corpus,
    held_out: bool,
    tokenizer: Any,
    roles: Sequence[str],
    vocab_size: int,
    cache: Path,
    num_proc: int,
) -> CorpusCounts:
    datasets = optional_package("datasets", f"counting {corpus.spec}")
    text, ids, number = datasets.Value("large_string"), datasets.Value("int64"), datasets.Sequence
    encode, tokenizer_mark = encoder(tokenizer)
    mark = _mark(corpus.spec)
    try:
        documents = datasets.Dataset.from_generator(
            documents_of,
            features=datasets.Features(text=text, ids=number(ids), task=text, held_out=datasets.Value("bool")),
            cache_dir=str(cache),
            gen_kwargs={"spec": corpus.spec, "roles": list(roles)},
            fingerprint=sha256_json([mark, list(roles)])[:16],
        )
        counted = documents.map(
            count_batch,
            batched=True,
            batch_size=BATCH,
            remove_columns=documents.column_names,
            features=datasets.Features(held_out=datasets.Value("bool"), task=text, ids=number(ids), counts=number(ids)),
            fn_kwargs={"encode": encode, "vocab_size": vocab_size},
            num_proc=min(num_proc, len(documents) // BATCH) or None,
            new_fingerprint=sha256_json([mark, list(roles), tokenizer_mark, vocab_size])[:16],
            desc=f"tokens of {corpus.spec}",
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, DataError | TokenMapError) else error) from None
    if _mark(corpus.spec) != mark:
        raise TokenMapError(f"{corpus.spec} has changed while it was counted; type the command again")
    return CorpusCounts(corpus, _added(counted, vocab_size), len(documents), held_out)


def encoder(tokenizer: Any) -> tuple[Encode, str]:
    """A function from texts to their ids, without special tokens that the tokenizer would add; and its mark."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer that is written in Python
        return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"], str(tokenizer.name_or_path)
    backend.no_truncation()
    backend.no_padding()
    mark = hashlib.sha256(backend.to_str().encode()).hexdigest()
    return lambda texts: [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)], mark


def count_batch(batch: dict[str, list[Any]], encode: Encode | None, vocab_size: int) -> dict[str, list[Any]]:
    """Columns of counts by (held out, task): the ids that occur, and how often. encode: None where all have ids.

    Raises `TokenMapError` for an id outside [0, V), which means that another tokenizer wrote it.
    """
    texts = [text for text in batch["text"] if text is not None]
    encoded = iter(encode(texts) if encode is not None and texts else ())
    parts: dict[Key, list[Sequence[int]]] = {}
    for text, ids, held_out, task in zip(*(batch[name] for name in ("text", "ids", "held_out", "task")), strict=True):
        parts.setdefault((held_out, task), []).append(ids if text is None else next(encoded))
    found: dict[str, list[Any]] = {"held_out": [], "task": [], "ids": [], "counts": []}
    for (held_out, task), own in parts.items():
        ids, counts = np.unique(np.concatenate([np.asarray(one, np.int64) for one in own]), return_counts=True)
        if len(ids) and not 0 <= ids[0] <= ids[-1] < vocab_size:
            raise TokenMapError(
                f"ids range from {ids[0]} to {ids[-1]}, but the target's vocabulary is [0, {vocab_size}); count with "
                "the target's own tokenizer"
            )
        for name, value in zip(found, (held_out, task, ids, counts), strict=True):
            found[name].append(value)
    return found


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _added(rows: Iterable[dict[str, Any]], vocab_size: int) -> dict[Key, torch.Tensor]:
    """Counts [V] by (held out, task). More tasks than `MAX_TASKS` become one, which is named ""."""
    found: dict[Key, torch.Tensor] = {(False, ""): torch.zeros(vocab_size, dtype=torch.int64)}
    one_task = False
    for row in rows:
        key = row["held_out"], "" if one_task else row["task"]
        ids, counts = (torch.as_tensor(row[name], dtype=torch.int64) for name in ("ids", "counts"))
        found.setdefault(key, torch.zeros(vocab_size, dtype=torch.int64)).index_add_(0, ids, counts)
        if len({task for _, task in found} - {""}) > MAX_TASKS:
            one_task, earlier, found = True, found, {}
            for (held_out, _), own in earlier.items():
                found[held_out, ""] = found.get((held_out, ""), 0) + own
    return found


# -- documents ---------------------------------------------------------------------------------------------------------


def documents_of(spec: str, roles: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of a corpus, in order.

    In a row with messages, each turn of `roles` is a document; in a rollout, each span of response ids; in other rows,
    the text field. Memory: one row; a .json file is read at once. Raises `TokenMapError` with file and line for a row
    without any of them, `DataError` for a file that cannot be read and for a message that is none. Users cannot correct
    a row of a dataset, so there rows without text are skipped, and the log says how many. A corpus without documents is
    a `TokenMapError`.
    """
    empty = True
    for one in _dataset_documents(spec, roles) if is_dataset(spec) else _file_documents(spec, roles):
        empty = False
        yield one
    if empty:
        raise TokenMapError(
            f"no text found in {spec} (roles: {', '.join(roles)}); give a corpus with text or with messages of these "
            "roles"
        )


def _file_documents(spec: str, roles: Sequence[str]) -> Iterator[Document]:
    for path in files_of(spec):
        if _suffix(path) in ROW_SUFFIXES or path.suffix == PARQUET:
            for where, row in _parquet_rows(path) if path.suffix == PARQUET else read_placed_rows(path):
                yield from row_documents(row, roles, where)
        else:
            yield from map(_document, _texts(line for _, line in read_lines(path)))


def row_documents(row: dict[str, Any], roles: Sequence[str], where: object) -> list[Document]:
    """The documents of a row. Raises `DataError` or `TokenMapError` that begins with `where`."""
    task = next((row[name] for name in TASK_FIELDS if isinstance(row.get(name), str)), "")
    if all(isinstance(row.get(name), list) for name in ROLLOUT_FIELDS):
        ids, held_out = row["input_ids"], row.get("split") == "held_out"
        for start, end in row["response_spans"]:
            if not 0 <= start <= end <= len(ids):
                raise TokenMapError(f"{where}: response span [{start}, {end}) is outside the {len(ids)} input_ids")
        return [_document(None, ids[start:end], task, held_out) for start, end in row["response_spans"]]
    for field in MESSAGE_FIELDS:
        if isinstance(row.get(field), list):
            turns = [read_message(one, f"{where}: a message") for one in row[field]]
            return [_document(text, task=task) for role, text in turns if text and ROLES.get(role, role) in roles]
    for field in TEXT_FIELDS:
        if isinstance(row.get(field), str):
            return [_document(encodable(row[field], f"{where}: {field}"), task=task)]
    raise TokenMapError(
        f"{where}: no text field among {', '.join(map(str, row)) or '(none)'}; expected one of "
        f"{', '.join(TEXT_FIELDS)}, a list under {' or '.join(MESSAGE_FIELDS)}, or {' and '.join(ROLLOUT_FIELDS)}"
    )


def _document(text: str | None, ids: Sequence[int] = (), task: str = "", held_out: bool = False) -> Document:
    return {"text": text, "ids": list(ids), "task": task, "held_out": held_out}


def _dataset_documents(spec: str, roles: Sequence[str]) -> Iterator[Document]:
    rows = streamed_rows(spec, load_rows(spec, False, None))
    for _, documents in valid_rows(spec, rows, lambda one: row_documents(dict(one[1]), roles, one[0]), "text"):
        yield from documents


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet  # takes a second to import, and only this format needs it

    known = (*ROLLOUT_FIELDS, "split", *MESSAGE_FIELDS, *TEXT_FIELDS, *TASK_FIELDS)
    at = 0
    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in known] or None  # None: the error names all
        for batch in file.iter_batches(BATCH, columns=columns):
            for row in batch.to_pylist():
                yield f"{path} row {at}", row
                at += 1
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read after {at} rows ({error}); copy the file again") from error


def _texts(lines: Iterable[str]) -> Iterator[str]:
    """Documents of a text. They end where a tokenizer sees the same words on both sides: at a line end without further
    white space around it; after 16 times their length at any line end."""
    waiting: list[str] = []
    size = 0
    for line in lines:
        if size >= TEXT_CHARACTERS and (size >= 16 * TEXT_CHARACTERS or _may_cut(waiting[-1], line)):
            yield "".join(waiting)
            waiting, size = [], 0
        waiting.append(line)
        size += len(line)
    if waiting:
        yield "".join(waiting)


def _may_cut(line: str, after: str) -> bool:
    body = line.rstrip("\r\n")
    return bool(body) and not body[-1].isspace() and not after[:1].isspace()


def files_of(spec: str) -> list[Path]:
    """The files that a path, a folder or a glob names, sorted.

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
    inside = [one for one in path.rglob("*") if one.is_file()]
    inside = sorted(one for one in inside if not any(part.startswith(".") for part in one.relative_to(path).parts))
    found = [one for one in inside if _suffix(one) in (*ROW_SUFFIXES, *TEXT_SUFFIXES, PARQUET)]
    if not found:
        raise DataError(f"{spec} has no .txt, .md, .json, .jsonl or .parquet file; give other files by a glob")
    return found


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _sources(corpora: Iterable[Corpus]) -> set[str]:
    """Names of datasets, and absolute paths of files."""
    specs = {one.spec for one in corpora}
    datasets = {spec for spec in specs if is_dataset(spec)}
    return datasets | {str(file.resolve()) for spec in specs - datasets for file in files_of(spec)}


def _mark(spec: str) -> str:
    """Changes when the corpus does: with names, sizes and times of its files."""
    if is_dataset(spec):
        return str(load_rows(spec, False, None)._fingerprint)
    stats = [(str(path.resolve()), path.stat()) for path in files_of(spec)]
    return sha256_json([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
