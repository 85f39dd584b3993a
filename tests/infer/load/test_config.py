"""EngineConfig: every option described, every combination that cannot work refused by name."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3NextConfig

from toolkit.infer.cache.page_pool import PAGE_SIZE
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.config import LEAST, ConfigError, EngineConfig
from toolkit.infer.request.params import DraftShapeError, EngineError

NAMES = {field.name for field in dataclasses.fields(EngineConfig)}


def test_every_option_has_a_help_text_that_names_options():
    """A name in backticks that is no option would be printed as it is, and nobody could type it."""
    for field in dataclasses.fields(EngineConfig):
        assert len(field.metadata["help"]) > 20, field.name
        assert set(re.findall(r"`(\w+)`", field.metadata["help"])) <= NAMES - {field.name}, field.name
    assert LEAST["max_total_tokens"] == PAGE_SIZE, "a number there, since the module that states it needs torch"


@pytest.mark.parametrize(
    ("device", "options", "names"),
    [
        ("cpu", {"target": None, "draft": "x", "revision": "main"}, {"revision", "target"}),
        ("cpu", {"draft": "y", "no_draft": True, "adaptive": True}, {"adaptive", "draft"}),
        ("cpu", {"mem_fraction_static": 0.5, "max_total_tokens": 4096}, {"mem_fraction_static", "max_total_tokens"}),
        ("cpu", {"draft": "y", "shape": "4,1"}, {"shape"}),
        ("cpu", {"draft": "y", "lookup": False, "lookup_corpus": "x.txt"}, {"lookup_corpus", "lookup"}),
        ("cpu", {"torch_compile": True}, {"torch_compile"}),
        ("cpu", {"draft": "x", "deterministic": True, "verify": "block"}, {"verify", "deterministic"}),
        ("mps", {"deterministic": True}, {"deterministic", "device"}),
        ("cuda", {"torch_compile": True, "torch_compile_max_bs": 17}, {"torch_compile_max_bs", "cuda_graph_max_bs"}),
        ("cuda", {"disable_cuda_graph": True, "cuda_graph_max_bs": 4}, {"disable_cuda_graph", "cuda_graph_max_bs"}),
    ],
)
def test_what_does_not_go_together(device, options, names):
    """Each would otherwise be ignored, or fail in the middle of a run. The device type is handed in."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"target": "x", **options}).check(device)
    assert names <= set(re.findall(r"`(\w+)`", str(caught.value))) <= NAMES


def test_verifiers_and_shapes():
    """Found here, it costs no load of a target; `auto` goes with everything."""
    with pytest.raises(DraftShapeError, match="`verify` is block, which needs a chain.*set `verify` to target"):
        EngineConfig(draft="x", shape="4,3,12", verify="block").check("cpu")
    with pytest.raises(EngineError, match="`verify` is rejection, which needs a draft head"):
        EngineConfig(target="x", draft="ngram", verify="rejection").check("cpu")
    for options in ({"shape": "4,3,12"}, {"draft": "ngram"}, {"no_draft": True}, {"shape": "4,1,5", "verify": "block"}):
        EngineConfig(**{"target": "x", "draft": "y", **options}).check("cpu")


def test_what_goes_together():
    """A check that refuses everything would pass the tests above."""
    EngineConfig(draft="x", shape="4,4,16", deterministic=True, quantization="int8").check("cpu")
    EngineConfig(draft="x", shape="4,4,16", deterministic=True, cuda_graph_max_bs=4).check("cuda")
    EngineConfig(draft="y", shape="4,1,5", adaptive=True, token_map="z", draft_quantization="int8").check("cpu")
    compiled = {"cuda_graph_max_bs": 4, "torch_compile": True, "torch_compile_max_bs": 2}
    EngineConfig(target="x", draft="y", disable_overlap_schedule=True, **compiled).check("cuda")
    EngineConfig(target="x", draft="y", adaptive=True, lookup=True).check("cuda")


@pytest.mark.parametrize(
    ("options", "draft", "config", "says"),
    [
        ({}, None, LlamaConfig(), None),
        ({"cuda_graph_max_bs": 4, "shape": "4,3,12"}, None, LlamaConfig(), None),
        ({"disable_cuda_graph": True}, None, LlamaConfig(), "`disable_cuda_graph` is set"),
        ({"adaptive": True, "lookup_corpus": "texts.jsonl"}, NgramLookup(), LlamaConfig(), None),
        ({"tensor_parallel_size": 2}, None, LlamaConfig(), None),
        ({}, None, Qwen3NextConfig(), "the target has linear-attention layers"),
    ],
)
def test_rounds_are_recorded_on_a_gpu_unless_something_rules_it_out(options, draft, config, says):
    """A user of `toolkit serve` gets graphs without an option. What no graph can run is no error: it runs eagerly."""
    target, options = SimpleNamespace(device=torch.device("cuda", 0), config=config), EngineConfig(**options)
    why = options.why_eager("cuda", target, draft)
    assert (why is None) if says is None else says in why
    assert options.why_eager("cpu", target, draft) == "the device is cpu"


@pytest.mark.parametrize(("running", "asked", "rows"), [(16, None, 16), (200, None, 64), (200, 128, 128), (8, 32, 32)])
def test_the_rows_of_recorded_rounds(running, asked, rows):
    config = EngineConfig(target="x", max_running_requests=running, cuda_graph_max_bs=asked)
    assert config.with_graph_sizes().cuda_graph_max_bs == rows


def test_unknown_options_name_the_nearest():
    config = EngineConfig(target="x")
    assert config.with_options(shape="2,1,3") == EngineConfig(target="x", shape="2,1,3")
    for wrong, near in (("torch_complie", "torch_compile"), ("zzz", "target, draft")):
        with pytest.raises(ConfigError, match=f"`{wrong}` is not an option of the engine.*{near}"):
            config.with_options(**{wrong: 1})
