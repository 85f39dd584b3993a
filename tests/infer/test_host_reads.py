"""A round reads its results from the device once, at its end; a GPU could run all before it as one graph."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.infer.draft_tree import DraftShape
from toolkit.infer.engine import Engine
from toolkit.infer.kv_memory import MemorySettings
from toolkit.infer.sampling.sampling_params import SamplingParams

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


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["3,1,4", "3,3,8"])
@pytest.mark.parametrize("name", ["none", "eagle3", "eagle2", "mtp-three-layers", "ngram"])
def test_one_read_a_round(small_target, build, monkeypatch, name, shape, temperature, scattered):
    """Propose, verify, commit and compaction, ragged rows, one of them plain.

    (top-k, top-p and min-p read more: they look at no more of the vocabulary than they must.)
    """
    draft = None if name == "none" else build(name)
    engine = Engine(
        small_target, draft, None if draft is None else DraftShape.parse(shape), max_batch=3,
        memory=MemorySettings(scattered_pages=scattered),
    )  # fmt: skip
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=1, ignore_eos=True)
    requests = [engine.add_request([5 + i] * (3 + 4 * i), params, speculative=i != 1) for i in range(3)]
    engine.step()
    reads = HostReads(monkeypatch)
    rounds = 12
    with reads:
        for _ in range(rounds):
            engine.step()
    engine.close()
    assert not any(request.finished for request in requests)
    assert reads.found == ["tolist"] * rounds
    if name == "eagle3":
        assert max(event.accepted for request in requests for event in request.events) > 0


def test_the_counter_counts(monkeypatch):
    """Every way in which a value reaches the host, and none twice."""
    reads = HostReads(monkeypatch)
    values = torch.arange(3.0)
    with reads:
        values.tolist(), values.cpu(), values[1].item(), float(values[1]), bool(values[1] > 0), values[values > 1]
        values + 1
    assert len(reads.found) == 6
