"""Every kernel equals its plain torch reference, and compiles for the GPUs it was written for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.program import lines_of, said_by
from toolkit.infer.kernels import dispatch
from toolkit.infer.kernels.dispatch import REFERENCE, ops_for

KERNELS = {
    "write_kv", "compact", "attend_causal", "attend_tree", "attend_paths", "product", "follow_choices", "rotate",
    "gated", "rms_norm", "rotate_joined", "linear", "gated_linear", "scaled_product", "least_kept", "draw", "uniform",
    "grow_beams", "rank_candidates", "argmax", "top_log_probs",
}  # fmt: skip
ALL = {*KERNELS, "skinny", "large_pool", "score_rows", "unrolled", "diagonals"}
# Bytes of registers that a thread spills at most at shapes of real models, by kernel and dtype; 0 for the rest. They
# may only fall. Compilers differ: these hold for Triton 3.6 and 3.9.
SPILLED = {
    "causal_parts": {"fp32": 16},
    "tree_parts": {"bf16": 28, "fp32": 56},
    "_attend_paths": {"bf16": 4, "fp32": 60},  # of Triton 3.9; fp32 at heads of 256
    "_forward": {"bf16": 52, "fp32": 96},
    "_queries_part": {"fp32": 200},
    "_keys_part": {"bf16": 64, "fp32": 312},
    "_merge": {"bf16": 4},  # of Triton 3.9, at heads of 256
}
# Bytes of shared memory that a block can have; for sm_80 those of sm_86 and sm_89, whose kernels are the same.
SHARED = {80: 101376, 90: 232448}


def check(found: dict[str, Any], groups: set[str]) -> None:
    """These groups ran, and nothing was wrong."""
    wrong = [one["wrong"] for one in found.values() if one["wrong"] is not None]
    assert not wrong, "\n".join(wrong)
    assert {group for group, one in found.items() if one["count"]} == groups


@pytest.mark.slow
def test_kernels_equal_their_references_under_the_interpreter() -> None:
    """Ragged lengths, head layouts, head dims, windows, soft caps, sinks, page sizes, trees, ties; outputs poisoned."""
    check(said_by("infer.kernels.kernel_cases", "cpu", interpreted=True), ALL)


def test_the_best_of_rows_that_are_no_numbers() -> None:
    """A head that breaks down must still give siblings that differ, and scores that can be ranked."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[0, 5], logits[1], logits[2, 7], logits[3, :299] = float("nan"), float("nan"), float("inf"), float("-inf")
    scores, ids = REFERENCE.top_log_probs(logits, 6)
    assert not scores.isnan().any() and (scores <= 0).all()
    assert (scores[:3] == -torch.inf).all() and scores[3, 0] == 0 and ids[3, 0] == 299
    assert all(len(set(row)) == 6 and 0 <= min(row) and max(row) < 300 for row in ids.tolist())


@pytest.mark.slow
def test_the_engine_writes_the_same_tokens_on_kernels() -> None:
    """A kernel that gets another table, length, mask or depth than the reference path writes other tokens.

    Windows, soft caps, grouped heads, chunks of prompts, kept pages, a chain and trees, two ragged rows.
    """
    found = said_by("infer.kernels.engine_on_kernels", interpreted=True)
    assert found["got"] == found["wanted"]
    assert len({token for answer in found["wanted"] for token in answer}) > 5, "the answers hardly vary"
    assert found["accepted"] > 1, "nothing was accepted, so nothing was walked or moved"
    of_float8_heads = {"scaled_product"}
    assert set(found["ran"]) == KERNELS - of_float8_heads, "a kernel that never ran was not compared"
    alone, chain, tree = found["in_order"]
    assert chain == alone and tree == alone, "`deterministic` gave other bits in another schedule"


@pytest.mark.compile
@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile_and_fit_a_gpu_at_real_shapes(capability: int) -> None:
    """The interpreter takes what the compiler refuses. A kernel that keeps too much in registers works, many times
    slower; one with too large tiles is not launched."""
    # Beside attention the kernels of sm_80 are those of the others, and far from any limit; it has no float8.
    found = lines_of("infer.kernels.spills", str(capability), *(["dots"] if capability == 80 else []))
    assert len(found) > 30
    for one in found:
        assert one["shared"] <= SHARED[capability], one
        assert one["spilled"] <= SPILLED.get(one["kernel"], {}).get(one["dtype"], 0), one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_equal_their_references_on_a_gpu() -> None:
    """The interpreter knows nothing of what the compiler does."""
    check(said_by("infer.kernels.kernel_cases", "cuda"), ALL)


def test_the_choice_is_made_by_device() -> None:
    """A CPU must not meet a kernel it cannot run, and a GPU must get the one written for it."""
    # An engine of this process may have installed native ones.
    native = {
        name: getattr(REFERENCE, name)
        for name in ("row_attention", "decoder_layer", "head_layer", "head_norm", "least_kept")
    }
    assert replace(ops_for("cpu"), **native) == REFERENCE
    kernels = pytest.importorskip("toolkit.infer.kernels.triton.paged_attention")
    on_gpu = ops_for("cuda")
    assert on_gpu.has_kernels and on_gpu.attend_tree is kernels.attend_tree
    assert not {getattr(on_gpu, name) for name in KERNELS} & {getattr(REFERENCE, name) for name in KERNELS}


def test_an_old_gpu_gets_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turing multiplies neither bfloat16 nor tf32: the first launch of a kernel would fail."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert dispatch._choose("cuda") is REFERENCE
