"""Options of an engine that cannot be combined with tensor parallelism, or with the same bits in every batch.

options: the fields of an EngineConfig by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.infer.load.options import ConfigError


def check_deterministic(options: Mapping[str, Any], device_type: str) -> None:
    """Raise ConfigError if `deterministic` is set together with an option that it does not hold for."""
    given = {**options, "device": device_type}
    for name, is_set, instead in (
        ("device", device_type not in ("cpu", "cuda"), "set it to cpu or cuda"),
        ("torch_compile", given["torch_compile"], "leave it out"),
        ("tensor_parallel_size", given["tensor_parallel_size"] > 1, "set it to 1"),
        ("verify", given["verify"] in ("rejection", "block"), "set it to target"),
    ):
        if given["deterministic"] and is_set:
            raise ConfigError(
                f"`deterministic` is set and `{name}` is {given[name]}, where the bits of an answer may depend on what "
                f"is computed beside it: for `{name}`, {instead}, or leave `deterministic` out"
            )


def check_tensor_parallel(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if `tensor_parallel_size` is above 1 together with an option that needs one process."""
    size = options["tensor_parallel_size"]
    for name, is_set, instead in (
        ("quantization", options["quantization"] == "int8", "set it to none"),
        ("draft_quantization", options["draft_quantization"] in ("int8", "fp8"), "set it to none"),
        ("torch_compile", options["torch_compile"], "leave it out"),
        ("cuda_graph_max_bs", options["cuda_graph_max_bs"] is not None, "leave it out"),
    ):
        if size > 1 and is_set:
            raise ConfigError(
                f"`tensor_parallel_size` is {size} and `{name}` is {options[name]}; they cannot be combined: "
                f"for `{name}`, {instead}, or use one process"
            )
