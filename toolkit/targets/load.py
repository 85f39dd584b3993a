"""Loads and checks a target by its name: the demo, a hub id, a directory or a GGUF file; and shards its layers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from toolkit.errors import TargetError, UnknownFamilyError
from toolkit.log import get_logger
from toolkit.targets.chat_templates import choose_template
from toolkit.targets.gguf_file import DEMO_NAME, converted_gguf, demo_directory, without_progress_bars
from toolkit.targets.stand_in import is_stand_in, random_model, stand_in_directory
from toolkit.targets.target import Target, comparable_config


class MiMoConfig(Qwen2Config):
    """Of MiMo-7B, which transformers does not have: Qwen 2's; num_nextn_predict_layers counts MTP modules."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen 2 as it is; the MTP modules are read apart (`checkpoint/native_mtp.py`)."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]


AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)


# DeepSeek stores its MTP layers after the last decoder layer; other families give them names of their own.
NAMED_MTP = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_block)\.((layers\.)?\d+(?=\.))?")
LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def is_mtp_name(name: str, n_layers: int) -> bool:
    """Whether a tensor of a target with `n_layers` decoder layers belongs to an MTP module."""
    layer = LAYER.search(name)
    return NAMED_MTP.search(name) is not None or (layer is not None and int(layer[2]) >= n_layers)


log = get_logger(__name__)

HUB_NAME = re.compile(r"^(?P<name>([\w.-]+/)?[\w.-]+)@(?P<revision>[\w./-]+)$")
UNREAD = {"bos_token_id", "pad_token_id"}  # a tokenizer's business, which trainers like to change
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def stated_dtype(config: PretrainedConfig, device_type: str = "cpu") -> torch.dtype:
    """bfloat16 if the config has it, else float32. On a GPU ("cuda") also bfloat16 if the config has float16: it is as
    fast, and activations cannot overflow; float32 would take twice the memory and several times the time."""
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    narrow = (torch.bfloat16,) if device_type == "cpu" else (torch.bfloat16, torch.float16)
    return torch.bfloat16 if stated in narrow else torch.float32


def stated_quantization(config: PretrainedConfig) -> Any:
    """The quantization_config of a checkpoint; a multimodal one states it beside its text model's configuration."""
    configs = config, config.get_text_config(decoder=True)
    return next((found for one in configs if (found := getattr(one, "quantization_config", None))), None)


def read_target(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    chat_template: str | None = None,
    auto_dtype: Callable[[PretrainedConfig], torch.dtype] = stated_dtype,
) -> Target:
    """Load a target by the demo's name, hub id (org/name, org/name@revision), directory, .gguf path or stand-in:NAME.

    dtype: "bfloat16", "float16", "float32", or "auto", which calls auto_dtype. revision: of a hub id. The revision of
    the demo and of GGUF files is the file's hash; if given, it must match. The name of a local target is its absolute
    path, so that it does not depend on the working directory. chat_template: see `choose_template`. Raises
    `TargetError`.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise TargetError(f"dtype is {dtype!r}; expected one of auto, {', '.join(DTYPES)}")
    source, resolved = _locate(name, revision)
    config = _load_config(source, resolved)
    tokenizer = _load_tokenizer(source, resolved)
    template = choose_template(tokenizer, chat_template, str(name))
    wanted = DTYPES.get(dtype) or auto_dtype(config)
    if is_stand_in(name):
        model = random_model(config, wanted, device)
    else:
        model = _load_model(source, resolved, config, wanted)
    if str(device) != "cpu":
        # Device only: a dtype here would also cast the rotary frequencies. (The stub of `to` has lost its self.)
        model.to(torch.device(device))  # type: ignore[arg-type]
    target = Target(
        model=model, tokenizer=tokenizer, name=full_name(str(name)), revision=resolved, dtype=wanted, template=template
    )
    _check_logits(target)
    return target


def load_config(name: str | Path, revision: str | None = None) -> tuple[PretrainedConfig, str, str | None]:
    """The configuration of a target, the directory or hub id where it was found, and its revision. Loads no weights.

    Takes the same names as `read_target`. Raises `TargetError`.
    """
    source, resolved = _locate(name, revision)
    return _load_config(source, resolved), source, resolved


def load_tokenizer(
    name: str | Path, revision: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a target; takes the same names as `read_target`. Raises `TargetError`."""
    source, resolved = _locate(name, revision)
    tokenizer = _load_tokenizer(source, resolved)
    choose_template(tokenizer, chat_template, str(name))
    return tokenizer


