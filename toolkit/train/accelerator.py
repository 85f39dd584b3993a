"""The processes of a training: the Accelerator over DeepSpeed, equal for one CPU process and for many GPUs; the target,
replicated in every process, or divided among them (`train.target`); and the errors that end a running training.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from toolkit.errors import TrainError
from toolkit.infer.engine.cpu_door import load_target
from toolkit.infer.parallel.sharded_models import divided_target, is_divided, styles_of
from toolkit.log import get_logger
from toolkit.recipe import Recipe
from toolkit.targets.cache import fastest_cpu_dtype
from toolkit.targets.fixed_linear import FixedLinear, weights_of
from toolkit.targets.load import layer_bytes, load_config, shard_layers
from toolkit.targets.target import Target
from toolkit.threads import physical_cores, users_threads
from toolkit.train.state import stored_states
from toolkit.weights import sha256_json

log = get_logger(__name__)

# Timeout of collectives: processes wait while the main process measures, or while one writes its fresh rollouts. A dead
# process is noticed without it: its connections close, and the launcher ends the other processes.
COLLECTIVE_TIMEOUT = timedelta(hours=2)
# Elements that DeepSpeed reduces at once where no matrix of the head is larger. Its own default, 5e8, would take 1 or
# 2 GB beside a head of any size.
BUCKET = 50_000_000
DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "recipes" / "accelerate" / "zero2.yaml"

# What is wrong with another process and what to look at, by the messages of gloo, NCCL and torch's store: torch has no
# error types for them. The first: it did not come to a collective within the timeout.
OTHER_PROCESS = {
    (
        "hangs, is much slower than this one, or ended before it joined",
        "see what it waits for (`py-spy dump --pid`), and whether its GPU, disk or network is stuck or shared",
    ): ("timed out waiting", "collective operation timeout", "wait timeout after"),
    ("ended or cannot be reached", "see its own message above, if any"): (
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "remote process exited",
        "timed out",
    ),
}


def share_threads() -> None:
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
    Under ZeRO-3 transformers also shards models that are loaded later; `frozen_target` prevents this.
    Raises `TrainError` when the launcher uses FSDP or Megatron-LM.
    """
    chosen = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    for other, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")):
        if os.environ.get(other, "false") == "true":
            raise TrainError(
                f"the accelerate configuration selects {name}, but training needs DeepSpeed; "
                f"use {DEFAULT_CONFIG.name} or zero3.yaml of recipes/accelerate"
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


class DivergedError(TrainError):
    """The loss, the gradient or the weights are not finite."""


class LostProcessError(TrainError):
    """Another process of the group has ended, cannot be reached or hangs."""


def check_finite(step: int, loss: float, grad_norm: float | None, directory: Path) -> None:
    """Raise `DivergedError` if the loss or the gradient norm of the step is not finite. All processes have the same
    values."""
    if math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm)):
        return
    what = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        what = f"the gradient norm of step {step} is {grad_norm}"
    raise _diverged(what, directory)


def check_weights(accelerator: Accelerator, model: torch.nn.Module, step: int, directory: Path) -> None:
    """Raise `DivergedError` if the weights after the step are not finite. All processes must call this, before the head
    is evaluated or stored: the loss of a step is computed before its update, and Muon gives no gradient norm.
    """
    parts = [_own_part(one, accelerator.process_index) for one in model.parameters() if one.requires_grad]
    broken = sum((~torch.isfinite(one.detach()).all()).long() for one in parts)
    if int(accelerator.reduce(torch.as_tensor(broken, device=accelerator.device), "sum")):
        raise _diverged(f"the weights after step {step} are not finite", directory)


def _own_part(parameter: torch.Tensor, rank: int) -> torch.Tensor:
    """The part of a parameter that this process holds under ZeRO-3, without the uninitialised padding after its last
    element; empty while the parameter is offloaded to a disk."""
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter
    return part.flatten()[: max(0, parameter.ds_numel - rank * part.numel())]  # type: ignore[attr-defined]


def _diverged(what: str, directory: Path) -> DivergedError:
    return DivergedError(
        f"{what}, so training stops; {_newest(directory)}. The usual cause is the learning rate: lower "
        "train.optimizer.learning_rate (and muon_learning_rate), raise train.optimizer.warmup_ratio, or set "
        "train.precision=fp32, and train into another run_dir"
    )


