"""A round on a device that is not the host's: what would mix the two, which on a CPU alone nobody notices.

The device is torch's "meta", which has shapes and no numbers.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.infer.graphs.test_graph_rounds import ROWS, engine_with
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.graphs.recordings import GraphSettings


class OfTheHost(TorchDispatchMode):
    """Notes operations that read or write the host's tensors. Its numbers (no dimension) go with a kernel's launch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
        self.seen += 1
        if any(one.device.type == "cpu" and one.dim() > 0 for one in tensors):
            self.found.add(function.name())
        return out


@pytest.mark.parametrize("name, shape", [("eagle3", "3,1,4"), ("mtp-three-layers", "4,3,9")])
def test_a_round_touches_nothing_of_the_host(small_target, build, monkeypatch, name, shape):
    """A mask, an index or a table that was made on the host fails on a GPU, or makes the round wait for a copy: greedy,
    drawn and cut rounds, in every bucket."""
    config = small_target.config
    width = config.hidden_size // config.num_attention_heads
    kv_shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, width, torch.float32, torch.device("meta"))
    probe = SimpleNamespace(kv_shape=lambda *_given: kv_shape, scorings={})
    # Both look at numbers, once, before any round.
    monkeypatch.setattr(TargetForward, "_probe_layers", lambda self: probe)
    monkeypatch.setattr(TargetForward, "compare_logits", lambda self, *given: None)
    draft = build(name)
    draft = replace(draft, head=copy.deepcopy(draft.head).to("meta"))
    target = replace(small_target, model=copy.deepcopy(small_target.model).to("meta"))
    host, rounds = OfTheHost(), []

    def capture(run):
        run()  # makes tables
        with host:
            run()
        rounds.append(run)
        return run

    engine_with(target, draft, shape, GraphSettings(ROWS, capture), tokens=640).close()
    assert len(rounds) == 12 and host.seen > 1000 and not host.found
    with host:
        torch.ones(2).add(1)
    assert host.found, "it would have noticed nothing"