def load_weights(target: Target, name: str | Path, revision: str | None = None) -> dict[str, torch.Tensor]:
    """Load other weights of the target's architecture: by their names in its model, on the CPU, in its dtype.

    Takes the same names as `read_target`; a tokenizer is not read. Raises `TargetError`, also if the configuration is
    not that of the target.
    """
    source, resolved = _locate(name, revision)
    config = _load_config(source, resolved)
    own, other = (comparable_config(one.get_text_config(decoder=True)) for one in (target.model.config, config))
    differing = sorted(key for key in (own.keys() | other.keys()) - UNREAD if own.get(key) != other.get(key))
    if differing:
        shown = ", ".join(f"{key} {other.get(key)} (the target's {own.get(key)})" for key in differing)
        raise TargetError(
            f"{source} is not a model of the target's configuration: {shown}. Only weights can be replaced; load it as "
            "a target of its own"
        )
    return dict(_load_model(source, resolved, config, target.dtype).state_dict())


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """org/name@revision -> (org/name, revision); any other name -> (name, `revision`).

    Raises `TargetError` when the name and `revision` give different revisions.
    """
    found = HUB_NAME.match(name)
    if found is None or Path(name).suffix == ".gguf" or Path(name).exists():
        return name, revision
    if revision not in (None, found["revision"]):
        raise TargetError(f"target {name} contains a revision, but revision is {revision!r}; give only one of them")
    return found["name"], found["revision"]


def _locate(name: str | Path, revision: str | None) -> tuple[str, str | None]:
    """The directory or hub id of `name` for transformers, and its revision: None for a directory, the hash of a GGUF
    file, or the hub's commit."""
    name, revision = split_revision(str(name), revision)
    path = Path(name).expanduser()
    if name == DEMO_NAME:  # a folder of that name is ./smollm2-135m
        directory = demo_directory()
    elif is_stand_in(name):
        directory = stand_in_directory(name)
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(f"target {name}: no such GGUF file; give the path of an existing .gguf")
        directory = converted_gguf(path)
    elif path.is_dir():
        if revision is not None:
            raise TargetError(
                f"target {name} is a directory, but revision is {revision!r}; only hub ids have revisions, leave it out"
            )
        if not (path / "config.json").is_file():
            raise TargetError(f"target directory {name} has no config.json; give a Hugging Face model directory")
        return str(path), None
    elif path.exists():
        raise TargetError(f"target {name} is a file of an unknown kind; give a directory, a .gguf file or a hub id")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise TargetError(f"target {name} does not exist; give a directory, a .gguf file, a hub id or {DEMO_NAME!r}")
    elif "/" not in name and difflib.get_close_matches(name.lower(), [DEMO_NAME], cutoff=0.8):
        raise TargetError(f"target {name!r} does not exist; the demo is called {DEMO_NAME!r}")
    else:
        return name, _commit(name, revision)
    own = directory.name
    if revision is not None and revision != own:
        raise TargetError(
            f"target {name}: revision is {revision!r}, but the file's revision is {own!r}; leave the revision out"
        )
    return str(directory), own


def _commit(name: str, revision: str | None) -> str:
    """The current commit of a hub id's revision (None: main); offline, the commit in the cache. All files are then
    loaded from this commit, and a head's record can name it."""
    try:
        # Files of the cache lie in snapshots/COMMIT/; transformers does not report the commit.
        return Path(hf_hub_download(name, "config.json", revision=revision)).parent.name
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TargetError(_no_config(name, error)) from error


def _no_config(source: str, error: BaseException) -> str:
    return (
        f"the model configuration of target {source!r} cannot be loaded: {_first_line(error)} Give a directory, a "
        f".gguf file, a hub id that can be reached, or the built-in {DEMO_NAME!r}"
    )


def full_name(name: str) -> str:
    """A target's name without its revision, with the absolute path of a local target."""
    name, _ = split_revision(name)
    path = Path(name).expanduser()
    return str(path.resolve()) if name != DEMO_NAME and path.exists() else name


def _load_config(source: str, revision: str | None) -> PretrainedConfig:
    try:
        # Without trust_remote_code, transformers asks on the terminal whether to run the repository's code.
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except OSError as error:
        raise TargetError(_no_config(source, error)) from error
    except Exception as error:  # whatever transformers makes of a wrong value
        if "trust_remote_code" in str(error):
            raise UnknownFamilyError(
                f"target {source!r} needs the code of its own repository, which is not run here; give a target whose "
                "family is part of transformers"
            ) from error
        raise UnknownFamilyError(_no_config(source, error)) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise TargetError(
            f"target {source!r} is a {config.model_type} model ({', '.join(config.architectures or ['unnamed'])}); "
            "give a decoder-only causal LM whose family is part of transformers"
        )
    return config


def _load_tokenizer(source: str, revision: str | None) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise TargetError(
            f"the tokenizer of target {source!r} cannot be loaded: {_first_line(error)} Put tokenizer.json and "
            "tokenizer_config.json into the folder of the weights"
        ) from error
    if len(tokenizer) == 0:
        raise TargetError(
            f"target {source!r} has an empty tokenizer; put its tokenizer.json into the folder of the weights"
        )
    return tokenizer


