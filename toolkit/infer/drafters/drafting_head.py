"""A loaded draft head on its target: its features, output layer, KV caches, and the inputs it has not read yet.

Shapes: B rows, N or n tokens a row, T = B*N, W feature width, H head hidden size, D size of the draft vocabulary, S
stages of the head. Of the inputs: R rows, P positions held a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.decoder_layer import PLAIN, Attend, AttendingLayer, LayerOps, using
from toolkit.heads.draft_head import DraftHead
from toolkit.infer.attention.fused_layer import replaced
from toolkit.infer.attention.metadata import AttentionMetadata, PagedAttend
from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.kernels import reference
from toolkit.infer.kernels.dispatch import Ops, ops_for
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.request.draft_tree import upload
from toolkit.targets.features import AuxCapture, LastCapture
from toolkit.targets.fixed_linear import FixedLinear, copy_weights, linear_rows
from toolkit.targets.target import Target


class SharedOutput(nn.Module):
    """The target's output matrix, cut once to the rows that the token map keeps, and quantised as the head is; the
    whole matrix without a map."""

    def __init__(self, target: Target, draft: DraftCheckpoint) -> None:
        super().__init__()
        self._target, self._ids = target, draft.token_map.ids.to(target.device)
        self.lm_head: nn.Module = target.lm_head
        if draft.token_map.size < target.vocab_size:
            rows = linear_rows(self.lm_head.weight, self.lm_head.bias, self._ids)
            fixed = [one for one in (*draft.head.modules(), self.lm_head) if isinstance(one, FixedLinear)]
            least = min(fixed, key=lambda one: one.quantization is None, default=None)
            self.lm_head = rows if least is None else least.like(rows)

    def weights_changed(self) -> None:
        """Copies the rows again, in place: recorded rounds read them."""
        whole = self._target.lm_head
        if self.lm_head is not whole:
            rows = linear_rows(whole.weight, whole.bias, self._ids)
            copy_weights(self.lm_head, dict(rows.named_parameters()))

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., D] of normed states [..., H], with the target family's logit factor and soft cap."""
        return self._target.finish_scores(self.lm_head(hidden.to(self._target.dtype)))


class DraftingHead:
    """A head as the drafter uses it. Hooks on the target capture its features.

    module: the head with its weights. output: the target's output matrix, for a head without its own; else None.
    to_target: the target ids of the draft vocabulary, [D].
    stages, width: as in its `HeadConfig` (width is `feature_size`, W).
    """

    def __init__(self, draft: DraftCheckpoint, target: Target) -> None:
        self.module, self.config = draft.head, draft.head.config
        self.stages, self.width = self.config.mtp_layers, self.config.feature_size
        self.output = None if self.config.own_vocabulary else SharedOutput(target, draft)
        # Returns the logits of normed states: [..., H] -> [..., D].
        self.scores: nn.Module = self.module.lm_head if self.output is None else self.output
        self.to_target = draft.token_map.ids.to(target.device)
        self.ops = _layer_ops(ops_for(target.device.type))
        self._embed = target.embed_tokens
        self.module.read_target(self._embed)
        ids = self.config.features.layer_ids(target.n_layers)
        self._capture = LastCapture(target) if ids is None else AuxCapture(target, ids)

    def features(self) -> Tensor:
        """Returns the features of the target's last forward, [B, N, W]. They can be taken once."""
        return self._capture.take()

    def put_features(self, features: Tensor) -> None:
        """Sets those of a replayed forward, [B, N, W]: it runs no hooks."""
        self._capture.put(features)

    def first_hidden(self, features: Tensor) -> Tensor:
        """Returns the hidden input of stage 0 for the target's features: [..., W] -> [..., H]."""
        with using(self.ops):
            return self.module.first_hidden(features)

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        """Runs one stage over [T, H] -> [T, H]. The result is the next step's `hidden` and the input of `logits`."""
        with using(self.ops):
            return self.module(embeds, hidden, positions, attend, reach, stage)

    def logits(self, stage: int, hidden: Tensor) -> Tensor:
        """Returns the logits of a stage's states: [..., H] -> [..., D]."""
        with using(self.ops):
            states = self.module.normed(hidden)
        scores: Tensor = self.scores(states)
        return scores

    def weights_changed(self) -> None:
        """Copies again what it holds of the target's embedding and output matrix."""
        self.module.read_target(self._embed)
        if self.output is not None:
            self.output.weights_changed()

    def remove(self) -> None:
        """Removes the hooks from the target."""
        self._capture.remove()


