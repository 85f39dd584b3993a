"""The counts of several corpora, and the file that holds them: one file serves every size of a token map.

Shapes: V = target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.errors import TokenMapError
from toolkit.tokenmap.corpus import Corpus
from toolkit.tokenmap.count import Tally
from toolkit.weights import WeightsError, load_tensors, save_tensors

COUNTS = "counts.safetensors"


@dataclass(frozen=True)
class CorpusCounts:
    """The unweighted counts of one corpus.

    held_out: all of it is held-out text, of which no token is ranked; else only its held-out rollouts are.
    """

    corpus: Corpus
    tally: Tally
    held_out: bool = False

    def ranked_counts(self) -> torch.Tensor:
        """Counts [V] that are ranked."""
        return torch.from_numpy(self.tally.total(held_out=False)) * (not self.held_out)

    def held_out_counts(self) -> torch.Tensor:
        """Counts [V] of held-out text."""
        own = self.tally.total(held_out=True)
        return torch.from_numpy(own + self.tally.total(held_out=False) if self.held_out else own)

    def by_task(self) -> dict[str, torch.Tensor]:
        """Counts [V] of each named task, most tokens first: those that are ranked, or all of a held-out corpus."""
        found: dict[str, torch.Tensor] = {}
        for (held_out, task), array in self.tally.counts.items():
            if task and (self.held_out or not held_out):
                found[task] = found.get(task, 0) + torch.from_numpy(array)
        return dict(sorted(found.items(), key=lambda one: (-int(one[1].sum()), one[0])))


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
        f"{at}/{'held_out' if held_out else 'counted'}/{task}": torch.from_numpy(array)
        for at, one in enumerate(counts.corpora)
        for (held_out, task), array in one.tally.counts.items()
    }
    corpora = [
        {
            "spec": one.corpus.spec,
            "weight": one.corpus.weight,
            "held_out": one.held_out,
            **{name: getattr(one.tally, name) for name in ("documents", "many_tasks", "skipped", "first_skipped")},
        }
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
    vocab_size = int(stored["about"]["vocab_size"])
    corpora = []
    for at, one in enumerate(stored["corpora"]):
        corpus = Corpus(one.pop("spec"), one.pop("weight"))
        held_out = one.pop("held_out")
        tally = Tally(vocab_size, **one)
        for name, tensor in tensors.items():
            index, split, task = name.split("/", 2)
            if int(index) == at:
                tally.counts[split == "held_out", task] = tensor.numpy()
        corpora.append(CorpusCounts(corpus, tally, held_out))
    return Counts(tuple(corpora), stored["about"])
