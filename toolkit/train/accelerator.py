"""Builds the Accelerator over DeepSpeed, the same way for one CPU process and for many GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.optim import Optimizer

from toolkit.errors import TrainError
from toolkit.log import get_logger
from toolkit.targets.cache import fastest_cpu_dtype
from toolkit.threads import physical_cores, users_threads

log = get_logger(__name__)

# Timeout of collectives: processes wait while the main process measures, or while one writes its fresh rollouts. A dead
# process is noticed without it: its connections close, and the launcher ends the other processes.
COLLECTIVE_TIMEOUT = timedelta(hours=2)
# Elements that DeepSpeed reduces at once where no matrix of the head is larger. Its own default, 5e8, would take 1 or
# 2 GB beside a head of any size.
BUCKET = 50_000_000
DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "recipes" / "accelerate" / "zero2.yaml"


def set_threads() -> None:
    """Divide this machine's cores among the local processes, unless the user set OMP_NUM_THREADS."""
    chosen = users_threads() or ""
    share = max(1, physical_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))))
    torch.set_num_threads(int(chosen) if chosen.isdecimal() and int(chosen) > 0 else share)


def training_device() -> str:
    """This process's GPU where there is one."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def training_precision(wanted: Literal["auto", "bf16", "fp32"]) -> Literal["bf16", "fp32"]:
    """The dtype of training. "auto": bf16 on a GPU and on CPUs that multiply bf16 at least as fast as fp32."""
    if wanted != "auto":
        return wanted
    return "fp32" if training_device() == "cpu" and fastest_cpu_dtype() == torch.float32 else "bf16"


def build_accelerator(
    precision: str, micro_batch: int, accumulation: int, clip: float, *, whole_gradients: bool
) -> Accelerator:
    """An Accelerator over DeepSpeed, with the launcher's DeepSpeed settings, else those of
    `recipes/accelerate/zero2.yaml`.

    whole_gradients: the optimizer needs whole matrices (Muon), so gradients are all-reduced, not scattered.
    Under ZeRO-3 transformers also shards models that are loaded later; `frozen_target.py` prevents this.
    Raises `TrainError` when the launcher uses FSDP or Megatron-LM.
    """
    chosen = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    for other, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")):
        if os.environ.get(other, "false") == "true":
            raise TrainError(
                f"the accelerate configuration selects {name}, but training needs DeepSpeed; "
                f"use --config_file {DEFAULT_CONFIG.name} or zero3.yaml of recipes/accelerate"
            )
    _stand_alone_environment()
    plugin = DeepSpeedPlugin() if chosen else DeepSpeedPlugin(**_default_plugin())
    config = plugin.deepspeed_config
    for setting in _replaced(config, precision, accumulation, clip) if os.environ.get("RANK", "0") == "0" else ():
        log.warning(f"the accelerate configuration sets {setting}; the recipe's value is used")
    for name in {"bf16", "fp16"} & config.keys():
        config[name] = {**config[name], "enabled": name == precision}
    config["train_micro_batch_size_per_gpu"] = micro_batch
    config["gradient_accumulation_steps"] = plugin.gradient_accumulation_steps = accumulation
    config["gradient_clipping"] = plugin.gradient_clipping = clip
    if whole_gradients:
        # Muon orthogonalises whole matrices; ZeRO-3 raises an error if gradients are scattered.
        config.setdefault("zero_optimization", {})["reduce_scatter"] = False
    # DeepSpeed's own step log would duplicate ours.
    config["steps_per_print"] = 1 << 30
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        _quiet_cpu()
    return Accelerator(
        mixed_precision={"bf16": "bf16", "fp32": "no"}[precision],
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[InitProcessGroupKwargs(backend="nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)],
    )


def end_process_group() -> None:
    """End the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def prepared(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> Any:
    """`accelerator.prepare`, with DeepSpeed's buckets as large as the trained parameters need."""
    sizes = [one.numel() for one in model.parameters() if one.requires_grad]
    set_buckets(accelerator.state.deepspeed_plugin.deepspeed_config, sizes)
    return accelerator.prepare(model, optimizer)


def set_buckets(config: dict[str, Any], sizes: Sequence[int]) -> None:
    """Set the bucket sizes that a DeepSpeed configuration leaves open. sizes: elements of each trained parameter.

    The buffer of `reduce_bucket_size` elements is allocated whole. It holds the largest gradient: larger ones than the
    buffer would be reduced one by one.
    """
    elements = min(sum(sizes), max(BUCKET, *sizes))
    zero = config.setdefault("zero_optimization", {})
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero.get(name, "auto") == "auto":
            zero[name] = elements + elements % 2  # DeepSpeed asserts an even number


def _replaced(config: Mapping[str, Any], precision: str, accumulation: int, clip: float) -> Iterator[str]:
    """Settings of the accelerate configuration, or of its DeepSpeed file, that differ from the recipe's."""
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # "no" is the launcher's own default
    if mixed not in ("no", precision):
        yield f"mixed_precision {mixed}, but the recipe trains in {precision}"
    for name in ("bf16", "fp16"):
        enabled = (config.get(name) or {}).get("enabled", "auto")
        if enabled != "auto" and enabled != (name == precision):
            yield f"{name} enabled: {enabled}, but the recipe trains in {precision}"
    # If a DeepSpeed file has no accumulation, accelerate writes 1 into it.
    for name, ours, unset in (("gradient_accumulation_steps", accumulation, 1), ("gradient_clipping", clip, None)):
        theirs = config.get(name)
        if theirs not in (None, "auto", unset) and float(theirs) != ours:
            yield f"{name} {theirs}, but the recipe's value is {ours:g}"


def _default_plugin() -> dict[str, Any]:
    if not DEFAULT_CONFIG.is_file():
        log.info("recipes/accelerate is not installed: ZeRO-2 runs with DeepSpeed's defaults")
        return {"zero_stage": 2}
    settings = yaml.safe_load(DEFAULT_CONFIG.read_text(encoding="utf-8"))["deepspeed_config"]
    names = ("zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag")
    return {name: settings[name] for name in names if name in settings}


def _stand_alone_environment() -> None:
    """Set the launcher's variables for a single process: without them DeepSpeed looks for MPI."""
    if "LOCAL_RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def _quiet_cpu() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce: that takes a C++ compiler and minutes, and gloo
    suffices."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
