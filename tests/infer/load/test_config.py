"""EngineConfig: every option described, every combination that cannot work refused by name."""

from __future__ import annotations

import dataclasses
import re

import pytest

from toolkit.infer.cache.page_pool import PAGE_SIZE
from toolkit.infer.load.config import ConfigError, EngineConfig
from toolkit.infer.load.options import LEAST
from toolkit.infer.request.params import DraftShapeError, EngineError

NAMES = {field.name for field in dataclasses.fields(EngineConfig)}


def test_every_option_has_a_help_text_that_names_options():
    """A name in backticks that is no option would be printed as it is, and nobody could type it."""
    for field in dataclasses.fields(EngineConfig):
        assert len(field.metadata["help"]) > 20, field.name
        assert set(re.findall(r"`(\w+)`", field.metadata["help"])) <= NAMES - {field.name}, field.name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "neither `draft` nor `target` is given"),
        ({"draft": "x", "revision": "main"}, "`revision` is 'main', but `target` is not given"),
        ({"draft": "none"}, "neither `draft` nor `target` is given"),
        ({"draft": "ngram"}, "`draft` is ngram, which does not name a target; give one with `target`"),
        ({"draft": "native"}, "`draft` is native, which does not name a target; give one with `target`"),
        ({"target": "x", "draft": "none", "shape": "4,1,5"}, "`shape` is 4,1,5, but nothing is drafted"),
        (
            {"target": "x", "draft": "y", "no_draft": True, "adaptive": True},
            "`adaptive` is True, but nothing",
        ),
        ({"target": "x", "draft": "none", "token_map": "ids.pt"}, "`token_map` is ids.pt, but nothing is drafted"),
        ({"target": "x", "max_running_requests": 0}, "`max_running_requests` is 0; at least 1"),
        ({"target": "x", "context_length": 1}, "`context_length` is 1; at least 2"),
        ({"target": "x", "chunked_prefill_size": 0}, "`chunked_prefill_size` is 0; at least 1"),
        ({"target": "x", "max_total_tokens": 15}, "`max_total_tokens` is 15; at least 16"),
        ({"target": "x", "cuda_graph_max_bs": 0}, "`cuda_graph_max_bs` is 0; at least 1"),
        ({"target": "x", "torch_compile_max_bs": 0}, "`torch_compile_max_bs` is 0; at least 1"),
        ({"target": "x", "mem_fraction_static": 0.0}, "`mem_fraction_static` is 0; a share between 0 and 1"),
        ({"target": "x", "mem_fraction_static": 1.5}, "`mem_fraction_static` is 1.5; a share between 0 and 1"),
        ({"target": "x", "mem_fraction_static": 0.5, "max_total_tokens": 4096}, "both size the cache"),
        ({"draft": "y", "shape": "4,1"}, "`shape`: .*4,1,5"),
        ({"target": "x", "tensor_parallel_size": 0}, "`tensor_parallel_size` is 0; at least 1"),
        ({"target": "x", "dtype": "half"}, "`dtype` is 'half'; one of auto, bfloat16, float16, float32"),
        ({"target": "x", "verify": "luck"}, "`verify` is 'luck'; one of auto, target, rejection, block"),
        ({"target": "x", "draft": "ngram", "draft_quantization": "int8"}, "int8, but there is no draft head"),
        ({"target": "x", "torch_compile_max_bs": 4}, "`torch_compile_max_bs` is 4, but `torch_compile` is not set"),
        ({"target": "x", "torch_compile": True, "torch_compile_max_bs": 4}, "4 and the device is cpu"),
        ({"target": "x", "disable_overlap_schedule": True}, "only CUDA graphs overlap"),
        ({"target": "x", "cuda_graph_max_bs": 4}, "the device is cpu; graphs need a GPU"),
        ({"target": "x", "draft": "ngram", "cuda_graph_max_bs": 4, "adaptive": True}, "a graph has one draft shape"),
        (
            {"target": "x", "tensor_parallel_size": 2, "torch_compile": True},
            "`torch_compile` is True; they cannot",
        ),
        (
            {"target": "x", "tensor_parallel_size": 2, "quantization": "int8"},
            "`quantization` is int8; they cannot",
        ),
        ({"target": "x", "deterministic": True, "torch_compile": True}, "for `torch_compile`, leave it out"),
        ({"target": "x", "deterministic": True, "tensor_parallel_size": 2}, "for `tensor_parallel_size`, set it to 1"),
        ({"draft": "x", "deterministic": True, "verify": "block"}, "`verify` is block.*set it to target"),
    ],
)
def test_what_does_not_go_together_on_a_cpu(options, says):
    """Each would otherwise be ignored, or fail in the middle of a run."""
    with pytest.raises(ConfigError, match=says) as caught:
        EngineConfig(**options).check("cpu")
    assert set(re.findall(r"`(\w+)`", str(caught.value))) <= NAMES


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"torch_compile": True, "disable_cuda_graph": True},
            "only CUDA graphs are compiled, and `disable_cuda_graph`",
        ),
        ({"draft": "y", "torch_compile": True, "lookup": True}, "only CUDA graphs are compiled, and `lookup` is set"),
        ({"draft": "y", "draft_quantization": "int8"}, "the device is cuda; int8 heads need cpu"),
        ({"torch_compile": True, "torch_compile_max_bs": 8, "cuda_graph_max_bs": 4}, "is 8 and rounds of at most 4"),
        ({"torch_compile": True, "torch_compile_max_bs": 17}, "is 17 and rounds of at most 16"),
        ({"disable_cuda_graph": True, "cuda_graph_max_bs": 4}, "are both set; leave one of them out"),
        (
            {"draft": "y", "adaptive": True, "disable_overlap_schedule": True},
            "only CUDA graphs overlap, and `adaptive`",
        ),
        ({"tensor_parallel_size": 2, "cuda_graph_max_bs": 4}, "`cuda_graph_max_bs` is 4; they cannot be combined"),
        ({"deterministic": True, "torch_compile": True}, "`torch_compile` is True.*leave it out"),
    ],
)
def test_what_does_not_go_together_on_a_gpu(options, says):
    """The device type is handed in, so that this is tested without a GPU."""
    with pytest.raises(ConfigError, match=says):
        EngineConfig(target="x", **options).check("cuda")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, None),
        ({"shape": "4,3,12", "verify": "block"}, None),
        ({"cuda_graph_max_bs": 4}, None),
        ({"disable_cuda_graph": True}, "`disable_cuda_graph` is set"),
        ({"adaptive": True}, "`adaptive` is set, and a graph has one draft shape"),
        ({"lookup": True}, "`lookup` is set"),
        ({"lookup_corpus": "texts.jsonl"}, "`lookup` is set"),
        ({"tensor_parallel_size": 2}, "`tensor_parallel_size` is above 1"),
    ],
)
def test_rounds_are_recorded_on_a_gpu_unless_an_option_rules_it_out(options, says):
    """A user of `toolkit serve` gets graphs without an option. What a graph cannot run is no error: it runs eagerly."""
    config = EngineConfig(target="x", draft="y", **options)
    why = config.why_eager("cuda")
    assert (why is None) if says is None else says in why
    assert config.why_eager("cpu") == "the device is cpu"