@contextmanager
def lost_process_named(directory: Path) -> Iterator[None]:
    """Convert the error of a collective with a lost or hung process to `LostProcessError`, which says which; other
    errors are raised as they are."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).lower()
        of_the_group = isinstance(error, torch.distributed.DistError) or "gloo" in message or "nccl" in message
        found = (wrong for wrong, messages in OTHER_PROCESS.items() if any(words in message for words in messages))
        what, look = next(found, ("", ""))
        if not of_the_group or not what:
            raise
        raise LostProcessError(
            f"another training process {what} ({str(error).splitlines()[0][:200]}); {look}. {_newest(directory)}; run "
            "the same command again to resume from it"
        ) from error


def _newest(directory: Path) -> str:
    states = stored_states(directory)
    return f"the newest state is {states[-1]}" if states else "no state was stored yet"


def frozen_target(recipe: Recipe, device: str, accelerator: Accelerator) -> Target:
    """The recipe's target on this process's device. All processes must call this. Raises `TargetError`, and with
    train.target=tensor `ParallelError`, before it loads, for a target that cannot be divided."""
    # ZeRO-3 is for the head. The Accelerator has registered it with transformers, which would shard the target too.
    unset_hf_deepspeed_config()
    processes, how = accelerator.num_processes, recipe.train.target
    if how == "tensor":  # of one machine, whose processes are the neighbours in rank
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if how != "replicated" and processes == 1:
        log.warning("train.target=%s has no effect with one process; launch more processes", how)
    if how == "replicated" or processes == 1:
        return _load(recipe, device, device)
    if how == "tensor":
        return _tensor_parallel_target(recipe, device, processes)
    mesh = init_device_mesh(device.partition(":")[0], (processes,))
    with _one_process_at_a_time():
        target = _load(recipe, device, "cpu")
        shard_layers(target, mesh)
    local, total = layer_bytes(target)
    log.info(
        "the target's layers are sharded over %d processes: this process holds %d of %d bytes", processes, local, total
    )
    return target


def _tensor_parallel_target(recipe: Recipe, device: str, size: int) -> Target:
    """The target with this process's part of every layer; `size` processes of each machine share it."""
    name, instead = recipe.target.model, "set train.target=sharded"
    styles = styles_of(load_config(name, recipe.target.revision)[0], size, name, instead)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    group, _ = dist.new_subgroups(size, timeout=COLLECTIVE_TIMEOUT, backend=backend)

    def in_turn(load: Any) -> Any:
        with _one_process_at_a_time():
            return load()

    load = partial(_load, recipe, device, "cpu")
    target = divided_target(load, styles, torch.device(device), in_turn, group, instead)
    target.group = group
    log.info("the target's layers are divided among %d processes, which run the batches of all in turn", size)
    return target


@torch.no_grad()
def weights_checksum(target: Target, accelerator: Accelerator) -> str:
    """A hash of the target's weights, also of sharded ones, and of quantised ones as plain ones: the sums of each
    tensor's bits, which are exact whatever the order and the number of parts. All processes must call this."""
    sums = []
    divided = tuple(f"{path}." for path, module in target.model.named_modules() if is_divided(module))
    for name, one in weights_of(target.model).items():
        value = one.weight if isinstance(one, FixedLinear) else one.detach()
        local = value.to_local() if (sharded := isinstance(value, DTensor)) else value
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
        bits = local.contiguous().view(whole).sum(dtype=torch.int64)
        if name.startswith(divided):
            dist.all_reduce(bits, group=target.group)
        sums.append(accelerator.reduce(bits, "sum") if sharded else bits)
    return sha256_json(torch.stack([one.cpu() for one in sums]).tolist())


def _load(recipe: Recipe, device: str, place: str) -> Target:
    """place: the device that the weights are loaded to, before they move to `device`."""
    settings = recipe.target
    return load_target(
        settings.model,
        dtype=settings.dtype,
        revision=settings.revision,
        device=place,
        quantization=settings.quantization,
        chat_template=settings.chat_template,
        use="training",
        runs_on=device,
    )


@contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """The processes of a machine take turns, because its memory may hold only one full target."""
    path = Path(tempfile.gettempdir()) / f"toolkit-target-{os.getuid()}.lock"
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
