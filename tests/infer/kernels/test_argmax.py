"""The greedy choice: one definition in plain torch, and the Triton kernel equal to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.infer.kernels import reference
from toolkit.infer.kernels.choose import argmax_for

REPOSITORY = Path(__file__).resolve().parents[3]
COMPARE = """
import sys, torch
from toolkit.infer.kernels import reference, triton_argmax
device = sys.argv[1]
generator = torch.Generator().manual_seed(0)
for rows, vocabulary in ((1, 7), (3, 4096), (5, 9001), (2, 4097)):
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(rows, 2, vocabulary, generator=generator).to(dtype).to(device)
        logits[:, 0] = logits[:, 0].round()  # many ties, in and between blocks
        logits[0, 1] = float("-inf")
        want = torch.stack([row.eq(row.max()).nonzero()[0, 0] for row in logits.flatten(0, 1)]).view(rows, 2)
        assert torch.equal(triton_argmax.argmax(logits), want), (rows, vocabulary, dtype)
        if device == "cpu":
            assert torch.equal(reference.argmax(logits), want)
        sliced = logits[..., : vocabulary - 2]
        assert torch.equal(triton_argmax.argmax(sliced), triton_argmax.argmax(sliced.contiguous()))
assert triton_argmax.argmax(torch.zeros(0, 3, 5, device=device)).shape == (0, 3)
"""


def compare(device: str, **more: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}
    line = [sys.executable, "-c", COMPARE, device]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_the_kernel_equals_the_reference_under_tritons_interpreter() -> None:
    """Another token among equals than plain decoding's would make greedy runs part between devices.

    In a process of its own: the interpreter has to be switched on before the kernel is imported.
    """
    pytest.importorskip("triton")
    compare("cpu", TRITON_INTERPRET="1")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_compiles_for_gpus(capability: int, dtype: str) -> None:
    """The interpreter takes what the compiler refuses; compiling needs no GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from toolkit.infer.kernels import triton_argmax

    signature = {"logits": f"*{dtype}", "ids": "*i64", "row_stride": "i32", "vocabulary": "i32", "block": "constexpr"}
    source = ASTSource(triton_argmax._argmax_rows, signature, constexprs={"block": triton_argmax.BLOCK})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_equals_the_reference_on_a_gpu() -> None:
    """The interpreter knows nothing of what the compiler does."""
    compare("cuda")


def test_the_choice_is_made_by_device() -> None:
    """A CPU must not meet a kernel it cannot run, and a GPU must get the one written for it."""
    assert argmax_for("cpu") is reference.argmax
    triton_argmax = pytest.importorskip("toolkit.infer.kernels.triton_argmax")
    assert argmax_for("cuda") is triton_argmax.argmax
