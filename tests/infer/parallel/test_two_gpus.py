"""Two GPUs answer as one does: sums over the ranks by NCCL, kernels on each rank's own device."""

from __future__ import annotations

import pytest
import torch

from toolkit.bench.near_tie import find_divergence, plain_logits
from toolkit.infer.load.llm import LLM
from toolkit.infer.request.params import SamplingParams

DEVICE = "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_two_gpus_answer_as_one_does(family, head_for, prompts, kind, dtype):
    """A rank that adds its part twice, reads another's pages or launches on another's device writes other tokens. The
    two runs add up in another order, so that answers may part at near-ties."""
    options = {"target": family("llama"), "draft": head_for(kind, "llama"), "shape": "3,2,6", "dtype": dtype}
    options |= {"device": DEVICE, "max_running_requests": 3, "max_total_tokens": 4096}
    params = SamplingParams(max_tokens=24)
    with LLM(**options) as alone:
        wanted = alone.generate(prompts, params)
    with LLM(**options, tensor_parallel_size=2) as divided:
        got = divided.generate(prompts, params)
        places = divided.target.device, divided.engine.driver.size
    assert places == (torch.device(DEVICE, 0 if DEVICE == "cuda" else None), 2)
    assert sum(answer.acceptance.verify_steps for answer in got) > 0
    for prompt, one, two in zip(prompts, wanted, got, strict=True):
        parted = find_divergence(
            one.token_ids, two.token_ids, lambda ids, prompt=prompt: plain_logits(alone.target, [*prompt, *ids]),
            alone.target.dtype,
        )  # fmt: skip
        assert parted is None or parted.near_tie, parted