@pytest.mark.parametrize(("running", "asked", "rows"), [(16, None, 16), (200, None, 64), (200, 128, 128), (8, 32, 32)])
def test_the_rows_of_recorded_rounds(running, asked, rows):
    assert EngineConfig(target="x", max_running_requests=running, cuda_graph_max_bs=asked).recorded_rows == rows


def test_verifiers_and_shapes():
    """Found here, it costs no load of a target; `auto` goes with everything."""
    for verify in ("rejection", "block"):
        with pytest.raises(DraftShapeError, match=f"`verify` is {verify}, which needs a chain.*set `verify` to target"):
            EngineConfig(draft="x", shape="4,3,12", verify=verify).check("cpu")
        for draft in ("none", "ngram"):
            with pytest.raises(EngineError, match=f"`verify` is {verify}, which needs a draft head"):
                EngineConfig(target="x", draft=draft, verify=verify).check("cpu")
        EngineConfig(draft="x", shape="4,1,5", verify=verify).check("cpu")
    for options in ({"shape": "4,3,12"}, {"draft": "ngram"}, {"no_draft": True}):
        EngineConfig(**{"target": "x", "draft": "y", **options}).check("cpu")


def test_the_cache_holds_a_page():
    """The bound is written as a number, because the module that states the page size needs torch."""
    assert LEAST["max_total_tokens"] == PAGE_SIZE


def test_deterministic_needs_a_device_that_was_looked_at():
    with pytest.raises(ConfigError, match="`deterministic` is set and `device` is mps.*set it to cpu or cuda"):
        EngineConfig(target="x", deterministic=True).check("mps")


def test_what_goes_together():
    """A check that refuses everything would pass the tests above."""
    EngineConfig(target="x", torch_compile=True).check("cpu")
    EngineConfig(draft="x", shape="4,4,16", deterministic=True, quantization="int8").check("cpu")
    EngineConfig(draft="x", shape="4,4,16", deterministic=True, cuda_graph_max_bs=4).check("cuda")
    EngineConfig(draft="y", shape="4,1,5", adaptive=True, token_map="z", draft_quantization="int8").check("cpu")
    compiled = {"cuda_graph_max_bs": 4, "torch_compile": True, "torch_compile_max_bs": 2}
    EngineConfig(target="x", draft="y", disable_overlap_schedule=True, **compiled).check("cuda")
    EngineConfig(target="x", draft="y", disable_overlap_schedule=True, torch_compile=True).check("cuda")
    EngineConfig(target="x", draft="y", adaptive=True, lookup=True).check("cuda")
    EngineConfig(target="x", disable_cuda_graph=True).check("cpu")


def test_unknown_options_name_the_nearest():
    config = EngineConfig(target="x")
    assert config.with_options(shape="2,1,3") == EngineConfig(target="x", shape="2,1,3")
    for wrong, near in (("torch_complie", "torch_compile"), ("zzz", "target, draft")):
        with pytest.raises(ConfigError, match=f"`{wrong}` is not an option of the engine.*{near}"):
            config.with_options(**{wrong: 1})
