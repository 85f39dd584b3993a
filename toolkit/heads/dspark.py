"""DSpark (arXiv 2607.05147) and DFlash (arXiv 2602.06036) block drafters, in the form that SGLang, vLLM and speculators
serve and train.

Shapes: T tokens, n blocks of b places, Ht target hidden size, H head hidden size, A auxiliary layers, D draft
vocabulary, V target vocabulary, r rank of the Markov bias.

    position        0 ..  t            t+1          t+2       ..  t+b
    token           x_0   x_t          x_{t+1}      mask          mask
    keys, values    from the target's  from the block itself; all queries of the block see all of them
                    features f_0..f_t
    DSpark predicts                    x_{t+2}      x_{t+3}       x_{t+1+b}
    DFlash predicts                    -            x_{t+2}       x_{t+b}

In a causal head (JetSpec, arXiv 2606.18394) a query sees the places of its block up to its own.

The layers are Qwen3's. A query is the target's embedding of x_{t+1} or of one mask token; the features reach it by the
attention alone: `fc` and one norm, then the keys and values of every layer. DSpark's logits get a bias of rank r,
`markov_w2(markov_w1[x])`, that depends on the token x before the predicted one; DFlash has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.heads.decoder_layer import Attend, DecoderLayer, RMSNorm, Rope
from toolkit.heads.draft_head import DraftHead, LayerCopy, OutputMatrix, Project, WarmStart
from toolkit.heads.head_config import AuxHeadConfig, EngineNames, HeadError

if TYPE_CHECKING:  # serving does not import pydantic
    from toolkit.train_settings import HeadSettings


# Keys [T, kv_heads, hd], rotated, and values of the context in one layer. Called once per layer, in order.
Write = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class DSparkConfig(AuxHeadConfig):
    """block_size: places of a block, b. markov_rank: r; 0 means no bias. mask_token_id: whose embedding the masks are.
    sample_from_anchor: the first place drafts too (DSpark), else the masks alone do (DFlash). confidence: the head says
    how sure a draft is; confidence_with_markov: from what the bias reads, too. own_output: the head has an output
    matrix; else it scores by the target's. causal: a place of the block sees no later place.

    Raises HeadError for less than two places, a sliding window or a mask token outside of the vocabulary.
    """

    kind = "dspark"
    engine_names = EngineNames(sglang="DSPARK", vllm="dspark")

    own_settings = ("markov_rank", "causal")

    block_size: int = 4
    markov_rank: int = 64
    mask_token_id: int = 0
    sample_from_anchor: bool = True
    confidence: bool = True
    confidence_with_markov: bool = True
    own_output: bool = True
    causal: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise HeadError(f"dspark config: block_size is {self.block_size}; at least 2 is needed")
        if self.sliding_window is not None:
            raise HeadError(
                f"dspark config: sliding_window is {self.sliding_window}, but a block sees all its context; leave it "
                "out"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise HeadError(
                f"dspark config: mask_token_id is {self.mask_token_id}; an id below vocab_size, {self.vocab_size}, is "
                "needed"
            )

    @property
    def own_vocabulary(self) -> bool:  # type: ignore[override]
        return self.own_output

    @property
    def drafts_at_once(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def for_steps(self, steps: int) -> Self:
        if steps < 2:
            raise HeadError(f"train.unroll.ttt_steps is {steps}; a block has at least 2 tokens")
        return replace(self, block_size=self.block_size - self.drafts_at_once + steps)

    def with_vocabulary(self, size: int) -> Self:
        return replace(self, draft_vocab_size=size, own_output=True)

    @classmethod
    def settings_fields(cls, settings: HeadSettings) -> dict[str, Any]:
        """As of `AuxHeadConfig`. Without a bias the head is DFlash's, the one such form that other engines serve."""
        dflash = dict.fromkeys(("sample_from_anchor", "confidence", "confidence_with_markov"), False)
        return super().settings_fields(settings) | ({} if settings.markov_rank else dflash)

    @classmethod
    def from_settings(
        cls, settings: HeadSettings, config: Any, *, vocab_size: int, draft_vocab_size: int, n_layers: int
    ) -> Self:
        """As `AuxHeadConfig.from_settings`. Without a setting the mask token is the last id of the vocabulary."""
        built = super().from_settings(
            settings, config, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, n_layers=n_layers
        )
        given = settings.mask_token_id
        return replace(built, mask_token_id=vocab_size - 1 if given is None else given)