def _layer_ops(ops: Ops) -> LayerOps:
    """The device's kernels for a head's layers."""
    if ops.rms_norm is reference.rms_norm:
        return PLAIN if ops.head_norm is None else PLAIN._replace(rms_norm=ops.head_norm)
    return LayerOps(ops.rotate, ops.gated, lambda x, weight, eps: ops.rms_norm(x, weight, eps, 0.0, False))


def cache_shape(head: DraftHead, device: torch.device) -> KVShape:
    """The shape of the KV cache of one of the head's stages."""
    sizes, dtype = head.kv_sizes(), next(head.parameters()).dtype
    return KVShape(head.config.layers, sizes.kv_heads, sizes.key_dim, dtype, device, value_dim=sizes.value_dim)


class HeadReader:
    """A head with one KV cache per stage; `read` writes to them. window: of its attention; None: it has none.

    writes_alone: `write` can take the place of `read` where the states are not needed: it runs neither the attention
    nor what follows it, which is three quarters of an EAGLE-3 head."""

    def __init__(self, head: DraftingHead, target: Target, pool: PagePool) -> None:
        shape = cache_shape(head.module, target.device)
        self.head, self.dtype, self._device = head, shape.dtype, target.device
        self._embed = target.embed_tokens
        self.window, self.writes_alone = head.config.sliding_window, head.module.writes_alone
        self._scoring = Scoring(shape.head_dim**-0.5, self.window)
        self.caches = [KVCache(shape, pool) for _ in range(head.stages)]
        native = ops_for(target.device.type).head_layer
        self._native: dict[nn.Module, Callable[..., Tensor]] = {}  # the forwards of layers that have a native one
        layers = [one for one in head.module.modules() if isinstance(one, AttendingLayer)]
        for layer in layers:
            if native is not None and (call := native(layer)) is not None:
                self._native[layer] = call

    def read(
        self, stage: int, tokens: Tensor, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata, reach: int
    ) -> Tensor:
        """Runs a stage over tokens [B, n], hidden [B, n, H], positions [B, n] < reach -> [B, n, H]."""
        rows, new = tokens.shape
        attend = PagedAttend(metadata, self._scoring, (rows, new))
        embeds = self._embed(tokens).to(self.dtype).flatten(0, 1)
        with replaced(self._native):
            out = self.head.step(stage, embeds, hidden.flatten(0, 1), positions.flatten(), attend, reach)
        return out.view(rows, new, -1)

    def write(self, tokens: Tensor, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata, reach: int) -> None:
        """Writes the keys and values that `read` would write; arguments as there. Only if `writes_alone`."""
        embeds = self._embed(tokens).to(self.dtype).flatten(0, 1)
        with using(self.head.ops):
            entries = self.head.module.keys_values(embeds, hidden.flatten(0, 1), positions.flatten(), reach)
        metadata.write(0, *(one.view(*tokens.shape, *one.shape[1:]).transpose(1, 2) for one in entries))


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
    def stores(self) -> list[Tensor]:
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

    def append(self, features: Tensor, tokens: Tensor, starts: Sequence[int]) -> None:
        """Writes features [B, A, W] and tokens [B, A] into rows 0..B-1, from position starts[b] on."""
        rows, longest = tokens.shape
        self.hold(rows, max(starts) + longest)
        if min(starts) == max(starts):
            here = slice(starts[0], starts[0] + longest)
            self.features[:rows, here], self.tokens[:rows, here] = features, tokens
        else:
            every = torch.arange(rows, device=tokens.device)[:, None]
            places = upload(starts, tokens.device)[:, None] + torch.arange(longest, device=tokens.device)
            self.features[every, places], self.tokens[every, places] = features, tokens

    def set_first_tokens(self, tokens: Mapping[int, int]) -> None:
        """Writes the token of the first position of some rows, by row."""
        if tokens:
            rows, first = upload([list(tokens), list(tokens.values())], self.tokens.device)
            self.tokens[rows, 0] = first

    def move_row(self, destination: int, source: int) -> None:
        for held in self.stores:
            held[destination] = held[source]
        self.counts[destination] = self.counts[source]
