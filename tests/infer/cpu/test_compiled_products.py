"""Packed and quantised layers inside compiled ones: their products are operators that no compiler looks into."""

from __future__ import annotations

import pytest
import torch

from toolkit.infer.cpu import compile_cpp
from toolkit.infer.engine.cpu_door import load_target, pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams

PROMPTS = [[5, 9, 7, 11], [3], [8, 8, 2, 30, 31, 32]]


def answers(engine: Engine) -> list[list[int]]:
    try:
        return [one.output_ids for one in engine.generate(PROMPTS, SamplingParams(max_tokens=12))]
    finally:
        engine.close()


@pytest.mark.compile
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_and_quantised_layers_are_compiled(traced_programs, tiny_target_directory, quantization, dtype):
    """In float32 answers are equal; in bfloat16 the engine compares the logits when it is made."""
    target = load_target(tiny_target_directory, dtype=dtype, quantization=quantization)
    pack(target)
    compiled = answers(Engine(target, torch_compile=True))
    called = {
        str(node.target) for program in traced_programs for part in program.modules() for node in part.graph.nodes
    }
    assert any("toolkit" in name and "attend" in name for name in called)
    if dtype == "float32":
        assert compiled == answers(Engine(target))
        if quantization is None and torch.backends.mkldnn.is_available():
            assert any("packed_product" in name for name in called)


@pytest.mark.compile
@pytest.mark.skipif(compile_cpp.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_inductor_compiles_them(tiny_target_directory, tiny_draft, quantization):
    """Drafted answers are those of plain decoding."""
    target = load_target(tiny_target_directory, dtype="float32", quantization=quantization)
    pack(target)
    plain = answers(Engine(target, torch_compile=True))
    assert plain == answers(Engine(target, tiny_draft, DraftShape.parse("3,3,8"), torch_compile=True))


@pytest.mark.compile
@pytest.mark.skipif(compile_cpp.compiler() is None, reason="needs a C++ compiler")
def test_inductor_compiles_several_kinds_of_weights_in_a_process(tiny_target_directory):
    """Sizes of packed weights that differ from those of an earlier engine's must not become symbols."""
    torch.compiler.reset()
    for quantization in (None, "int8"):
        target = load_target(tiny_target_directory, dtype="bfloat16", quantization=quantization)
        pack(target)
        assert answers(Engine(target, torch_compile=True))
