"""Sources of the target's hidden states in a training step: the target's forward, or a feature store on disk.

Both return arbitrary values in the rows of padding and of each sequence's last id; no supervised root reads them (see
supervision.py).

Shapes: B sequences, L positions, A auxiliary layers, H target hidden size.
"""

from __future__ import annotations

import torch

from toolkit.data.batches import Batch
from toolkit.data.feature_store import FeatureStore
from toolkit.targets.features import Capture, TargetFeatures, target_features
from toolkit.targets.target import Target
from toolkit.train.fused_target import FusedTarget


class OnlineFeatures:
    """Runs the target's forward for every batch; `capture` keeps the features."""

    def __init__(self, target: Target, capture: Capture) -> None:
        self.target, self.capture = target, capture
        self._fused = FusedTarget(target)

    def __call__(self, batch: Batch) -> TargetFeatures:
        batch = batch.to(self.target.device)
        with torch.no_grad(), self._fused.running():
            return target_features(self.target, self.capture, batch.input_ids, batch.starts)


class StoredFeatures:
    """Reads features from a store, onto `device`, without a forward of the target.

    aux_layer_ids: the layers whose inputs are concatenated as `aux`; None: `aux` is the last hidden state.
    """

    def __init__(self, store: FeatureStore, aux_layer_ids: tuple[int, ...] | None, device: torch.device) -> None:
        self.store, self.device = store, device
        ids = aux_layer_ids
        self._columns = [store.last_columns] if ids is None else [store.columns(layer) for layer in ids]

    def __call__(self, batch: Batch) -> TargetFeatures:
        """Padding and each sequence's last id are not stored; their rows are zeros."""
        stored = self._stored(batch)
        aux = torch.cat([stored[..., columns] for columns in self._columns], dim=-1)
        return TargetFeatures(aux=aux, last=stored[..., self.store.last_columns])

    def layer(self, batch: Batch, layer_id: int | None) -> torch.Tensor:
        """The input [B, L, H] of one stored layer; None: the last hidden state. Raises `FeatureStoreError` when the
        layer is not stored."""
        columns = self.store.last_columns if layer_id is None else self.store.columns(layer_id)
        return self._stored(batch)[..., columns]

    def _stored(self, batch: Batch) -> torch.Tensor:
        spec, ids = self.store.spec, batch.input_ids.cpu()
        stored = torch.zeros(*ids.shape, spec.width, dtype=spec.torch_dtype)
        for row, start, end in batch.sequences():
            stored[row, start : end - 1] = self.store.read(ids[row, start:end])
        return stored.to(self.device)
