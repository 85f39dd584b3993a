"""Counts the tokens of corpora: reads their documents one by one, encodes them on several cores by `datasets.map`, and
adds up.

A document is a text, or the response ids of a rollout. `datasets` keeps the documents and their ids in its cache, so
that a corpus that has not changed is not read and encoded again.

Shapes: V = target vocabulary.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.chat_rows import ROLES, encodable, read_message
from toolkit.data.dataset_rows import HUB, load_rows, streamed_rows, valid_rows
from toolkit.errors import TokenMapError, optional_package
from toolkit.jsonl import DataError, read_lines, read_placed_rows
from toolkit.tokenmap.counts import Part
from toolkit.weights import sha256_json

ROW_SUFFIXES, TEXT_SUFFIXES, PARQUET = (".jsonl", ".json"), (".txt", ".md"), ".parquet"
TEXT_FIELDS = ("text", "content", "response", "output", "completion", "answer", "prompt")
MESSAGE_FIELDS, TASK_FIELDS = ("messages", "conversations"), ("task", "category")
PROMPT_FIELDS = ("turns", "prompt")  # lists of messages, or of texts of the user, where a row has nothing else
ROLLOUT_FIELDS = ("input_ids", "response_spans")
TEXT_CHARACTERS = 1 << 14  # text files are read as documents of so many, and to the end of the line
BATCH = 256  # documents that are encoded at once
# A corpus with more tasks than this is counted as one: such a field is no small set of tasks.
MAX_TASKS = 64

Row = tuple[str, Mapping[str, Any]]  # (place for error messages, content)
Document = dict[str, Any]
"""text (None for ids), ids, task: what the row says that it is, held_out: of a rollout that is not trained on."""
Encode = Callable[[list[str]], Iterable[Sequence[int]]]


def count_corpora(
    corpora: Mapping[str, int],
    held_out: Mapping[str, int],
    tokenizer: Any,
    roles: Sequence[str],
    vocab_size: int,
    cache: Path,
    num_proc: int,
) -> list[Part]:
    """Count corpora and held-out corpora, given with their weights, on `num_proc` cores.

    roles: whose turns are counted in conversations. Disk: `cache` holds a copy of their text and its ids. Raises
    `TokenMapError` for a corpus without text, one that is held out as well, and ids outside [0, V); `DataError` for a
    file that cannot be read.
    """
    both = _sources(corpora) & _sources(held_out)
    if both:
        raise TokenMapError(f"{min(both)} is counted and held out as well; leave it out of one of them")
    parts: list[Part] = []
    for weights, all_held_out in ((corpora, False), (held_out, True)):
        for spec, weight in weights.items():
            documents = _encoded(spec, tokenizer, list(roles), cache, num_proc)
            parts += _parts(spec, weight, all_held_out, documents, vocab_size)
    return parts


def count_rollouts(path: Path, vocab_size: int) -> list[Part]:
    """Count the response ids of a rollouts file in this process. Raises as `count_corpora`."""
    return _parts(str(path), 1, False, documents_of(str(path), ()), vocab_size)


def _encoded(spec: str, tokenizer: Any, roles: Sequence[str], cache: Path, num_proc: int) -> Iterator[Document]:
    """Yield the documents of a corpus with the ids of their texts."""
    datasets = optional_package("datasets", f"counting {spec}")
    text, ids = datasets.Value("large_string"), datasets.Sequence(datasets.Value("int32"))
    columns = {"ids": ids, "task": text, "held_out": datasets.Value("bool")}
    encode, tokenizer_mark = encoder(tokenizer)
    mark = _mark(spec)
    try:
        documents = datasets.Dataset.from_generator(
            documents_of,
            features=datasets.Features(text=text, **columns),
            cache_dir=str(cache),
            gen_kwargs={"spec": spec, "roles": roles},
            fingerprint=sha256_json([mark, roles])[:16],
        )
        encoded = documents.map(
            encode_batch,
            batched=True,
            batch_size=BATCH,
            remove_columns="text",
            features=datasets.Features(columns),
            fn_kwargs={"encode": encode},
            num_proc=min(num_proc, len(documents) // BATCH) or None,
            new_fingerprint=sha256_json([mark, roles, tokenizer_mark])[:16],
            desc=f"tokens of {spec}",
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, DataError | TokenMapError) else error) from None
    if _mark(spec) != mark:
        raise TokenMapError(f"{spec} has changed while it was counted; type the command again")
    for batch in encoded.with_format("numpy").iter(BATCH):
        for row in zip(*batch.values(), strict=True):
            yield dict(zip(batch, row, strict=True))


def encoder(tokenizer: Any) -> tuple[Encode, str]:
    """A function from texts to their ids, without special tokens that the tokenizer would add; and its mark."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer that is written in Python
        return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"], str(tokenizer.name_or_path)
    backend.no_truncation()
    backend.no_padding()
    mark = hashlib.sha256(backend.to_str().encode()).hexdigest()
    return lambda texts: [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)], mark


