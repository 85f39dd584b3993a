"""Where a head starts: random, from the target's weights, with which training needs fewer tokens, or from a head that
exists (`train.init`).

Shapes: P positions, H hidden size, W feature width, C columns of the regression's input, D rows of an output matrix.

A head replaces the target's last layers one position ahead: it reads position i and predicts their output at i+1. So
its layers start as copies of the target's last layers, its norm and output matrix as the target's. Its input layer
starts as a ridge regression to the input of the first copied layer at i+1. `DraftHead.warm_start` lists the parts.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint.draft_dir import DraftCheckpoint, check_draft_fits, rope_difference
from toolkit.checkpoint.files import weights_sha256
from toolkit.checkpoint.open_head import open_head
from toolkit.data.batches import Batch
from toolkit.heads.decoder_layer import AttendingLayer
from toolkit.heads.draft_head import DraftHead, OutputMatrix, WarmStart
from toolkit.heads.head_config import HeadConfig, full_attention_rope
from toolkit.infer.parallel.sharded_models import undivided
from toolkit.log import get_logger
from toolkit.recipe_yaml import RecipeError
from toolkit.targets.facts import TargetFacts
from toolkit.targets.features import AuxCapture, run_body
from toolkit.targets.fixed_linear import FixedLinear
from toolkit.targets.load import unsharded
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.target_side import StoredFeatures
from toolkit.train_settings import HeadSettings, TrainSettings, changed

log = get_logger(__name__)

RANDOM_STD = 0.02
# With fewer positions the regression overfits: at 12 a column the demo's head predicted 38 % of the fitted tokens
# before any training, but only 26 % of other tokens.
POSITIONS_PER_COLUMN = 40
# The penalty, with all columns scaled to variance 1. On the demo target a larger one explains more of the variance at
# other positions (0.30 at 0.3, 0.25 here), but its head predicts fewer of their tokens (24 %, 27 % here).
RIDGE = 1e-3
# In EAGLE-3's first layer the input of these is the embedding and the hidden state, concatenated.
CONCATENATED_INPUT = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def initialise_random(head: DraftHead, seed: int) -> None:
    """Normal weights of standard deviation 0.02 and biases at zero, as EAGLE-3 was published, and `DraftHead.zeroed`; a
    new head's norms are at one as they are. Draws from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name in head.zeroed or (parameter.dim() == 1 and name.endswith("bias")):
                parameter.zero_()
            elif parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * RANDOM_STD)


@torch.no_grad()
def initialise_from_target(
    head: DraftHead,
    target: Target,
    token_map: TokenMap,
    batches: list[Batch],
    seed: int,
    stored: StoredFeatures | None = None,
) -> None:
    """Initialise the parts of `head.warm_start()` from the target, with a regression over `batches`.

    stored: the features of `batches`; None computes them with the target's forward. Parts that differ in shape or
    meaning (another attention, MLP or norm than the head's) stay random, and the log lists them.
    """
    initialise_random(head, seed)
    start = head.warm_start()
    random = _copy_layers(start, target)
    for norm, copied in start.same_norms:
        norm.load_state_dict(copied.state_dict())
    if head.config.own_vocabulary:
        head.lm_head.weight.copy_(target.lm_head.weight[token_map.ids.to(target.device)])
    if start.last_norm is not None:
        name, norm = start.last_norm
        if not copy_norm(norm, target.final_norm, target.hidden_size):
            random.append(name)
    if random:  # one name for all experts of a layer
        names = dict.fromkeys(re.sub(r"\.experts\..*", ".experts", one) for one in random)
        log.warning("these parameters stay random, because the target has no matching part: %s", ", ".join(names))
    if batches:
        _regress(head, start, target, batches, stored)
    for layer in start.repeats:
        layer.load_state_dict(start.copies[0].layer.state_dict())


def _copy_layers(start: WarmStart, target: Target) -> list[str]:
    """Names of the head's parameters that stay random."""
    random: list[str] = []
    for layer, source, prefix, zeroed in start.copies:
        not_copied = copy_decoder_layer(layer, _source(layer, target, source), target.hidden_size)
        for name in zeroed:
            layer.get_parameter(name).zero_()
        random += [prefix + name for name in not_copied if name not in zeroed]
    return random


