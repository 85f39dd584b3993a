"""The engine's options as flags, made from EngineConfig."""

from __future__ import annotations

import argparse

import pytest

from toolkit.commands.model_arguments import OPTIONS, add_engine_arguments, engine_config, errors_with_flags, flag_of
from toolkit.infer.engine.config import ConfigError, EngineConfig
from toolkit.infer.request.params import EngineError


def parsed(arguments, names=OPTIONS):
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser, names)
    return parser.parse_args(arguments)


def test_no_flag_is_the_default_config():
    """Defaults are written once, in EngineConfig; a command's own default counts only where no flag is given."""
    assert engine_config(parsed([])) == EngineConfig()
    assert engine_config(parsed([]), verify="target").verify == "target"
    assert engine_config(parsed(["--verify", "block"]), verify="target").verify == "block"


def test_every_option_has_a_flag_of_its_type():
    """A number that arrives as text would fail far from the command line."""
    values = {
        "target": "x", "draft": "y", "revision": "main", "shape": "4,1,5", "token_map": "z", "verify": "block",
        "dtype": "float32", "quantization": "int8", "draft_quantization": "int8", "device": "cuda:1",
        "torch_compile_max_bs": 3, "cuda_graph_max_bs": 4, "tensor_parallel_size": 2, "max_running_requests": 5,
        "context_length": 64, "max_total_tokens": 640, "mem_fraction_static": 0.5, "chunked_prefill_size": 7,
        "lookup_corpus": "answers.jsonl", "draft_confidence": 0.25, "chat_template": "none",
    }  # fmt: skip
    switches = {"no_draft": True, "torch_compile": True, "disable_overlap_schedule": True, "adaptive": True,
                "lookup": True, "disable_cuda_graph": True, "deterministic": True}  # fmt: skip
    arguments = [text for name, value in values.items() for text in (flag_of(name), str(value))]
    arguments += [*map(flag_of, switches), "--no-prefix-cache"]
    wanted = {**values, **switches, "prefix_cache": False}
    assert wanted.keys() == OPTIONS.keys()
    assert engine_config(parsed(arguments)) == EngineConfig(**wanted)
    assert engine_config(parsed(["--tp", "2", "--no-adaptive"])) == EngineConfig(tensor_parallel_size=2, adaptive=False)


def test_errors_name_flags():
    """What a user reads is what can be typed; errors without options stay as they are."""
    with pytest.raises(ConfigError, match=r"^--mem-fraction-static is 2 \(`else`\)$"), errors_with_flags():
        raise EngineError("`mem_fraction_static` is 2 (`else`)")
    with pytest.raises(EngineError, match="^target x$"), errors_with_flags():
        raise EngineError("target x")
