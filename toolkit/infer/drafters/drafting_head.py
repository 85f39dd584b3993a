"""What an autoregressive drafter asks of a head, and how each kind of head answers.

Shapes: B rows, N tokens a row, T = B*N, W feature width, H head hidden size, D ids drafted from.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.decoder_layer import Attend
from toolkit.heads.eagle2 import Eagle2Head
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.heads.head_config import HeadConfig
from toolkit.heads.mtp import MtpHead
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.cpu.int8_linear import Int8Linear
from toolkit.infer.cpu.packed_linear import PackedLinear, pack_linears
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.targets.features import AuxCapture, LastCapture
from toolkit.targets.load import Target


class DraftingHead(Protocol):
    """One kind of head. Its features arrive by hooks on the target.

    stages: modules that draft one level each, the last one all further levels (MTP layers); 1 for a head that always
    feeds itself. layers: attention layers of a stage. width: W. module: what holds its weights; output: what holds
    those of the output matrix, if that is the target's.
    """

    @property
    def module(self) -> Eagle3Head | Eagle2Head | MtpHead: ...
    @property
    def output(self) -> SharedOutput | None: ...
    @property
    def config(self) -> HeadConfig: ...
    @property
    def stages(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...

    def features(self) -> Tensor:
        """[B, N, W] of the target's last forward; taken once."""
        ...

    def first_hidden(self, features: Tensor) -> Tensor:
        """[..., W] -> [..., H]: what stage 0 reads where the target's own features are known."""
        ...

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        """One pass over [T, H] -> [T, H]: what the next step reads as hidden, and `logits` scores."""
        ...

    def logits(self, stage: int, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]."""
        ...

    def remove(self) -> None:
        """Take the hooks off the target."""
        ...


class Eagle3Drafting:
    """Features of several layers, fused by the head; a vocabulary and output matrix of its own."""

    stages, output = 1, None

    def __init__(self, head: Eagle3Head, target: Target) -> None:
        self.config = config = head.config
        self.layers = config.num_hidden_layers
        self.module = head
        self._capture = AuxCapture(target, config.aux_layer_ids)
        self.width = len(config.aux_layer_ids) * config.target_hidden_size

    def features(self) -> Tensor:
        return self._capture.take()

    def first_hidden(self, features: Tensor) -> Tensor:
        return self.module.fuse(features)

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        return self.module(embeds, hidden, positions, attend, reach)

    def logits(self, stage: int, hidden: Tensor) -> Tensor:
        return self.module.logits(hidden)

    def remove(self) -> None:
        self._capture.remove()


class SharedOutput(nn.Module):
    """The rows of the target's output matrix that a token map keeps, gathered once; all of them without a map."""

    def __init__(self, target: Target, draft: DraftCheckpoint) -> None:
        super().__init__()
        self._target = target
        self.lm_head: nn.Module = target.lm_head
        if draft.token_map.size < target.vocab_size:
            rows = _rows_of(target.lm_head.weight, target.lm_head.bias, draft.token_map.ids.to(target.device))
            self.lm_head = Int8Linear(rows) if isinstance(target.lm_head, Int8Linear) else rows
            if isinstance(target.lm_head, PackedLinear):
                pack_linears(self)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] as after the target's final norm -> logits [..., D], with the family's logit factor and soft cap."""
        return self._target.finish_scores(self.lm_head(hidden.to(self._target.dtype)))


def _rows_of(weight: Tensor, bias: Tensor | None, ids: Tensor) -> nn.Linear:
    rows = nn.Linear(weight.shape[1], len(ids), bias is not None, device="meta").requires_grad_(False)
    rows.weight = nn.Parameter(weight[ids], requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias[ids], requires_grad=False)
    return rows


class Eagle2Drafting:
    """The last hidden state is the feature, and what the head writes is the next one."""

    stages = 1

    def __init__(self, head: Eagle2Head, target: Target, output: SharedOutput) -> None:
        self.config = config = head.config
        self.module, self.output = head, output
        self._capture = LastCapture(target)
        self.layers, self.width = config.num_hidden_layers, config.hidden_size

    def features(self) -> Tensor:
        return self._capture.take()

    def first_hidden(self, features: Tensor) -> Tensor:
        return features

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        return self.module(embeds, hidden, positions, attend, reach)

    def logits(self, stage: int, hidden: Tensor) -> Tensor:
        return self.output(hidden)

    def remove(self) -> None:
        self._capture.remove()


class MtpDrafting:
    """A stage for every MTP layer; the last hidden state before or after the final norm, as the config says."""

    layers = 1

    def __init__(self, head: MtpHead, target: Target, output: SharedOutput) -> None:
        self.config = config = head.config
        self.module, self.output = head, output
        after_norm = config.target_hidden == "post_norm"
        self._capture = LastCapture(target) if after_norm else AuxCapture(target, (target.n_layers,))
        self.stages, self.width = config.num_mtp_layers, config.hidden_size

    def features(self) -> Tensor:
        return self._capture.take()

    def first_hidden(self, features: Tensor) -> Tensor:
        return features

    def step(self, stage: int, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int) -> Tensor:
        return self.module(embeds, hidden, positions, attend, reach, stage)

    def logits(self, stage: int, hidden: Tensor) -> Tensor:
        return self.output(self.module.normed(hidden, stage))

    def remove(self) -> None:
        self._capture.remove()


def drafting_head(draft: DraftCheckpoint, target: Target) -> DraftingHead:
    """The loaded head, hooked onto its target."""
    head = draft.head
    if isinstance(head, Eagle3Head):
        return Eagle3Drafting(head, target)
    output = SharedOutput(target, draft)
    return Eagle2Drafting(head, target, output) if isinstance(head, Eagle2Head) else MtpDrafting(head, target, output)


def head_scoring(head: DraftingHead) -> Scoring:
    """How its queries and keys are scored."""
    return Scoring(head.config.head_dim**-0.5, head.config.sliding_window)


def stage_shape(head: DraftingHead, like: Tensor) -> KVShape:
    """The cache entry of one stage, in `like`'s dtype and on its device."""
    return KVShape(head.layers, head.config.num_key_value_heads, head.config.head_dim, like.dtype, like.device)