def _source(layer: nn.Module, target: Target, number: int) -> nn.Module:
    """The layer of the target to copy: the last of those with the class and attention of `layer`, else `number`."""
    own = {name: part.shape for name, part in layer.named_parameters()}
    alike = [
        one
        for one in target.layers
        if isinstance(one, type(layer)) and all(own.get(name) == part.shape for name, part in one.named_parameters())
    ]
    return alike[number] if len(alike) >= -number else target.layers[number]


def _regress(
    head: DraftHead, start: WarmStart, target: Target, batches: list[Batch], stored: StoredFeatures | None
) -> None:
    """Solve for `start.solved` by ridge regression."""
    columns, positions = start.solved.in_features, 0
    read = head.config.features.layer_ids(target.n_layers) or (None,)
    counted = head.config.regressed_layer
    wanted = None if counted is None else target.n_layers - counted
    gram, cross = (
        torch.zeros(columns, width, dtype=torch.float64, device=target.device)
        for width in (columns, target.hidden_size)
    )
    for batch, inputs in _states(target, {*read, wanted}, batches, stored):
        pairs = answer_pairs(batch, target.device)
        embeds = target.embed_tokens(batch.input_ids.to(target.device))[:, 1:][pairs].float()
        features = torch.cat([inputs[layer] for layer in read], dim=-1)
        x = start.solved_reads(embeds, features[:, :-1][pairs].float())
        states = inputs[wanted][:, 1:] if start.ahead else inputs[wanted][:, :-1]
        gram += (x.T @ x).double()
        cross += (x.T @ states[pairs].float()).double()
        positions += len(x)
    if positions:
        start.solved.weight.copy_(_solve(gram / positions, cross / positions).T)


def _states(
    target: Target, layers: set[int | None], batches: list[Batch], stored: StoredFeatures | None
) -> Iterator[tuple[Batch, dict[int | None, Tensor]]]:
    """Every batch with the inputs [B, L, H] of these layers (None: the last state), from disk or from a forward."""
    if stored is not None:
        yield from ((batch, {layer: stored.layer(batch, layer) for layer in layers}) for batch in batches)
        return
    captured = tuple(sorted(layer for layer in layers if layer is not None))
    capture = AuxCapture(target, captured) if captured else None
    try:
        for batch in batches:
            last, inputs = run_body(target, batch.input_ids, capture=capture)
            yield batch, {None: last, **dict(zip(captured, inputs, strict=True))}
    finally:
        if capture is not None:
            capture.remove()


def answer_pairs(batch: Batch, device: torch.device) -> Tensor:
    """Mask [B, L-1] bool of positions i: token i+2 is a response token, so the head will draft there.

    i+1 is never the last id of a text: decoding ends before it computes that state, so it is not stored. Position 0 is
    left out: in most models its states are outliers by orders of magnitude (attention sink).
    """
    length = batch.input_ids.shape[1]
    real = torch.arange(length - 1)[None, :] + 2 < batch.lengths[:, None]
    real[:, 0] = False
    return (real & batch.response[:, 1:]).to(device)


def regression_batches(batches: Iterable[Batch], columns: int, most: int | None = None) -> list[Batch]:
    """The first batches, as many as a regression with `columns` inputs needs; up to the one that reaches `most` answer
    tokens."""
    wanted = POSITIONS_PER_COLUMN * columns
    wanted = wanted if most is None else min(wanted, most)
    taken, positions = [], 0
    for batch in batches:
        taken.append(batch)
        positions += int(batch.response.sum())
        if positions >= wanted:
            break
    return taken


def _solve(gram: Tensor, cross: Tensor) -> Tensor:
    """The ridge regression's weight [C, H] from the means gram [C, C] and cross [C, H] of x'x and x'y over positions.

    Columns are scaled to variance 1 first: some channels of hidden states are a hundred times larger than others."""
    scale = gram.diagonal().sqrt().clamp(min=1e-6)
    gram = gram / scale[:, None] / scale[None, :]
    gram.diagonal().add_(RIDGE)
    return torch.linalg.solve(gram, cross / scale[:, None]) / scale[:, None]


# -- copies of the target's layers -------------------------------------------------------------------------------------


