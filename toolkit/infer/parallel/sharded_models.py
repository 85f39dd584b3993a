"""Shards the target (by transformers' tensor parallel plan) and the draft head (by our own plan) over the ranks.

Attention is sharded by heads and MLPs by width, as in Megatron-LM (arXiv 1909.08053); output matrices by vocabulary.
Norms, embeddings and a head's input fusion (`fc`, `eh_proj`) are replicated.

    column   rows of the weight [out/N, in]: whole input -> this rank's part of the output (heads, MLP width)
    row      columns of the weight [out, in/N]: this rank's part of the input -> all-reduced sum

Shapes: N ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.decoder_layer import Attention, GatedMLP
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.cpu_door import load_target
from toolkit.infer.parallel.ranks import ParallelError, Ranks
from toolkit.infer.request.params import UnsupportedTargetError
from toolkit.targets.load import load_config
from toolkit.targets.target import Target


@dataclass(frozen=True)
class Style:
    """How a linear layer is divided.

    by_row: row-parallel, else column-parallel. whole: of column-parallel layers every rank gets the whole output; of
    row-parallel ones the input is whole, and each rank selects its part.
    """

    by_row: bool = False
    whole: bool = False


Group = dist.ProcessGroup | None  # the ranks that share a model; None: all


def divide(model: nn.Module, styles: Mapping[str, Style], group: Group = None) -> None:
    """Divide the linear layers at these paths. Raises ParallelError for another module, or an uneven width."""
    size = dist.get_world_size(group)
    for path, style in styles.items():
        linear = model.get_submodule(path)
        if not isinstance(linear, nn.Linear):
            raise ParallelError(f"{path} is {type(linear).__name__}; only linear layers can be divided among ranks")
        width = linear.in_features if style.by_row else linear.out_features
        if width % size:
            raise ParallelError(
                f"{path} is {width} wide, which {size} ranks cannot divide evenly; choose a number of ranks that "
                f"divides {width}"
            )
    for path, style in styles.items():
        _divide(model.get_submodule(path), style, group)


def _divide(linear: Any, style: Style, group: Group = None) -> None:
    linear.division = style, group
    linear.weight = _part(linear.weight, 1 if style.by_row else 0, group)
    if style.by_row:
        if linear.bias is not None and dist.get_rank(group):  # only the first rank adds the bias
            linear.bias = nn.Parameter(torch.zeros_like(linear.bias), requires_grad=False)
        if style.whole:
            linear.register_forward_pre_hook(_own_part)
        linear.register_forward_hook(_summed)
        return
    if linear.bias is not None:
        linear.bias = _part(linear.bias, 0, group)
    if style.whole:
        linear.register_forward_hook(_gathered)


def _part(whole: Tensor, dim: int, group: Group) -> nn.Parameter:
    """This rank's shard as a copy, so that the whole weight can be freed."""
    part = whole.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _summed(linear: Any, args: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output, group=linear.division[1])
    return output


def _gathered(linear: Any, args: Any, output: Tensor) -> Tensor:
    return _joined(output, -1, linear.division[1])


