"""Show which tokens of rollouts a training supervises, as text with colours or marks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from toolkit.data.batches import Example
from toolkit.data.examples import load_examples
from toolkit.jsonl import DataError, read_rows
from toolkit.targets.load import load_tokenizer
from toolkit.terminal import DIM, END, GREEN, UNPRINTABLE, YELLOW

CONTEXT, FIRST, SUPERVISED = "context", "first", "supervised"
COLOURS = {CONTEXT: DIM, FIRST: YELLOW, SUPERVISED: GREEN}
MARKS = {CONTEXT: ("", ""), FIRST: ("(", ")"), SUPERVISED: ("[", "]")}


def preview(
    rollouts: Path,
    target: str | None,
    split: str,
    limit: int,
    max_length: int,
    *,
    revision: str | None = None,
    coloured: bool = False,
) -> Iterator[str]:
    """Yield the text of the first rollouts of a split, in the order of training, then the totals.

    target: the model whose tokenizer is used; None: the target that wrote the rollouts. Raises `DataError` when the
    rollouts do not name it.
    """
    examples, cut = load_examples(rollouts, split, max_length)
    provenance = next(read_rows(rollouts))[1].get("provenance") or {}
    name = target or provenance.get("target")
    if name is None:
        raise DataError(f"{rollouts} does not name the target that wrote it; give it with --target")
    tokenizer = load_tokenizer(name, revision)
    for example in islice(examples, limit):
        kinds = token_kinds(example.response)
        yield f"{example.id}: {kinds.count(SUPERVISED)} of {len(kinds)} tokens supervised"
        yield painted(example, kinds, tokenizer, coloured) + "\n"
    total = sum(token_kinds(example.response).count(SUPERVISED) for example in examples)
    yield f"{len(examples)} {split} rollouts, {total} supervised tokens at step 0; {cut} cut to {max_length}"


def token_kinds(response: list[bool]) -> list[str]:
    """Return the kind of each token: context, first (A0 of an answer) or supervised, as `supervised_mask` at step 0."""
    before = [False, *response[:-1]]
    return [
        CONTEXT if not inside else SUPERVISED if earlier else FIRST
        for inside, earlier in zip(response, before, strict=True)
    ]


def painted(example: Example, kinds: list[str], tokenizer: PreTrainedTokenizerBase, coloured: bool) -> str:
    """Return the rollout's text with a colour or mark per kind; special tokens are shown."""
    parts = []
    for kind, run_of in groupby(zip(kinds, example.input_ids, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run_of], clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "the ids of one rollout decode to one text"
        text = text.translate(UNPRINTABLE)
        opening, closing = (COLOURS[kind], END) if coloured else MARKS[kind]
        parts.append(f"{opening}{text}{closing}")
    return "".join(parts)