@torch.no_grad()
def copy_decoder_layer(layer: nn.Module, theirs: nn.Module, width: int) -> list[str]:
    """Copy the parts of `theirs`, a layer of the target of width H, that match in shape and meaning. Returns the names
    of the parameters that are not copied.

    If the head's layer reads the embedding and the hidden state, the target's projections go into the half for the
    hidden state; the first half, for the embedding, stays random with small values.
    """
    with unsharded(theirs), undivided(theirs):
        return _copy(layer, theirs, width)


def _copy(layer: nn.Module, theirs: nn.Module, width: int) -> list[str]:
    if isinstance(theirs, type(layer)):  # a sharded layer is of a subclass
        return _copy_alike(layer, theirs)
    assert isinstance(layer, AttendingLayer), "a layer of another family is of our own class"
    source = _tensors(theirs)
    copied: set[str] = set()
    not_copied: list[str] = []
    for name, parameter in layer.named_parameters():
        if not name.startswith(("self_attn.", "mlp.")):
            continue
        value = None if _used_differently(name, theirs, source, layer, copied) else source.get(name)
        value = None if value is None else value * _factor(name, theirs)
        half = (len(parameter), parameter.shape[-1] // 2)
        if value is not None and value.shape == parameter.shape:
            parameter.copy_(value)
        elif value is not None and value.shape == half and name in CONCATENATED_INPUT:
            parameter[:, half[1] :].copy_(value)
        else:
            not_copied.append(name)
            continue
        copied.add(name)
    norms = {layer.norm_before_attention: "input_layernorm", "post_attention_layernorm": _norm_before_mlp(theirs)}
    for mine, other in norms.items():
        own, norm = getattr(layer, mine, None), getattr(theirs, other, None)
        if own is not None and (norm is None or not copy_norm(own, norm, width)):
            not_copied.append(f"{mine}.weight")
    return not_copied


def _copy_alike(layer: nn.Module, theirs: nn.Module) -> list[str]:
    """Copy a layer of the target's own class, with its buffers."""
    source = {**_tensors(theirs), **dict(theirs.named_buffers())}
    own = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for name, value in source.items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)
    return [name for name in own if name.startswith(("self_attn.", "mlp.")) and name not in source]


def _factor(name: str, theirs: nn.Module) -> float:
    """The target's extra factor of the attention scores, or of the outputs added to the residual stream (Granite).
    The head has neither factor, so the copied weights contain it."""
    if name.startswith("self_attn.q_proj."):
        attention = getattr(theirs, "self_attn", None)
        scaling, width = getattr(attention, "scaling", None), getattr(attention, "head_dim", None)
        return 1.0 if scaling is None or width is None else scaling * math.sqrt(width)
    added = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    return float(getattr(theirs, "residual_multiplier", 1.0)) if added else 1.0


def _same_rope(theirs: nn.Module) -> bool:
    """Whether the rotary embedding covers whole heads and pairs element i with element i + hd/2, as in the head.

    GLM rotates half of each head, in pairs of neighbours. Some layers of SmolLM 3 and Llama 4 do not rotate. Llama 4
    rotates complex numbers, which this check does not cover.
    """
    attention = getattr(theirs, "self_attn", None)
    config, module = getattr(attention, "config", None), sys.modules[type(attention).__module__]
    part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    if not getattr(attention, "use_rope", True) or part not in (None, 1.0):
        return False
    probe, half = torch.arange(8.0), torch.ones(4)
    turned = torch.cat((-probe[4:], probe[:4]))
    if hasattr(module, "rotate_half"):
        return torch.equal(module.rotate_half(probe), turned)
    # GPT-OSS: cosines of zero and sines of one.
    turn = getattr(module, "_apply_rotary_emb", None)
    return turn is not None and torch.equal(turn(probe, 0 * half, half), turned)


def _normed_inside(theirs: nn.Module, layer: nn.Module) -> set[str]:
    """Projections beside a norm inside the target's attention or MLP that the head lacks: those of queries and keys
    (Qwen 3), or the last projection, whose input is normed (BitNet)."""
    found: set[str] = set()
    own = {path for path, _ in layer.named_modules()}
    for path, part in theirs.named_modules():
        if path in own or "norm" not in type(part).__name__.lower():
            continue
        if path.startswith("self_attn."):
            of_queries = path.removeprefix("self_attn.").startswith(("q", "k"))
            found |= {"self_attn.q_proj", "self_attn.k_proj"} if of_queries else {"self_attn.o_proj"}
        elif path.startswith("mlp."):
            found.add("mlp.down_proj")
    return found


