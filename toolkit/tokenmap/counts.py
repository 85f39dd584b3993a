"""Counts of the tokens of corpora, and the file that holds them: one file serves every size of a token map.

Shapes: V = target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.errors import TokenMapError
from toolkit.weights import WeightsError, load_tensors, save_tensors

COUNTS = "counts.safetensors"
Key = tuple[bool, str]
"""(held out, task)"""


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


def parse_corpora(texts: Iterable[str]) -> list[Corpus]:
    """Read several of SPEC[:WEIGHT]. Weights of a corpus that is given more than once are added."""
    found: dict[str, Corpus] = {}
    for one in map(Corpus.parse, texts):
        earlier = found.get(one.spec)
        found[one.spec] = one if earlier is None else replace(one, weight=one.weight + earlier.weight)
    return list(found.values())


@dataclass(frozen=True)
class CorpusCounts:
    """The unweighted counts [V] int64 of one corpus, by (held out, task), of so many documents.

    held_out: all of it is held-out text, of which no token is ranked; else only its held-out rollouts are.
    """

    corpus: Corpus
    counts: dict[Key, torch.Tensor]
    documents: int
    held_out: bool = False

    def ranked_counts(self) -> torch.Tensor:
        """Counts [V] that are ranked."""
        return self._total(lambda held_out: not held_out and not self.held_out)

    def held_out_counts(self) -> torch.Tensor:
        """Counts [V] of held-out text."""
        return self._total(lambda held_out: held_out or self.held_out)

    def by_task(self) -> dict[str, torch.Tensor]:
        """Counts [V] of each named task, most tokens first: those that are ranked, or all of a held-out corpus."""
        found: dict[str, torch.Tensor] = {}
        for (held_out, task), counts in self.counts.items():
            if task and (self.held_out or not held_out):
                found[task] = found.get(task, 0) + counts
        return dict(sorted(found.items(), key=lambda one: (-int(one[1].sum()), one[0])))

    def _total(self, wanted: Callable[[bool], bool]) -> torch.Tensor:
        total = torch.zeros_like(next(iter(self.counts.values())))
        for (held_out, _), counts in self.counts.items():
            total += counts * wanted(held_out)
        return total


@dataclass(frozen=True)
class Counts:
    """The counts of all corpora. about: tokenizer, vocab_size, roles and forced_ids that they were counted with."""

    corpora: tuple[CorpusCounts, ...]
    about: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.about["vocab_size"])

    @property
    def forced_ids(self) -> list[int]:
        return list(self.about["forced_ids"])

    def total(self) -> torch.Tensor:
        """Counts [V] that are ranked: of each corpus times its weight."""
        return self._weighted(CorpusCounts.ranked_counts)

    def held_out_counts(self) -> torch.Tensor | None:
        """Weighted counts [V] of held-out text; None when there is none."""
        found = self._weighted(CorpusCounts.held_out_counts)
        return found if found.any() else None

    def _weighted(self, part: Callable[[CorpusCounts], torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(self.vocab_size, dtype=torch.int64)
        for one in self.corpora:
            total += one.corpus.weight * part(one)
        return total


def save_counts(path: str | Path, counts: Counts) -> None:
    """Write counts as safetensors, atomically: a tensor for each corpus, split and task, and JSON as metadata."""
    tensors = {
        f"{at}/{'held_out' if held_out else 'counted'}/{task}": counted
        for at, one in enumerate(counts.corpora)
        for (held_out, task), counted in one.counts.items()
    }
    corpora = [
        {"spec": one.corpus.spec, "weight": one.corpus.weight, "held_out": one.held_out, "documents": one.documents}
        for one in counts.corpora
    ]
    text = json.dumps({"about": counts.about, "corpora": corpora}, ensure_ascii=False)
    save_tensors(path, tensors, {"format": "pt", "token_counts": text})


def load_counts(path: str | Path) -> Counts:
    """Read counts from a file, or from a folder of `toolkit build-token-map`.

    Raises `TokenMapError` for a file that is absent, damaged or of another kind.
    """
    path = Path(path) / COUNTS if Path(path).is_dir() else Path(path)
    try:
        tensors = load_tensors(path)
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("token_counts")
    except (WeightsError, SafetensorError) as error:
        raise TokenMapError(f"{error}. Token counts are needed, as `toolkit build-token-map` writes them") from error
    if text is None:
        raise TokenMapError(
            f"{path} holds no token counts of corpora; count them with `toolkit build-token-map --corpus`"
        )
    stored = json.loads(text)
    counts: list[dict[Key, torch.Tensor]] = [{} for _ in stored["corpora"]]
    for name, tensor in tensors.items():
        index, split, task = name.split("/", 2)
        counts[int(index)][split == "held_out", task] = tensor
    corpora = [
        CorpusCounts(Corpus(one["spec"], one["weight"]), own, one["documents"], one["held_out"])
        for one, own in zip(stored["corpora"], counts, strict=True)
    ]
    return Counts(tuple(corpora), stored["about"])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
