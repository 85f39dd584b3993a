"""The inputs of a head at committed positions it has not read yet: target features and the tokens after them.

Shapes: B running rows, R rows, P positions held a row, W feature width, S stages of the head, H head hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DraftInputs:
    """Buffers that grow on demand. The first counts[r] positions of row r are valid; later entries are stale.

    features [R, P, W]; tokens [R, P]. carry [R, S-1, H]: the output of each stage but the last at its last committed
    position. The next stage reads it at its first unread position.
    """

    def __init__(self, width: int, stages: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.features = torch.zeros(0, 1, width, dtype=dtype, device=device)
        self.tokens = torch.zeros(0, 1, dtype=torch.long, device=device)
        self.carry = torch.zeros(0, stages - 1, hidden_size, dtype=dtype, device=device)
        self.counts: list[int] = []

    @property
    def stores(self) -> list[torch.Tensor]:
        """All tensors with one entry a row."""
        return [self.features, self.tokens, self.carry]

    def hold(self, rows: int, positions: int) -> None:
        """Grows the buffers to at least `rows` rows of `positions` positions."""
        old_rows, old_positions = self.tokens.shape
        if rows <= old_rows and positions <= old_positions:
            return
        features, tokens, carry = self.features, self.tokens, self.carry
        size = (max(rows, old_rows), old_positions if positions <= old_positions else max(positions, 2 * old_positions))
        self.features = features.new_zeros(*size, features.shape[2])
        self.tokens = tokens.new_zeros(size)
        self.carry = carry.new_zeros(size[0], *carry.shape[1:])
        self.features[:old_rows, :old_positions] = features
        self.tokens[:old_rows, :old_positions] = tokens
        self.carry[:old_rows] = carry

    def append(self, features: torch.Tensor, tokens: torch.Tensor, starts: Sequence[int]) -> None:
        """Writes features [B, A, W] and tokens [B, A] into rows 0..B-1, from position starts[b] on."""
        rows, longest = tokens.shape
        self.hold(rows, max(starts) + longest)
        if min(starts) == max(starts):
            here = slice(starts[0], starts[0] + longest)
            self.features[:rows, here], self.tokens[:rows, here] = features, tokens
        else:
            every = torch.arange(rows, device=tokens.device)[:, None]
            places = torch.tensor(starts, device=tokens.device)[:, None] + torch.arange(longest, device=tokens.device)
            self.features[every, places], self.tokens[every, places] = features, tokens

    def move_row(self, destination: int, source: int) -> None:
        for held in self.stores:
            held[destination] = held[source]
        self.counts[destination] = self.counts[source]