def _joined(part: Tensor, dim: int, group: Group) -> Tensor:
    """All-gather of the ranks' parts along `dim`."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def _own_part(linear: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _, group = linear.division
    return (torch.chunk(args[0], dist.get_world_size(group), dim=-1)[dist.get_rank(group)], *args[1:])


def is_divided(module: nn.Module) -> bool:
    return hasattr(module, "division")


@contextmanager
def undivided(layer: nn.Module) -> Iterator[None]:
    """Gather the full weights of a layer's divided parts, to read them outside of its forward. All ranks must call
    this."""
    parts: list[tuple[Tensor, Tensor]] = []
    for linear in filter(is_divided, layer.modules()):
        style, group = linear.division  # type: ignore[misc]  # set by `_divide`
        for part in linear.parameters(recurse=False):
            parts.append((part, part.data))
            if style.by_row and part.ndim == 1:  # a bias: zeros on all ranks but the first
                part.data = part.data.clone()
                dist.all_reduce(part.data, group=group)
            else:
                part.data = _joined(part.data, 1 if style.by_row else 0, group)
    try:
        yield
    finally:
        for shown, own in parts:
            shown.data = own


# By transformers' names; the names with _rep are from its first 5.x versions. None: replicated. (5.17 divides tied
# embeddings, to save memory.)
STYLES: dict[str, Style | None] = {
    "colwise": Style(),
    "rowwise": Style(by_row=True),
    "colwise_gather_output": Style(whole=True),
    "colwise_rep": Style(whole=True),
    "rowwise_split_input": Style(by_row=True, whole=True),
    "rowwise_rep": Style(by_row=True, whole=True),
    "replicated_with_grad_allreduce": None,
    "replicated": None,
    "embedding_rowwise": None,
}
INSTEAD = "serve it on one device, or export the head and serve it with SGLang or vLLM"
PROBE_TOKENS = 8


def load_sharded_target(
    ranks: Ranks, name: str | Path, *, revision: str | None, device: torch.device, **options: Any
) -> Target:
    """Load a target and keep this rank's shard of its layers. The ranks load the whole model in turn, on the host.

    Raises TargetError, ParallelError for a family or a number of heads that cannot be sharded, UnsupportedTargetError
    if the logits of the sharded model differ from those of the whole model.
    """
    styles = styles_of(load_config(name, revision)[0], ranks.size, str(name))
    ranks.join()
    load = partial(load_target, name, revision=revision, device="cpu", runs_on=device, **options)
    return divided_target(load, styles, device, ranks.in_turn)


def divided_target(
    load: Callable[[], Target],
    styles: Mapping[str, Style],
    device: torch.device,
    in_turn: Callable[[Callable[[], Any]], Any],
    group: Group = None,
    instead: str = INSTEAD,
) -> Target:
    """The target that `load` loads on the host, with this rank's shard of its layers on `device`.

    styles: of `styles_of`. in_turn: calls a function on one rank after the other. instead: advice in errors.
    Raises as `load_sharded_target`.
    """

    def load_part() -> tuple[Target, torch.Tensor]:
        target = load()
        logits = _probe_logits(target)
        _shard_layers(target, styles, group)
        # Device only: a dtype here would also cast the rotary frequencies. (The type stub of `to` lacks self.)
        target.model.to(device)  # type: ignore[arg-type]
        return target, logits

    target, wanted = in_turn(load_part)
    got = _probe_logits(target)
    difference = float((got - wanted).norm() / wanted.norm())
    if not difference <= (1e-3 if target.dtype == torch.float32 else 1e-1):
        raise UnsupportedTargetError(
            f"{type(target.model).__name__}: divided among {dist.get_world_size(group)} ranks its logits differ from "
            f"the whole model's by {difference:.2g} of their size; {instead}"
        )
    return target


def styles_of(config: PretrainedConfig, size: int, name: str, instead: str = INSTEAD) -> dict[str, Style]:
    """Styles by layer name (numbers as *), from transformers' plan. instead: advice in errors.

    Raises ParallelError without a plan, for an unknown style, or for heads that `size` ranks cannot divide evenly."""
    text: Any = config.get_text_config(decoder=True)
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    unknown = sorted(f"{key}: {style}" for key, style in plan.items() if style not in STYLES)
    styles = {key: style for key, value in plan.items() if (style := STYLES.get(value)) is not None}
    if not styles or unknown:
        why = f"its plan has unsupported styles ({', '.join(unknown)})" if unknown else "transformers has no plan"
        raise ParallelError(f"{name} ({text.model_type}) cannot be divided among ranks: {why}; {instead}")
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    by_heads = any(style == "colwise" and "att" in key for key, style in plan.items())
    if by_heads and (heads % size or key_heads % size):
        raise ParallelError(
            f"{name} has {heads} attention heads and {key_heads} key heads, which {size} ranks cannot divide evenly; "
            f"choose a number of ranks that divides both, or {instead}"
        )
    return styles


def shard_output_and_head(ranks: Ranks, target: Target, draft: Draft | None) -> None:
    """Shard the target's output matrix and the fitted head as far as they divide evenly."""
    head = draft.head if isinstance(draft, DraftCheckpoint) else None
    # A head with a token map selects rows of the whole matrix.
    mapped = isinstance(draft, DraftCheckpoint) and draft.token_map.size < target.vocab_size
    rows = head is not None and not head.config.own_vocabulary and mapped
    if target.vocab_size % ranks.size == 0 and not rows:
        _divide(target.lm_head, Style(whole=True))
    if head is not None:
        _shard_head(head, ranks)


def _shard_layers(target: Target, styles: Mapping[str, Style], group: Group) -> None:
    paths = [path for path, _ in target.body.named_modules()]
    plan = {path: style for path in paths if (style := styles.get(re.sub(r"\d+", "*", path))) is not None}
    if not plan:
        raise ParallelError(f"{target.name}: no layer has a name of transformers' plan ({', '.join(styles)})")
    divide(target.body, plan, group)


@torch.inference_mode()
def _probe_logits(target: Target) -> torch.Tensor:
    """The model's logits of PROBE_TOKENS tokens, on the host."""
    ids = (torch.arange(PROBE_TOKENS, device=target.device) * 7919 % target.vocab_size)[None]
    return target.model(input_ids=ids, use_cache=False).logits.float().cpu()


def _shard_head(head: Any, ranks: Ranks) -> None:
    """Shard the attention by heads, the MLPs by width, and the head's own output matrix by vocabulary."""
    size, config = ranks.size, head.config
    if not any(isinstance(module, Attention) for module in head.modules()):  # MTP layers of a family's own class
        return
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    by_heads = heads % size == 0 and key_heads % size == 0
    plan: dict[str, Style] = {}
    for path, module in head.named_modules():
        if isinstance(module, Attention) and by_heads:
            plan |= {f"{path}.{name}": Style() for name in ("q_proj", "k_proj", "v_proj")}
            plan[f"{path}.o_proj"] = Style(by_row=True)
        elif isinstance(module, GatedMLP) and config.intermediate_size % size == 0:
            plan |= {f"{path}.gate_proj": Style(), f"{path}.up_proj": Style(), f"{path}.down_proj": Style(by_row=True)}
    if config.own_vocabulary and head.lm_head.out_features % size == 0:
        plan["lm_head"] = Style(whole=True)
    divide(head, plan)
    if by_heads:  # the head's KV cache holds this rank's heads only
        head.config = replace(config, num_attention_heads=heads // size, num_key_value_heads=key_heads // size)
