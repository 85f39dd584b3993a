"""The target ids that a draft vocabulary keeps, and the mapping in both directions (EAGLE-3's d2t and t2d).

Shapes: D = draft vocabulary, V = target vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from toolkit.errors import TokenMapError


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Draft id i stands for target id `ids[i]`.

    `ids` [D] int64 must be ascending, unique and within [0, vocab_size), else `TokenMapError` is raised. A duplicate
    would let top-k offer one token twice as siblings, which makes sampled verification inexact.
    """

    ids: torch.Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        ids = _checked(self.ids, self.vocab_size).clone()
        if (ids[1:] < ids[:-1]).any():
            raise TokenMapError(
                "token map ids are not ascending, so draft ids stand for other tokens; sort the ids together with the "
                "rows of the head's output matrix, or build the map again by toolkit build-token-map"
            )
        object.__setattr__(self, "ids", ids)

    @classmethod
    def from_ids(cls, ids: torch.Tensor | Iterable[int], vocab_size: int) -> TokenMap:
        """Make a map of these target ids, given in any order. Raises `TokenMapError` as the class does."""
        return cls(as_ids(ids).sort().values, vocab_size)

    @classmethod
    def from_d2t(cls, d2t: torch.Tensor | Iterable[int], vocab_size: int) -> TokenMap:
        """Make a map from offsets `d2t` [D] (target = draft + d2t[draft]); the resulting ids must be ascending."""
        offsets = as_ids(d2t)
        return cls(offsets + torch.arange(offsets.numel()), vocab_size)

    @classmethod
    def identity(cls, vocab_size: int) -> TokenMap:
        """Make the map that keeps the whole target vocabulary."""
        return cls(torch.arange(vocab_size), vocab_size)

    @property
    def size(self) -> int:
        return self.ids.numel()

    @cached_property
    def d2t(self) -> torch.Tensor:
        """Offsets [D] int64: target = draft + d2t[draft]."""
        return self.ids - torch.arange(self.size)

    @cached_property
    def t2d(self) -> torch.Tensor:
        """Mask [V] bool: True where the target id is in the draft vocabulary."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    @cached_property
    def sha256(self) -> str:
        """Hex sha256 of the vocabulary size and the ids."""
        text = f"{self.vocab_size}:" + ",".join(map(str, self.ids.tolist()))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map draft ids of any shape to target ids, on the same device."""
        return self._on(draft_ids.device, "ids")[draft_ids]

    def to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Map target ids of any shape to draft ids, on the same device; -1 where a target id is not kept."""
        return self._on(target_ids.device, "_inverse")[target_ids]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenMap) and self.vocab_size == other.vocab_size and torch.equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"TokenMap({self.size} of {self.vocab_size} ids, sha256 {self.sha256[:12]})"

    @cached_property
    def _by_device(self) -> dict[tuple[str, torch.device], torch.Tensor]:
        return {}

    def _on(self, device: torch.device, name: str) -> torch.Tensor:
        # to_target runs in every draft step, so the tensors are copied once per device.
        if (name, device) not in self._by_device:
            self._by_device[name, device] = getattr(self, name).to(device)
        return self._by_device[name, device]

    @cached_property
    def _inverse(self) -> torch.Tensor:
        inverse = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        inverse[self.ids] = torch.arange(self.size)
        return inverse


def as_ids(values: torch.Tensor | Iterable[int]) -> torch.Tensor:
    """Return ids as int64 [D] on the CPU, in the same order. Raises `TokenMapError` for what is no row of integers."""
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(list(values))
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.is_complex()):
        raise TokenMapError(f"token ids are {tensor.dtype}; expected integers")
    if tensor.dim() != 1:
        raise TokenMapError(f"token ids have shape {tuple(tensor.shape)}; expected one dimension")
    return tensor.detach().to("cpu", torch.int64)


def _checked(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return ids [D] int64 on the CPU in the same order; check that they are not empty, in range and unique."""
    ids = as_ids(ids)
    if ids.numel() == 0:
        raise TokenMapError("the token map is empty; at least one id is required")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel():
        raise TokenMapError(
            f"{outside.numel()} ids are outside the target vocabulary [0, {vocab_size}): {some(outside)}; "
            "the map was made for another tokenizer, build it again for this target"
        )
    unique, counts = ids.unique(return_counts=True)
    if unique.numel() != ids.numel():
        raise TokenMapError(
            f"{ids.numel() - unique.numel()} duplicate ids in a map of {ids.numel()}: {some(unique[counts > 1])}; "
            "each id may occur once, build the map again with `toolkit build-token-map`"
        )
    return ids


def some(ids: torch.Tensor, limit: int = 8) -> str:
    """Return the first ids as text."""
    shown = ", ".join(map(str, ids[:limit].tolist()))
    return shown + (", ..." if ids.numel() > limit else "")
