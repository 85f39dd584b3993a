"""A loaded draft head on its target: the source of its features, and the output layer that scores its states.

Shapes: B rows, N tokens a row, T = B*N, W feature width, H head hidden size, D size of the draft vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.decoder_layer import Attend
from toolkit.heads.head_config import HeadConfig
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.targets.features import AuxCapture, LastCapture
from toolkit.targets.fixed_linear import FixedLinear, linear_rows
from toolkit.targets.target import Target


class SharedOutput(nn.Module):
    """The target's output matrix, cut once to the rows that the token map keeps; the whole matrix without a map."""

    def __init__(self, target: Target, draft: DraftCheckpoint) -> None:
        super().__init__()
        self._target = target
        self.lm_head: nn.Module = target.lm_head
        if draft.token_map.size < target.vocab_size:
            head, ids = target.lm_head, draft.token_map.ids.to(target.device)
            self.lm_head = (
                head.rows_of(ids) if isinstance(head, FixedLinear) else linear_rows(head.weight, head.bias, ids)
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., D] of normed states [..., H], with the target family's logit factor and soft cap."""
        return self._target.finish_scores(self.lm_head(hidden.to(self._target.dtype)))


class DraftingHead:
    """A head as the drafter uses it. Hooks on the target capture its features.

    module: the head with its weights. output: the target's output matrix, for a head without its own; else None.
    stages, layers, width: as in `HeadConfig` (width is `feature_size`, W).
    """

    def __init__(self, draft: DraftCheckpoint, target: Target) -> None:
        self.module, config = draft.head, draft.head.config
        self.stages, self.layers, self.width = config.stages, config.layers, config.feature_size
        self.output = None if config.own_vocabulary else SharedOutput(target, draft)
        ids = config.features.layer_ids(target.n_layers)
        self._capture = LastCapture(target) if ids is None else AuxCapture(target, ids)

    @property
    def config(self) -> HeadConfig:
        return self.module.config

    def features(self) -> Tensor:
        """Returns the features of the target's last forward, [B, N, W]. They can be taken once."""
        return self._capture.take()

    def first_hidden(self, features: Tensor) -> Tensor:
        """Returns the hidden input of stage 0 for the target's features: [..., W] -> [..., H]."""
        return self.module.first_hidden(features)

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        """Runs one stage over [T, H] -> [T, H]. The result is the next step's `hidden` and the input of `logits`."""
        return self.module(embeds, hidden, positions, attend, reach, stage)

    def logits(self, stage: int, hidden: Tensor) -> Tensor:
        """Returns the logits of a stage's states: [..., H] -> [..., D]."""
        states = self.module.read(stage, hidden)
        return self.module.logits(states) if self.output is None else self.output(states)

    def remove(self) -> None:
        """Removes the hooks from the target."""
        self._capture.remove()


def head_scoring(head: DraftingHead) -> Scoring:
    """Returns the attention scale and the sliding window of the head."""
    return Scoring(head.config.head_dim**-0.5, head.config.sliding_window)


def stage_shape(head: DraftingHead, like: Tensor) -> KVShape:
    """Returns the shape of one stage's KV cache, with the dtype and the device of `like`."""
    return KVShape(head.layers, head.config.num_key_value_heads, head.config.head_dim, like.dtype, like.device)
