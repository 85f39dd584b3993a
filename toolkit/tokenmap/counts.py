"""Counts of the tokens of corpora, and the file that holds them: one file serves every size of a token map.

Shapes: V = target vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.errors import TokenMapError
from toolkit.weights import WeightsError, load_tensors, save_tensors

COUNTS = "counts.safetensors"


def parse_corpora(texts: Iterable[str]) -> dict[str, int]:
    """Read several of SPEC or SPEC:WEIGHT: the weight of each corpus, how often each of its tokens counts.

    An existing path that ends like a weight is a path. Weights of a corpus that is given more than once are added.
    Raises `TokenMapError`.
    """
    weights: dict[str, int] = {}
    for text in texts:
        weighted = re.fullmatch(r"(.+):([-+.\d]+)", text)
        spec, weight = weighted.groups() if weighted and not Path(text).exists() else (text, "1")
        if not weight.isdecimal() or int(weight) < 1:
            raise TokenMapError(
                f"the weight of corpus {spec} is {weight}; expected a whole number from 1, so that counts stay exact: "
                "write 1.5 to 1 as 3 and 2"
            )
        weights[spec] = weights.get(spec, 0) + int(weight)
    return weights


@dataclass(frozen=True)
class Part:
    """The unweighted counts [V] int64 of one task ("": not named) in a corpus.

    weight: how often each token counts. held_out: the text is not ranked, it measures the map.
    """

    spec: str
    weight: int
    held_out: bool
    task: str
    counts: torch.Tensor


@dataclass(frozen=True)
class Counts:
    """The counts of all corpora. about: tokenizer, vocab_size and forced_ids that they were counted with."""

    parts: tuple[Part, ...]
    about: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.about["vocab_size"])

    @property
    def forced_ids(self) -> list[int]:
        return list(self.about["forced_ids"])

    def total(self, held_out: bool = False) -> torch.Tensor:
        """Weighted counts [V] of the text that is ranked, or of the text that is held out."""
        total = torch.zeros(self.vocab_size, dtype=torch.int64)
        for one in self.parts:
            if one.held_out == held_out:
                total += one.weight * one.counts
        return total


def save_counts(path: str | Path, counts: Counts) -> None:
    """Write counts as safetensors, atomically: a tensor for each part, named by its number, and JSON as metadata."""
    tensors = {str(number): one.counts for number, one in enumerate(counts.parts)}
    parts = [{name: value for name, value in vars(one).items() if name != "counts"} for one in counts.parts]
    text = json.dumps({"about": counts.about, "parts": parts}, ensure_ascii=False)
    save_tensors(path, tensors, {"format": "pt", "counts": text})


def load_counts(path: str | Path) -> Counts:
    """Read counts from a file, or from a folder of `toolkit build-token-map`.

    Raises `TokenMapError` for a file that is absent, damaged or of another kind.
    """
    path = Path(path) / COUNTS if Path(path).is_dir() else Path(path)
    try:
        tensors = load_tensors(path)
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("counts")
    except (WeightsError, SafetensorError) as error:
        raise TokenMapError(f"{error}. Token counts are needed, as `toolkit build-token-map` writes them") from error
    if text is None:
        raise TokenMapError(
            f"{path} holds no token counts of corpora; count them with `toolkit build-token-map --corpus`"
        )
    stored = json.loads(text)
    parts = (Part(**one, counts=tensors[str(number)]) for number, one in enumerate(stored["parts"]))
    return Counts(tuple(parts), stored["about"])
