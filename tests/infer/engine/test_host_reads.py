"""A round reads its results from the device once, at its end; a GPU could run all before it as one graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

# Ops whose result the host has to wait for: a scalar, or a shape that depends on values.
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}


class HostReads(TorchDispatchMode):
    """Counts them, with the methods that hand a whole tensor to the host."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.found: list[str] = []
        for name in ("tolist", "numpy", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name, method):
        def counted(tensor, *args, **kwargs):
            self.found.append(name)
            count = len(self.found)
            result = method(tensor, *args, **kwargs)
            del self.found[count:]  # what the method itself reads is this read
            return result

        return counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split(".")[0]
        by_mask = name.startswith("aten::index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for arg in args[1:]
            if isinstance(arg, (list, tuple))
            for index in arg
        )
        if name in READS or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


# Of three rows: greedy; drawn from whole distributions; from ones cut in every way, with all that edits them.
SETTINGS = {
    "greedy": [{}, {}, {}],
    "drawn": [{"temperature": 0.8}] * 3,
    "cut": [
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5},
        {"logprobs": 2},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.95, "min_p": 0.01, "logprobs": 4, "logit_bias": {7: 1.0}},
    ],
}


def check_one_read_a_round(target, monkeypatch, draft, shape, settings, verify="target", seeds=(1, 1, 1)) -> int:
    wanted = None if draft is None else DraftShape.parse(shape)
    engine = Engine(target, draft, wanted, max_running_requests=3, verify=verify)
    # As on a GPU; on a CPU, where a read costs nothing, it looks which nodes are padding.
    engine._rounds._context = dataclasses.replace(engine._rounds._context, packed=False)
    params = [
        SamplingParams(max_tokens=60, seed=seed, ignore_eos=True, **one)
        for seed, one in zip(seeds, SETTINGS[settings], strict=True)
    ]
    requests = [engine.add_request([5 + i] * (3 + 4 * i), params[i], speculative=i != 1) for i in range(3)]
    engine.step()
    reads = HostReads(monkeypatch)
    rounds = 12
    with reads:
        for _ in range(rounds):
            engine.step()
    engine.close()
    assert not any(request.finished for request in requests)
    assert reads.found == ["tolist"] * rounds
    for request in requests:
        assert len(request.logprobs) == (0 if request.params.logprobs is None else len(request.output_ids))
    return max(event.accepted for request in requests for event in request.events)


@pytest.mark.parametrize(
    ("name", "shape", "settings"),
    [("none", "", "cut"), ("eagle3", "3,1,4", "greedy"), ("eagle3", "3,3,8", "cut"), ("ngram", "3,1,4", "drawn"),
     ("mtp-three-layers", "3,3,8", "drawn")],
)  # fmt: skip
def test_one_read_a_round(small_target, build, monkeypatch, name, shape, settings):
    """Propose, verify, commit and compaction, ragged rows, one of them plain.

    (Of a vocabulary of more than 64 tokens a CPU reads more under top-p: it looks at no more than it must.)
    """
    draft = None if name == "none" else build(name)
    longest = check_one_read_a_round(small_target, monkeypatch, draft, shape, settings)
    if name != "mtp-three-layers":  # its drafts may all be wrong
        assert (longest > 0) == (draft is not None)


@pytest.mark.parametrize(("verify", "settings"), [("rejection", "drawn"), ("auto", "cut")])
def test_one_read_with_drawn_drafts(small_target, small_draft, monkeypatch, verify, settings):
    """The head's distribution, the rule and the draw after what it kept; under auto beside rows that state a seed."""
    monkeypatch.setattr("secrets.randbits", lambda _bits: 5)
    seeds = (None, 1, 1) if verify == "auto" else (1, 1, 1)
    check_one_read_a_round(small_target, monkeypatch, small_draft, "3,1,4", settings, verify, seeds=seeds)


def test_the_counter_counts(monkeypatch):
    """Every way in which a value reaches the host, and none twice."""
    reads = HostReads(monkeypatch)
    values = torch.arange(3.0)
    with reads:
        values.tolist(), values.cpu(), values[1].item(), float(values[1]), bool(values[1] > 0), values[values > 1]
        values + 1
    assert len(reads.found) == 6
