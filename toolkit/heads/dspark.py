"""DSpark (arXiv 2607.05147) and DFlash (arXiv 2602.06036) block drafters, in the form that SGLang, vLLM and speculators
serve and train.

Shapes: T tokens, n blocks of b places, Ht target hidden size, H head hidden size, A auxiliary layers, D draft
vocabulary, V target vocabulary, r what a correction reads beside the state.

    position        0 ..  t            t+1          t+2       ..  t+b
    token           x_0   x_t          x_{t+1}      mask          mask
    keys, values    from the target's  from the block itself; all queries of the block see all of them
                    features f_0..f_t
    DSpark predicts                    x_{t+2}      x_{t+3}       x_{t+1+b}
    DFlash predicts                    -            x_{t+2}       x_{t+b}

In a causal head (JetSpec, arXiv 2606.18394) a query sees the places of its block up to its own.

The layers are Qwen3's. A query is the target's embedding of x_{t+1} or of one mask token; the features reach it by the
attention alone: `fc` and one norm, then the keys and values of every layer. DSpark's logits get a bias of rank r that
depends on the token before the predicted one; DFlash has none. `correction.py` has this bias and others in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from toolkit.heads.correction import CORRECTIONS, Correction, Embed, Serving, plain_scores
from toolkit.heads.decoder_layer import Attend, DecoderLayer, RMSNorm, Rope
from toolkit.heads.draft_head import DraftHead, LayerCopy, OutputMatrix, Project, WarmStart
from toolkit.heads.head_config import AuxHeadConfig, EngineNames, HeadError

if TYPE_CHECKING:  # serving does not import pydantic
    from toolkit.train_settings import HeadSettings


# Keys [T, kv_heads, hd], rotated, and values of the context in one layer. Called once per layer, in order.
Write = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class DSparkConfig(AuxHeadConfig):
    """block_size: places of a block, b. correction: see `correction.py`. markov_rank: of the Markov bias; 0 without one
    ("markov" with rank 0 is "none"). mask_token_id: whose embedding the masks are.
    sample_from_anchor: the first place drafts too (DSpark), else the masks alone do (DFlash). confidence: the head says
    how sure a draft is; confidence_with_markov: from what the bias reads, too. own_output: the head has an output
    matrix; else it scores by the target's. causal: a place of the block sees no later place.

    Raises HeadError for an unknown correction, less than two places, a sliding window or a mask token outside of the
    vocabulary.
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
    correction: str = "markov"

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise HeadError(
                f"dspark config: correction is {self.correction!r}; one of {', '.join(CORRECTIONS)} is needed"
            )
        if self.correction == "markov" and not self.markov_rank:
            object.__setattr__(self, "correction", "none")
        elif self.correction != "markov":
            object.__setattr__(self, "markov_rank", 0)
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
        """As of `AuxHeadConfig`. Without a correction the head is DFlash's, which other engines serve."""
        dflash = dict.fromkeys(("sample_from_anchor", "confidence", "confidence_with_markov"), False)
        correction = settings.correction or ("markov" if settings.markov_rank else "none")
        own = super().settings_fields(settings) | {"correction": correction}
        return own | dflash if correction == "none" else own

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


class ConfidenceHead(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.proj = nn.Linear(columns, 1)


class DSparkHead(DraftHead):
    """`fc`, `hidden_norm`, `layers.N.*`, `norm`, `lm_head` (if own_output), `markov_head.{markov_w1, markov_w2}`,
    `confidence_head.proj`, the names of DSpark's checkpoints; another correction has its own name in place of
    `markov_head`. The embedding is the target's.

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
        kind = CORRECTIONS[config.correction]
        self.add_module(kind.name, kind(config))
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

    @property
    def correction(self) -> Correction:
        found: Any = getattr(self, CORRECTIONS[self.config.correction].name)
        return found

    @property
    def zeroed(self) -> tuple[str, ...]:
        return tuple(f"{self.correction.name}.{name}" for name in self.correction.zeroed)

    def after(self, states: Tensor, tokens: Tensor, embed: Embed) -> Tensor:
        """Outputs of `forward` [..., H] and ids [...] of the tokens before the predicted ones -> [..., H + r], the
        input of `logits` and `confident`. embed: gives the target's embeddings of these tokens."""
        return self.correction.read(self.normed(states), tokens, embed)

    def extended(self, project: Project) -> Project:
        return self.correction.extended(project)

    def logits(self, states: Tensor, project: Project = plain_scores) -> Any:
        """Outputs of `after` [T, H + r] -> corrected logits [T, D], or the result of `project`."""
        if not self.config.own_output:
            return super().logits(states, project)
        return self.lm_head(states, self.extended(project))

    def scores(self, states: Tensor, base: Tensor, parents: Tensor, serving: Serving) -> Tensor:
        """Corrected logits [B, n, D] of the children of parents [B, n]. states: outputs of `forward` [B, n, H] at their
        place, base [B, n, D]: logits of these without a correction; or one of each for all parents of a row."""
        return self.correction.scores(lambda: self.normed(states), base, parents, serving)

    @torch.no_grad()
    def map_rows(self, places: Tensor) -> None:
        self.correction.map_rows(places)

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
