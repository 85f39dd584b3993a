"""From an EngineConfig to an engine."""

from __future__ import annotations

import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3NextConfig

from toolkit.checkpoint.draft_dir import DraftDirError, load_draft
from toolkit.infer.drafters.adaptive import AdaptiveDrafter
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.load.config import ConfigError, EngineConfig
from toolkit.infer.load.load_draft import depth_warning
from toolkit.infer.load.load_engine import graph_settings, load_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams
from toolkit.weights import read_json, write_json


@pytest.fixture
def draft(tiny_draft_directory, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(tiny_draft_directory, tmp_path / "ckpt")


def test_a_draft_directory_is_enough(draft):
    """`toolkit serve --draft ./ckpt` needs nothing else: target, shape and dtype come from it."""
    opened = load_engine(EngineConfig(draft=draft))
    assert opened.shape == DraftShape.chain(4) and opened.draft is not None
    assert next(opened.draft.head.parameters()).dtype == opened.target.dtype
    request = opened.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0]
    assert len(request.output_ids) == 8 and request.events
    opened.engine.close()


def test_best_measured_shape_is_the_default(draft):
    """A measurement must be used, and a given --shape must win over it."""
    write_json(draft / "measured.json", {"best_shape": "3,2,6"})
    assert load_engine(EngineConfig(draft=draft)).shape == DraftShape(3, 2, 6)
    assert load_engine(EngineConfig(draft=draft, shape="2,1,3")).shape == DraftShape.chain(2)
    write_json(draft / "measured.json", {"best_shape": "3,2,6", "adaptive_shape": "3,3,8"})
    assert load_engine(EngineConfig(draft=draft)).shape == DraftShape(3, 3, 8)
    assert load_engine(EngineConfig(draft=draft, adaptive=False)).shape == DraftShape(3, 2, 6)


def test_a_given_shape_is_drafted_as_it_is(draft):
    """Without --shape the engine adapts; who names a shape gets it in every step, unless --adaptive asks for more."""
    cases = [({}, True), ({"shape": "2,1,3"}, False), ({"adaptive": False}, False)]
    for arguments, adapts in [*cases, ({"shape": "2,1,3", "adaptive": True}, True)]:
        opened = load_engine(EngineConfig(draft=draft, **arguments))
        assert isinstance(opened.engine.drafter, AdaptiveDrafter) == opened.adaptive == adapts
        assert opened.shape_name.startswith("adaptive up to chain") == adapts
        opened.engine.close()


def test_the_depth_warning_quotes_the_heads_own_depths(draft):
    """Lookup drafts up to 15 tokens where the text repeats itself: its rates rise with depth."""
    head = {"shape": "adaptive", "lookup": False, "accept_rate": [0.3, 0.2, 0.1]}
    both = {"shape": "adaptive", "lookup": True, "accept_rate": [0.43, 0.44, 0.63, 0.81]}
    opened = load_draft(draft)
    opened.meta |= {"training": {"unroll": {"ttt_steps": 2}}, "measured": {"rows": [head, both]}}
    assert "(measured with it: 30 20 10 % at depth 1, 2, ..)" in depth_warning(opened, DraftShape.chain(4))


def test_no_draft_keeps_the_target(draft):
    """no_draft on the same directory is the plain baseline."""
    opened = load_engine(EngineConfig(draft=draft, no_draft=True))
    assert opened.draft is None and opened.shape is None
    assert not opened.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].speculative


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"target": None}, "neither `draft` nor `target` is given"),
        ({"draft": "ngram", "shape": "4,1"}, "`shape`: .*4,1,5"),
        ({"device": "toaster"}, "`device` is 'toaster'"),
        ({"device": "cuda:99"}, "`device` is cuda:99, but PyTorch sees"),
        ({"device": "cpu", "cuda_graph_max_bs": 4}, "graphs need a GPU"),
        ({"mem_fraction_static": 2.0}, "`mem_fraction_static` is 2"),
        ({"draft": "none", "verify": "block"}, "`verify` is block, which needs a draft head"),
        ({"draft": "ngram", "verify": "rejection"}, "n-gram lookup have none"),
    ],
)
def test_what_cannot_be_loaded(arguments, says):
    """Refused before anything is loaded: no target named x exists."""
    with pytest.raises((ConfigError, EngineError), match=says):
        load_engine(EngineConfig(**{"target": "x", **arguments}))


def test_draft_that_names_no_target(draft):
    """A head from elsewhere can still be served, when the user says for which target."""
    config = read_json(draft / "config.json")
    del config["toolkit"]["target"]
    write_json(draft / "config.json", config)
    with pytest.raises(DraftDirError, match="`target`"):
        load_engine(EngineConfig(draft=draft))


@pytest.mark.parametrize(
    ("options", "draft", "config", "says"),
    [
        ({}, None, LlamaConfig(), None),
        ({"cuda_graph_max_bs": 4}, None, LlamaConfig(), None),
        ({}, NgramLookup(), LlamaConfig(), "n-gram lookup drafts on the host"),
        ({}, None, Qwen3NextConfig(), "the target has linear-attention layers"),
        ({"adaptive": True}, None, LlamaConfig(), "`adaptive` is set"),
    ],
)
def test_graphs_are_the_default_on_a_gpu(options, draft, config, says, caplog):
    """Every engine asks here, so serve, LLM, rollouts and measurements record. What cannot be recorded runs eagerly,
    and one line of the log says why."""
    target = SimpleNamespace(device=torch.device("cuda", 0), config=config)
    with caplog.at_level(logging.INFO):
        settings = graph_settings(EngineConfig(max_running_requests=8, **options), target, draft)
    if says is None:
        assert settings is not None and settings.max_rows == options.get("cuda_graph_max_bs", 8) and settings.overlap
        assert not caplog.records
    else:
        assert settings is None
        (line,) = caplog.messages
        assert line.startswith("rounds run eagerly, not as CUDA graphs:") and says in line


def test_no_graphs_on_a_cpu(caplog):
    """Nothing changes there, and nothing is said."""
    target = SimpleNamespace(device=torch.device("cpu"), config=LlamaConfig())
    with caplog.at_level(logging.INFO):
        assert graph_settings(EngineConfig(), target, None) is None
    assert not caplog.records