def _load_model(source: str, revision: str | None, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        # Any: output_loading_info makes the result a pair, which the declared type lacks.
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                revision=revision,
                config=config,
                dtype=dtype,
                output_loading_info=True,
            )
    except Exception as error:  # a wrong value of its config fails anywhere in the construction
        raise TargetError(f"target {source!r} cannot be loaded as a causal LM: {_first_line(error)}") from error
    model, info = loaded
    missing, mismatched = sorted(info["missing_keys"]), sorted(str(key) for key in info["mismatched_keys"])
    if missing or mismatched:
        raise TargetError(
            f"the weights of target {source!r} do not match {type(model).__name__}: missing {_some(missing)}; wrong "
            f"shape {_some(mismatched)}. These weights would stay random; give a complete causal LM checkpoint"
        )
    n_layers = config.get_text_config(decoder=True).num_hidden_layers
    unused = sorted(name for name in info["unexpected_keys"] if not is_mtp_name(name, n_layers))  # MTP: native_mtp.py
    if unused:
        log.warning("target %s has weights that no layer uses: %s", source, _some(unused))
    return model


@torch.inference_mode()
def _check_logits(target: Target) -> None:
    """Raise `TargetError` if the model's logits are not finite, or differ from `Target.logits` of the body's last
    hidden state, which the engine and the teacher use."""
    ids = torch.arange(min(4, target.vocab_size), device=target.device)[None]
    ours = target.logits(target.body(input_ids=ids, use_cache=False).last_hidden_state).float()
    theirs = target.model(input_ids=ids, use_cache=False).logits.float()
    if not (theirs.isfinite().all() and _is_finite(target.model.get_output_embeddings().weight)):
        broken = _some([name for name, weight in target.model.named_parameters() if not _is_finite(weight)])
        raise TargetError(
            f"target {target.name} computes NaN or infinity in {target.dtype}; "
            + ("choose another dtype" if broken == "none" else f"its weights have some: {broken}. Get them again")
        )
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item()):
        raise TargetError(
            f"{type(target.model).__name__} ({target.name}) changes its logits in a way that is not supported "
            f"(largest difference {(ours - theirs).abs().max().item():.3g}), so it cannot be a target; choose another "
            "model family"
        )


def _is_finite(weight: torch.Tensor) -> bool:
    return bool(weight.sum(dtype=torch.float32).isfinite())


def _first_line(error: BaseException) -> str:
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{first} {rest[0]}" if first.endswith(":") and rest else first
    if not isinstance(error, OSError | ValueError | RuntimeError):  # their texts are no sentences
        text = f"{type(error).__name__} {text}"
    return text if text.endswith((".", ";", "!")) else text + "."


def _some(names: list[str], limit: int = 5) -> str:
    return (", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")) or "none"


def shard_layers(target: Target, mesh: DeviceMesh) -> None:
    """Move this process's part of every layer, and all other weights, to the mesh's device. Not a collective.

    Each of N processes holds a part of every layer's weights, and a layer's full weights exist only while it runs;
    embeddings, final norm and output matrix are replicated. By torch's FSDP2 (PyTorch FSDP, arXiv 2304.11277), forward
    only. Every forward is a collective: all processes must run the same number, each with its own batch. FSDP keeps
    about 50 bytes a layer of each forward for a backward that is never called.
    It goes layer by layer, so that the device never holds more than one full layer, and frees the full weights.
    Raises `TargetError` for layers that FSDP cannot shard.
    """
    try:
        for layer in target.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    except (NotImplementedError, ValueError) as error:
        raise TargetError(
            f"the layers of {type(target.model).__name__} ({target.name}) cannot be sharded: "
            f"{str(error).splitlines()[0]}; set train.target=replicated"
        ) from error
    others = [parameter for parameter in target.model.parameters() if not isinstance(parameter, DTensor)]
    device = next(target.layers.parameters()).device
    # Device only: a dtype here would also cast the rotary frequencies.
    for tensor in (*others, *target.model.buffers()):
        tensor.data = tensor.data.to(device)
    # A root over all layers, without parameters, lets FSDP gather a layer while the one before it runs.
    fully_shard(target.body, mesh=mesh, ignored_params=set(others))


@contextmanager
def unsharded(layer: nn.Module) -> Iterator[None]:
    """Gather a sharded layer's full parameters, to read them outside of its forward. All processes must call this. Does
    nothing if the layer is not sharded."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def layer_bytes(target: Target) -> tuple[int, int]:
    """Bytes of a sharded target's layers: those that this process holds, and those of all processes."""
    parts = [parameter for parameter in target.layers.parameters() if isinstance(parameter, DTensor)]
    local = sum(part.to_local().untyped_storage().nbytes() for part in parts)
    return local, sum(part.numel() * part.element_size() for part in parts)
