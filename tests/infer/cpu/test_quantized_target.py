"""Drafted answers of a quantised target are those of the same quantised target decoded plainly."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import build_draft
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.errors import TargetError
from toolkit.infer.cpu.blocked_product import takes
from toolkit.infer.cpu.int8_linear import Int8Linear, quantize_head
from toolkit.infer.cpu.packed_linear import PackedLinear
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.cpu_door import load_target
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_engine import load_engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.target import Target
from toolkit.weights import read_json, write_json

PARAMS = SamplingParams(max_tokens=32)


@pytest.fixture(scope="module")
def quantized(tiny_target_directory) -> Target:
    return load_target(tiny_target_directory, quantization="int8", dtype="float32")


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in (5, 9, 1, 17, 3, 30, 2)]


@pytest.mark.parametrize("tree, max_batch", [(False, 1), (True, 3)])
def test_oracle_drafts_change_nothing(quantized, reference, oracle, tree, max_batch):
    """Long accepted runs, verified in chains and trees, against Hugging Face's generate on the same quantised model."""
    asked = prompts(quantized.vocab_size)
    wanted = [reference(quantized, prompt, 32) for prompt in asked]
    engine = Engine(quantized, max_running_requests=max_batch)
    answers = dict(zip(map(tuple, asked), wanted, strict=True))
    engine.shape = DraftShape.parse("4,1,5")  # the engine drafts; what, the oracle decides
    engine.drafter = oracle(answers, quantized.vocab_size, right=0.8, tree=tree)
    engine._memory.slack = 16  # the oracle's trees have up to 13 nodes
    got = engine.generate(asked, PARAMS)
    assert [request.output_ids for request in got] == wanted
    assert any(event.accepted > 1 for request in got for event in request.events)


@pytest.mark.parametrize(("name", "kept"), [("eagle2", range(24)), ("mtp", range(0, 24, 2))])
def test_heads_that_share_the_output_matrix(small_target, shared_draft, name, kept, tmp_path):
    """They draft by the quantised matrix, whole or the rows of a token map, and change nothing."""
    small_target.model.save_pretrained(tmp_path)
    small_target.tokenizer.save_pretrained(tmp_path)
    target = load_target(tmp_path, quantization="int8")
    draft: DraftCheckpoint = shared_draft(name, kept)
    asked = prompts(24)
    engine = Engine(target, draft, DraftShape.parse("3,2,6"), max_running_requests=3)
    got = engine.generate(asked, PARAMS)
    engine.close()
    assert [one.output_ids for one in got] == [one.output_ids for one in Engine(target).generate(asked, PARAMS)]
    assert any(event.accepted for request in got for event in request.events)


def test_the_draft_directory_says_what_its_target_was(tiny_draft_directory, tmp_path):
    """A head trained for a quantised target serves it without being told; the user may still want the weights whole."""
    config = read_json(tiny_draft_directory / "config.json")
    config["toolkit"]["target"]["quantization"] = "int8"
    folder = tmp_path / "ckpt"
    folder.mkdir()
    for path in tiny_draft_directory.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    write_json(folder / "config.json", config)
    for asked, expected in (("auto", Int8Linear), ("none", PackedLinear), ("int8", Int8Linear)):
        opened = load_engine(EngineConfig(draft=folder, quantization=asked))
        assert type(opened.target.layers[0].mlp.up_proj) is expected
        opened.engine.close()


@pytest.mark.parametrize(("target", "asked", "expected"), [
    ("none", "auto", PackedLinear), ("none", "int8", Int8Linear), ("int8", "auto", Int8Linear),
    ("int8", "none", PackedLinear),
])  # fmt: skip
def test_a_head_of_a_byte_a_weight(tiny_draft_directory, target, asked, expected):
    """As asked, else as the target where that is quantised; all of it, its output matrix too; and the answers are the
    target's."""
    opened = load_engine(
        EngineConfig(draft=tiny_draft_directory, quantization=target, draft_quantization=asked, shape="3,1,4")
    )
    head = opened.draft.head
    assert {type(layer) for layer in (head.fc, head.midlayer.mlp.up_proj, head.lm_head)} == {expected}
    assert not any(isinstance(module, torch.nn.Linear) for module in head.modules())
    got = [one.output_ids for one in opened.engine.generate(prompts(opened.target.vocab_size), PARAMS)]
    opened.engine.close()
    plain = Engine(opened.target).generate(prompts(opened.target.vocab_size), PARAMS)
    assert got == [one.output_ids for one in plain]


@pytest.mark.parametrize("asked", ["auto", "none"])
def test_a_head_beside_a_whole_target_has_a_byte_a_weight_where_our_products_take_it(tiny_draft_directory, asked):
    opened = load_engine(EngineConfig(draft=tiny_draft_directory, dtype="bfloat16", draft_quantization=asked))
    layer = opened.draft.head.lm_head
    weight = torch.zeros(layer.out_features, layer.in_features, dtype=torch.bfloat16)
    assert isinstance(layer, Int8Linear) == (asked == "auto" and takes(weight))
    opened.engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_heads_scores_in_a_byte_a_weight(tiny_target, dtype):
    """Near those of the whole weights; a product that is handed in gets the rounded ones."""
    head = build_draft(tiny_target).head.to(dtype)
    states = torch.randn(9, head.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = head.logits(states).float()
    quantize_head(head)
    for scores in (head.logits(states), head.logits(states, lambda x, weight: x @ weight.T)):
        assert 0 < (scores.float() - whole).norm() < 0.02 * whole.norm()


def test_a_head_that_cannot_be_quantised(tiny_target):
    head = build_draft(tiny_target).head.to(torch.float16)
    with pytest.raises(TargetError, match="the head is torch.float16 on cpu"):
        quantize_head(head)
