"""Shards the target (by transformers' tensor parallel plan) and the draft head (by our own plan) over the ranks.

Attention is sharded by heads and MLPs by width, as in Megatron-LM (arXiv 1909.08053); output matrices by vocabulary.
Norms, embeddings and a head's input fusion (`fc`, `eh_proj`) are replicated.

A linear layer is sharded by a style for torch's parallelize_module. DTensor shards the weights. The matmuls run on
plain tensors, because DTensor dispatch costs more than a decoding step.

    column   rows of the weight [out/N, in]: whole input -> this rank's part of the output (heads, MLP width)
    row      columns of the weight [out, in/N]: this rank's part of the input -> all-reduced sum

Shapes: N ranks.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PretrainedConfig

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.decoder_layer import Attention, GatedMLP
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.engine.cpu_door import load_target
from toolkit.infer.parallel.ranks import ParallelError, Ranks
from toolkit.infer.request.params import UnsupportedTargetError
from toolkit.targets.load import load_config
from toolkit.targets.target import Target


class Column(ParallelStyle):
    """Column-parallel. gather: all-gather the output, so that every rank has all of it, with the same bits."""

    def __init__(self, *, gather: bool = False) -> None:
        super().__init__()
        self.gather = gather

    @staticmethod
    def divided(linear: nn.Linear) -> int:
        """The sharded width."""
        return linear.out_features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = _part(module.weight, device_mesh, 0)
        if module.bias is not None:
            module.bias = _part(module.bias, device_mesh, 0)
        if self.gather:
            module.register_forward_hook(_gathered)
        return module


class Row(ParallelStyle):
    """Row-parallel. split: the input is whole, and each rank selects its part."""

    def __init__(self, *, split: bool = False) -> None:
        super().__init__()
        self.split = split

    @staticmethod
    def divided(linear: nn.Linear) -> int:
        """The sharded width."""
        return linear.in_features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = _part(module.weight, device_mesh, 1)
        if dist.get_rank():  # only rank 0 adds the bias
            module.register_parameter("bias", None)
        if self.split:
            module.register_forward_pre_hook(_own_part)
        module.register_forward_hook(_summed)
        return module


def check_divides(path: str, module: nn.Module, style: Column | Row, size: int) -> None:
    """Raise ParallelError unless `module` is a linear layer that `size` ranks can divide evenly."""
    if not isinstance(module, nn.Linear):
        raise ParallelError(f"{path} is {type(module).__name__}; only linear layers can be divided among ranks")
    width = style.divided(module)
    if width % size:
        raise ParallelError(
            f"{path} is {width} wide, which {size} ranks cannot divide evenly; choose a tensor parallel size that "
            f"divides {width}"
        )


def _part(whole: Any, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard as a copy, so that the whole weight can be freed."""
    part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None).to_local()
    return nn.Parameter(part.clone().to(whole.device), requires_grad=False)