def _used_differently(
    name: str, theirs: nn.Module, source: Mapping[str, Tensor], layer: nn.Module, copied: set[str]
) -> bool:
    """Whether the target uses this projection in another way than the head would.

    If the target norms the projection's output (queries of Qwen 3, outputs of Gemma 2, OLMo 2 and GLM 4), the head
    would read it at a scale that it was not trained for. A projection of another part's output is useless without that
    part.
    """
    path = name.rpartition(".")[0]
    if path in ("self_attn.q_proj", "self_attn.k_proj") and not _same_rope(theirs):
        return True
    if path in _normed_inside(theirs, layer):
        return True
    if path.startswith("mlp.") and not {f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")} <= source.keys():
        return True
    if path == "self_attn.o_proj" and "self_attn.v_proj.weight" not in copied:
        return True
    output_norms = {
        "self_attn.o_proj": {"post_self_attn_layernorm", "post_attention_layernorm"} - {_norm_before_mlp(theirs)},
        "mlp.down_proj": {"post_mlp_layernorm", "post_feedforward_layernorm"},
    }
    return any(hasattr(theirs, norm) for norm in output_norms.get(path, ()))


def _norm_before_mlp(theirs: nn.Module) -> str:
    """The target's name for the norm before the MLP. In families that also norm the MLP's output (Gemma 2, OLMo 2),
    `post_attention_layernorm` is the norm of the attention's output."""
    sandwich = hasattr(theirs, "post_feedforward_layernorm") or hasattr(theirs, "pre_feedforward_layernorm")
    return "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's parameters and its dequantised weights, by name."""
    quantised = {f"{path}.weight": part.weight for path, part in layer.named_modules() if isinstance(part, FixedLinear)}
    return {**dict(layer.named_parameters()), **quantised}


@torch.no_grad()
def copy_norm(mine: nn.Module, theirs: nn.Module, width: int) -> bool:
    """Copy the scale that the target's norm applies, measured with a probe: some families store w, others w - 1.

    The probe has alternating signs, so mean 0 and mean square 1, and a LayerNorm does not change it. The difference of
    the results of two opposite probes cancels a bias, which the head's norms do not have. Returns False if the norm has
    no such scale.
    """
    if isinstance(theirs, type(mine)):
        mine.load_state_dict(theirs.state_dict())
        return True
    assert isinstance(mine, nn.RMSNorm), "a norm of another family is torch's"
    like = next(theirs.parameters(), mine.weight)
    probe = torch.ones(1, width, device=like.device, dtype=like.dtype)
    probe[:, 1::2] = -1
    scale = probe.float() * (theirs(probe).float() - theirs(-probe).float()) / 2
    scale = scale.squeeze(0) * math.sqrt(1.0 + (mine.eps or 0.0))
    if scale.shape != mine.weight.shape or not torch.isfinite(scale).all() or bool((scale == 0).all()):
        return False
    mine.weight.copy_(scale)
    return True


# -- a head that exists ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InitHead:
    """The head that a training starts from, on the CPU in its stored dtype. revision: the commit of a hub id."""

    name: str
    revision: str | None
    weights_sha256: str
    draft: DraftCheckpoint

    @property
    def record(self) -> dict[str, Any]:
        """Where the head comes from, for the draft directory."""
        return {"name": self.name, "revision": self.revision, "weights_sha256": self.weights_sha256}

    def config(self, token_map: TokenMap) -> HeadConfig:
        """Its configuration with the draft vocabulary of `token_map`."""
        return self.draft.head.config.with_vocabulary(token_map.size)


def open_init(settings: TrainSettings, target: Target | TargetFacts) -> InitHead:
    """The head of `train.init`. Raises `RecipeError` if it is not the head that the recipe asks for, `DraftDirError` if
    it does not fit the target (with the tensor), and the errors of `open_head`."""
    name = settings.init
    assert name is not None, "called with train.init only"
    draft = open_head(name, target=target.name, revision=target.revision)
    if draft.kind != settings.head.kind:
        raise RecipeError(
            f"train.init = {name} is a head of kind {draft.kind}, but train.head.kind is {settings.head.kind}; set "
            f"train.head.kind={draft.kind}"
        )
    check_draft_fits(draft, target)
    with_head_settings(settings, draft.head.config)
    differs = rope_difference(draft.head.config, full_attention_rope(target.config))
    if differs:
        log.warning("train.init = %s: %s", name, differs)
    assert draft.path is not None, "it was read from files"
    # Of a hub's files the cache keeps each commit in a folder of its name.
    hub = not Path(name).expanduser().exists()
    revision = draft.path.name if hub else None
    digest = weights_sha256(draft.path, draft.weights)
    return InitHead(name.partition("@")[0] if hub else name, revision, digest, draft)


def with_head_settings(settings: TrainSettings, config: HeadConfig) -> TrainSettings:
    """The settings with those of a head of this configuration in place of the defaults.

    Raises `RecipeError` for a setting that was given and that the head does not have, and for other settings of the
    training that do not suit the head (its layers are more than ttt_steps).
    """
    has: dict[str, Any] = {
        "layers": config.mtp_layers * config.layers,
        "fc_norm": getattr(config, "fc_norm", False),
        "norm_output": getattr(config, "norm_output", False),
        "sliding_window": config.sliding_window,
    }
    read = {**has, "aux_layer_ids": config.features.aux_layer_ids}
    read |= {
        name: getattr(config, name, getattr(HeadSettings, name))
        for name in ("correction", "markov_rank", "mask_token_id", "causal")
    }
    wrong = [name for name in changed(settings.head, *read) if getattr(settings.head, name) != read[name]]
    if wrong:
        said = "; ".join(f"train.head.{name} = {getattr(settings.head, name)} (it has {read[name]})" for name in wrong)
        raise RecipeError(
            f"train.init = {settings.init} has settings of its own, which are kept: {said}. Leave these out"
        )
    steps, at_once = settings.unroll.ttt_steps, config.drafts_at_once
    if at_once and steps != at_once:
        raise RecipeError(
            f"train.init = {settings.init} drafts blocks of {at_once} tokens, and train.unroll.ttt_steps is {steps}; "
            f"set train.unroll.ttt_steps={at_once}"
        )
    try:
        return replace(settings, head=replace(settings.head, **has))
    except RecipeError as error:
        raise RecipeError(f"train.init = {settings.init} does not suit the recipe: {error}") from None


def continued_head(
    init: InitHead, config: HeadConfig, token_map: TokenMap, settings: TrainSettings, target: Target
) -> DraftHead:
    """The head in float32 on the target's device, to be trained further with the draft vocabulary of `token_map`. It is
    changed in place, so that memory holds it once.

    Of its output matrix the rows of ids that its own map has are carried over; the others are the target's, as those of
    a new head. `train.head.lm_head` target or frozen takes all rows from the target.
    """
    head = init.draft.head
    said = f"; it scores tokens by {token_map.size} rows of the target's output matrix (train.head.vocabulary)"
    if config.own_vocabulary:
        places = init.draft.token_map.to_draft(token_map.ids)
        rows, said = _output_rows(init.draft, token_map, places, settings, target)
        head.map_rows(places)
        head.config, head.lm_head = config, OutputMatrix(config.hidden_size, len(rows), bias=False)
        head.lm_head.weight = nn.Parameter(rows)
    head = head.cast(target.device, torch.float32).train().requires_grad_(True)
    if settings.head.lm_head == "frozen":
        head.lm_head.weight.requires_grad_(False)
    log.info(
        "the head starts from %s (%s, weights sha256 %s)%s", init.name, config.kind, init.weights_sha256[:12], said
    )
    return head


@torch.no_grad()
def _output_rows(
    draft: DraftCheckpoint, token_map: TokenMap, places: Tensor, settings: TrainSettings, target: Target
) -> tuple[Tensor, str]:
    """The rows [D, H] of the output matrix, fp32 on the CPU, and what the log says of them."""
    rows = target.lm_head.weight[token_map.ids.to(target.device)].float().cpu()
    if settings.head.lm_head is not None:
        return rows, f"; its {token_map.size} output rows are the target's (train.head.lm_head={settings.head.lm_head})"
    if not draft.head.config.own_vocabulary:
        return rows, f"; its {token_map.size} output rows are the target's, as it had none"
    both = places >= 0
    rows[both] = draft.head.lm_head.weight[places[both]].float()
    carried = int(both.sum())
    return rows, (
        f"; {carried} of its {draft.token_map.size} output rows are carried over, and the other "
        f"{token_map.size - carried} of {token_map.size} are the target's"
    )