class MarkovHead(nn.Module):
    """`markov_w1` [V, r] reads the token before, `markov_w2` [D, r] gives the bias."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = OutputMatrix(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.proj = nn.Linear(columns, 1)


class DSparkHead(DraftHead):
    """`fc`, `hidden_norm`, `layers.N.*`, `norm`, `lm_head` (if own_output), `markov_head.{markov_w1, markov_w2}`,
    `confidence_head.proj`, the names of DSpark's checkpoints. The embedding is the target's.

    mask [1, H]: the embedding of the mask token, the target's; not stored with the head. has_confidence: whether
    `confident` says something.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    mask: Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(
            DecoderLayer(config, attention_bias=False, qk_norm=True) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps=eps)
        if config.own_output:
            self.lm_head = OutputMatrix(width, config.draft_vocab_size, bias=False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        columns = width + (config.markov_rank if config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(columns) if config.confidence else None
        self.has_confidence = config.confidence
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        self.register_buffer("mask", torch.full((1, width), float("nan")), persistent=False)

    @torch.no_grad()
    def read_target(self, embed: Callable[[Tensor], Tensor]) -> None:
        # In place: recorded rounds read it.
        self.mask.copy_(embed(torch.tensor([self.config.mask_token_id], device=self.mask.device)))

    def first_hidden(self, features: Tensor) -> Tensor:
        """Features of the target [..., A*Ht] -> [..., H]: what the keys and values of every layer read."""
        return self.hidden_norm(self.fc(features))

    def write_context(self, hidden: Tensor, positions: Tensor, reach: int, write: Write) -> None:
        """Give the keys and values of known positions to `write`, layer by layer.

        hidden [T, H]: of `first_hidden`; positions [T] int64, all below `reach`."""
        cos, sin = self.rope(positions, hidden, reach)
        layer: Any
        for layer in self.layers:
            write(*layer.self_attn.keys_values(hidden, cos, sin))

    def queries(self, embeds: Tensor) -> Tensor:
        """The input [T, H] of the first layer; arguments as of `forward`."""
        anchors = embeds.view(-1, self.config.block_size, embeds.shape[-1])[:, :1]
        masks = self.mask.to(embeds.dtype).expand(len(anchors), self.config.block_size - 1, -1)
        return torch.cat((anchors, masks), dim=1).flatten(0, 1)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int, mtp_layer: int = 0
    ) -> Tensor:
        """Draft n blocks in one pass; T = n*b, block by block.

        embeds [T, H]: of the token x_{t+1} at the first place of a block; the others are not read. hidden: not read.
        positions [T]: t+1, t+2, .. Returns [T, H], the input of `after`.
        """
        x = self.queries(embeds)
        cos, sin = self.rope(positions, embeds, reach)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def normed(self, states: Tensor) -> Tensor:
        return self.norm(states)

    # -- logits --------------------------------------------------------------------------------------------------------

    def before(self, tokens: Tensor) -> Tensor | None:
        """What the Markov bias reads of the tokens before the predicted ones: ids [...] -> [..., r]; None without a
        bias."""
        return None if self.markov_head is None else self.markov_head.markov_w1(tokens)

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Outputs of `forward` [..., H] and ids [...] of the tokens before the predicted ones -> [..., H + r], the
        input of `logits` and `confident`."""
        normed, before = self.normed(states), self.before(tokens)
        return normed if before is None else torch.cat((normed, before.to(normed.dtype)), dim=-1)

    def bias_rows(self) -> Tensor | None:
        """The second factor of the bias, [r, D]; None without a bias."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight.T.clone()

    def extended(self, project: Project) -> Project:
        """`project` as it is called with outputs of `after` [T, H + r] and an output matrix [D, H], beside which stands
        that of the bias: [D, H + r]."""
        markov = self.markov_head
        if markov is None:
            return project

        def joined(states: Tensor, matrix: Tensor, *more: Any) -> Any:
            if more and more[-1] is not None:
                raise HeadError(
                    "the target has a logit factor or soft cap, which other engines do not apply to the bias of a "
                    "DSpark head; train a head with an output matrix of its own"
                )
            # A sharded weight is whole only inside its layer's forward.
            return markov.markov_w2(
                states, lambda x, bias: project(x, torch.cat((matrix, bias.to(matrix.dtype)), dim=1), *more)
            )

        return joined

    def logits(self, states: Tensor, project: Project = F.linear) -> Any:
        """Outputs of `after` [T, H + r] -> logits [T, D] with the Markov bias, or the result of `project`."""
        if not self.config.own_output:
            return super().logits(states, project)
        return self.lm_head(states, self.extended(project))

    @torch.no_grad()
    def map_rows(self, places: Tensor) -> None:
        if self.markov_head is not None:
            old = self.markov_head.markov_w2.weight
            new = OutputMatrix(self.config.markov_rank, len(places), bias=False).to(old)
            new.weight.copy_(old[places.clamp(min=0)] * (places >= 0).to(old.dtype)[:, None])
            self.markov_head.markov_w2 = new

    def confident(self, states: Tensor) -> Tensor | None:
        """Outputs of `after` -> logit [...] of the chance that the target accepts the draft, if it accepts those
        before; None: the head has no such output. The training of it does not change the rest of the head."""
        if self.confidence_head is None:
            return None
        proj = self.confidence_head.proj
        return proj(states[..., : proj.in_features].detach()).squeeze(-1)

    def warm_start(self) -> WarmStart:
        """Copy the target's last layers. `fc` gives the input of the first of them; its norm is the context's too."""
        count = len(self.layers)
        return WarmStart(
            copies=[LayerCopy(layer, at - count, prefix=f"layers.{at}.") for at, layer in enumerate(self.layers)],
            last_norm=("norm.weight", self.norm),
            solved=self.fc,
            solved_reads=lambda _embeds, features: features,
            ahead=False,
            same_norms=[(self.hidden_norm, self.layers[0].get_submodule("input_layernorm"))],
        )