def _summed(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


def _gathered(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    """All-gather of [..., width/N] -> [..., width]."""
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, output.contiguous())
    return torch.cat(parts, dim=-1)


def _own_part(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.chunk(args[0], dist.get_world_size(), dim=-1)[dist.get_rank()], *args[1:])


# By transformers' names; the names with _rep are from its first 5.x versions. None: replicated. (5.17 divides tied
# embeddings, to save memory.)
STYLES: dict[str, Column | Row | None] = {
    "colwise": Column(),
    "rowwise": Row(),
    "colwise_gather_output": Column(gather=True),
    "colwise_rep": Column(gather=True),
    "rowwise_split_input": Row(split=True),
    "rowwise_rep": Row(split=True),
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
    check_heads(load_config(name, revision)[0], ranks.size, str(name))
    ranks.join()

    def load() -> tuple[Target, torch.Tensor]:
        target = load_target(name, revision=revision, device="cpu", runs_on=device, **options)
        logits = _probe_logits(target)
        _shard_layers(target, ranks)
        # Device only: a dtype here would also cast the rotary frequencies. (The type stub of `to` lacks self.)
        target.model.to(device)  # type: ignore[arg-type]
        return target, logits

    target, wanted = ranks.in_turn(load)
    got = _probe_logits(target)
    difference = float((got - wanted).norm() / wanted.norm())
    if not difference <= (1e-3 if target.dtype == torch.float32 else 1e-1):
        raise UnsupportedTargetError(
            f"{type(target.model).__name__}: divided among {ranks.size} ranks its logits differ from the whole model's "
            f"by {difference:.2g} of their size; {INSTEAD}"
        )
    return target


def check_heads(config: PretrainedConfig, size: int, name: str) -> dict[str, Column | Row]:
    """Styles by layer name (numbers as *), from transformers' plan.

    Raises ParallelError without a plan, for an unknown style, or for heads that `size` ranks cannot divide evenly."""
    text: Any = config.get_text_config(decoder=True)
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    unknown = sorted(f"{key}: {style}" for key, style in plan.items() if style not in STYLES)
    styles = {key: style for key, value in plan.items() if (style := STYLES.get(value)) is not None}
    if not styles or unknown:
        why = f"its plan has unsupported styles ({', '.join(unknown)})" if unknown else "transformers has no plan"
        raise ParallelError(f"{name} ({text.model_type}) cannot be divided among ranks: {why}; {INSTEAD}")
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    by_heads = any(style == "colwise" and "att" in key for key, style in plan.items())
    if by_heads and (heads % size or key_heads % size):
        raise ParallelError(
            f"{name} has {heads} attention heads and {key_heads} key heads, which {size} ranks cannot divide evenly; "
            "choose a tensor parallel size that divides both"
        )
    return styles


def shard_output_and_head(ranks: Ranks, target: Target, draft: Draft | None) -> None:
    """Shard the target's output matrix and the fitted head as far as they divide evenly."""
    head = draft.head if isinstance(draft, DraftCheckpoint) else None
    # A head with a token map selects rows of the whole matrix.
    mapped = isinstance(draft, DraftCheckpoint) and draft.token_map.size < target.vocab_size
    rows = head is not None and not head.config.own_vocabulary and mapped
    if target.vocab_size % ranks.size == 0 and not rows:
        parallelize_module(target.lm_head, ranks.mesh, Column(gather=True))
    if head is not None:
        _shard_head(head, ranks)


def _shard_layers(target: Target, ranks: Ranks) -> None:
    styles = check_heads(target.model.config, ranks.size, target.name)
    modules = dict(target.body.named_modules())
    plan = {path: style for path in modules if (style := styles.get(re.sub(r"\d+", "*", path))) is not None}
    if not plan:
        raise ParallelError(f"{target.name}: no layer has a name of transformers' plan ({', '.join(styles)})")
    for path, style in plan.items():
        check_divides(path, modules[path], style, ranks.size)
    parallelize_module(target.body, ranks.mesh, plan)  # type: ignore[arg-type]


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
    plan: dict[str, Column | Row] = {}
    for path, module in head.named_modules():
        if isinstance(module, Attention) and by_heads:
            plan |= {f"{path}.{name}": Column() for name in ("q_proj", "k_proj", "v_proj")}
            plan[f"{path}.o_proj"] = Row()
        elif isinstance(module, GatedMLP) and config.intermediate_size % size == 0:
            plan |= {f"{path}.gate_proj": Column(), f"{path}.up_proj": Column(), f"{path}.down_proj": Row()}
    if config.own_vocabulary and head.lm_head.out_features % size == 0:
        plan["lm_head"] = Column(gather=True)
    if plan:
        parallelize_module(head, ranks.mesh, plan)  # type: ignore[arg-type]
    if by_heads:  # the head's KV cache holds this rank's heads only
        head.config = replace(config, num_attention_heads=heads // size, num_key_value_heads=key_heads // size)
