"""The benchmark of the kernels, as far as a machine without a GPU can hold it. No times."""

from __future__ import annotations

import argparse
import sys

import pytest
import torch

from toolkit.infer.kernels.dispatch import REFERENCE

DESIGNED = {"kernel", "shape", "seconds", "bytes", "share_of_roofline", "max_error"}


def test_every_problem_can_be_measured(script) -> None:
    """A problem that its own reference cannot run, or that counts other bytes than it moves, would be found on the
    card only, where minutes are dear."""
    module = script("kernels_gpu")
    sizes = module.Sizes(torch.float32, torch.device("cpu"), kv_heads=2, groups=3, width=8, vocabulary=50)
    args = argparse.Namespace(batch=[1, 2], context=[20], nodes=[4, 9], chunk=7)
    rows = [
        module.measure(problem, REFERENCE, lambda launch: launch() is not None and 0.5, bandwidth=1e3, speed=1e9)
        for problem in module.problems(sizes, args)
    ]
    assert {row["kernel"] for row in rows} == {
        "attend_causal", "attend_tree", "write_kv", "argmax", "top_log_probs", "rank_candidates", "follow_choices",
    }  # fmt: skip
    assert all(set(row) >= DESIGNED and row["max_error"] < 1e-5 and row["seconds"] == 0.5 for row in rows)
    tree = next(row for row in rows if row["kernel"] == "attend_tree" and row["shape"] == "2 x 9 behind 20")
    keys_and_values, queries_and_outputs = 2 * 29 * 2 * 8 * 2, 2 * (2 * 9 * 6 * 8)
    assert tree["bytes"] == 4 * (keys_and_values + queries_and_outputs)
    assert tree["share_of_roofline"] == pytest.approx(tree["bytes"] / 1e3 / 0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and it would be measured")
def test_it_refuses_without_a_gpu(script, monkeypatch, capsys, tmp_path) -> None:
    """Never times of a CPU, nor of the interpreter, under the name of a kernel."""
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["kernels_gpu.py", "--out", str(out)])
    assert script("kernels_gpu").main() == 2
    assert "sees none here" in capsys.readouterr().err and not out.exists()