def encode_batch(batch: dict[str, list[Any]], encode: Encode) -> dict[str, list[Any]]:
    """The ids of documents; of a text its tokens."""
    texts = [text for text in batch["text"] if text is not None]
    encoded = iter(encode(texts) if texts else ())
    columns = zip(batch["text"], batch["ids"], strict=True)
    return {"ids": [ids if text is None else next(encoded) for text, ids in columns]}


def _parts(spec: str, weight: int, all_held_out: bool, documents: Iterable[Document], vocab_size: int) -> list[Part]:
    """Count the ids of documents. More tasks than `MAX_TASKS` become one, which is named "".

    Raises `TokenMapError` for an id outside [0, V), which means that another tokenizer wrote it.
    """

    def nothing() -> dict[tuple[bool, str], NDArray[np.int64]]:
        return defaultdict(lambda: np.zeros(vocab_size, np.int64))

    found, one_task = nothing(), False
    rest = iter(documents)
    while batch := list(itertools.islice(rest, BATCH)):
        groups: dict[tuple[bool, str], list[NDArray[np.int64]]] = {}
        for one in batch:
            key = all_held_out or bool(one["held_out"]), "" if one_task else str(one["task"])
            groups.setdefault(key, []).append(np.asarray(one["ids"], np.int64))
        for key, own in groups.items():
            found[key] += _counts(np.concatenate(own), vocab_size)
        if len({task for _, task in found} - {""}) > MAX_TASKS:
            one_task, by_task, found = True, found, nothing()
            for (held_out, _), counts in by_task.items():
                found[held_out, ""] += counts
    return [Part(spec, weight, *key, torch.from_numpy(found[key])) for key in sorted(found)]


def _counts(ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise TokenMapError(
            f"ids range from {ids.min()} to {ids.max()}, but the target's vocabulary is [0, {vocab_size}); count with "
            "the target's own tokenizer"
        )
    return np.bincount(ids, minlength=vocab_size)


# -- documents ---------------------------------------------------------------------------------------------------------


def documents_of(spec: str, roles: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of a corpus, in order.

    In a row with messages, each turn of `roles` is a document; in a rollout, each span of response ids; in other rows,
    the text field. Memory: one row; a .json file is read at once. Raises `TokenMapError` with file and line for a row
    without any of them, `DataError` for a file that cannot be read and for a message that is none. Users cannot correct
    a row of a dataset, so there rows without text are skipped, and the log says how many. A corpus without documents is
    a `TokenMapError`.
    """
    if spec.startswith(HUB):
        rows = streamed_rows(spec, load_rows(spec, False, None))
        groups = (found for _, found in valid_rows(spec, rows, lambda one: row_documents(one, roles), "text"))
    else:
        groups = (row_documents(row, roles) for path in files_of(spec) for row in _rows(path))
    empty = True
    for group in groups:
        yield from group
        empty = empty and not group
    if empty:
        raise TokenMapError(
            f"no text found in {spec} (roles: {', '.join(roles)}); give a corpus with text or with messages of these "
            "roles"
        )


def row_documents(placed: Row, roles: Sequence[str]) -> list[Document]:
    """The documents of a row. Raises `DataError` or `TokenMapError` that begins with the row's place."""
    where, row = placed
    task = next((row[name] for name in TASK_FIELDS if isinstance(row.get(name), str)), "")
    if all(isinstance(row.get(name), list) for name in ROLLOUT_FIELDS):
        ids, held_out = row["input_ids"], row.get("split") == "held_out"
        for start, end in row["response_spans"]:
            if not 0 <= start <= end <= len(ids):
                raise TokenMapError(f"{where}: response span [{start}, {end}) is outside the {len(ids)} input_ids")
        return [_document(None, ids[start:end], task, held_out) for start, end in row["response_spans"]]
    for field in (*MESSAGE_FIELDS, *TEXT_FIELDS, *PROMPT_FIELDS):
        value = row.get(field)
        if isinstance(value, str) and field in TEXT_FIELDS:
            return [_document(encodable(value, f"{where}: {field}"), task=task)]
        if isinstance(value, list) and field in (*MESSAGE_FIELDS, *PROMPT_FIELDS):
            messages = ({"role": "user", "content": one} if isinstance(one, str) else one for one in value)
            turns = [read_message(one, f"{where}: a message") for one in messages]
            return [_document(text, task=task) for role, text in turns if text and ROLES.get(role, role) in roles]
    raise TokenMapError(
        f"{where}: no text field among {', '.join(map(str, row)) or '(none)'}; expected one of "
        f"{', '.join(TEXT_FIELDS)}, a list under {', '.join((*MESSAGE_FIELDS, *PROMPT_FIELDS))}, "
        f"or {' and '.join(ROLLOUT_FIELDS)}"
    )


def _document(text: str | None, ids: Sequence[int] = (), task: str = "", held_out: bool = False) -> Document:
    return {"text": text, "ids": list(ids), "task": task, "held_out": held_out}


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file; of a text file its lines, some thousand characters together as a row's text."""
    if path.suffix == PARQUET:
        yield from _parquet_rows(path)
    elif _suffix(path) in ROW_SUFFIXES:
        yield from read_placed_rows(path)
    else:
        waiting = ""
        for _, line in read_lines(path):
            waiting += line
            if len(waiting) >= TEXT_CHARACTERS:
                yield str(path), {"text": waiting}
                waiting = ""
        if waiting:
            yield str(path), {"text": waiting}


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet  # takes a second to import, and only this format needs it

    at = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(BATCH):
            for row in batch.to_pylist():
                yield f"{path} row {at}", row
                at += 1
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read after {at} rows ({error}); copy the file again") from error


def files_of(spec: str) -> list[Path]:
    """The files that a path, a folder or a glob names, sorted.

    A folder stands for its .txt, .md, .json, .jsonl (each gzipped or not) and .parquet files, also in its folders, but
    for hidden ones. Raises `DataError` when there is none.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        return [path]
    found = glob.glob(f"{glob.escape(str(path))}/**" if path.is_dir() else str(path), recursive=True)
    files = sorted(one for one in map(Path, found) if one.is_file())
    if path.is_dir():
        files = [one for one in files if _suffix(one) in (*ROW_SUFFIXES, *TEXT_SUFFIXES, PARQUET)]
    if not files:
        raise DataError(
            f"{spec} does not exist, or has no .txt, .md, .json, .jsonl or .parquet file; give a file, a folder, a "
            "glob, or hub:org/name[/config][:split]"
        )
    return files


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _sources(specs: Iterable[str]) -> set[str]:
    """Names of datasets, and absolute paths of files."""
    return {
        source
        for spec in specs
        for source in ([spec] if spec.startswith(HUB) else [str(file.resolve()) for file in files_of(spec)])
    }


def _mark(spec: str) -> str:
    """Changes when the corpus does: with names, sizes and times of its files."""
    if spec.startswith(HUB):
        return str(load_rows(spec, False, None)._fingerprint)
    stats = [(str(path.resolve()), path.stat()) for path in files_of(spec)]
    return sha256_json([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
