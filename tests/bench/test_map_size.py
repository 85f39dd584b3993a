"""The size of a token map: what smaller maps lose is predicted from one forecast, and the engine confirms it."""

from __future__ import annotations

import copy

import pytest
import torch

from toolkit.bench.answers import Sampling
from toolkit.bench.engine_context import Trial
from toolkit.bench.map_size import (
    SizeResult,
    best_size,
    measure_sizes,
    predicted_size,
    sizes_of,
    with_ids,
)
from toolkit.bench.prompts import Prompt
from toolkit.bench.side_by_side import BenchError
from toolkit.checkpoint.draft_dir import load_draft, save_draft
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.pipeline.map_size import size_table
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

PROMPTS = [
    Prompt(str(at), "count", (text,)) for at, text in enumerate(("count apples", "numbers and rivers", "spring"))
]


@pytest.fixture
def frozen(tiny_target, tiny_draft, tmp_path):
    """An EAGLE-3 head whose output matrix has the target's rows, in a directory."""
    state = dict(tiny_draft.head.state_dict())
    state["lm_head.weight"] = tiny_target.lm_head.weight[tiny_draft.token_map.ids].detach().clone()
    return save_draft(tmp_path / "ckpt", state, tiny_draft.head.config, tiny_draft.token_map, {})


def test_sizes_hold_the_forced_ids_and_end_with_the_vocabulary():
    assert sizes_of(5000, 3) == [1024, 2048, 4096, 5000]
    assert sizes_of(4096, 1500) == [2048, 4096] and sizes_of(300, 3) == [300]


def test_auto_is_the_fastest_of_the_best_prediction_and_its_neighbours():
    """The fastest of all is too far from the prediction to be run by the command"""
    figures = ((10, 1.2, 9.0), (20, 1.3, 1.4), (40, 1.5, 1.3), (80, 1.4, 1.2))
    results = [SizeResult(str(n), n, 1.0, 0.1, 0.2, 1.5, told, 1.5, 9.0, ran) for n, told, ran in figures]
    results.append(SizeResult("40 + 5", 40, None, 0.1, 0.2, None, None, 1.5, 9.0, 8.0))
    assert predicted_size(results).name == "40" and best_size(results).name == "20"


def test_one_table_for_sizes_with_and_without_predictions():
    rows = [
        SizeResult("40", 40, 0.5, 0.001, 0.2, 1.5, 1.25),
        SizeResult("40 + 5", 40, None, 0.002, 0.2, None, None, 1.6, 9.0, 8.0),
    ]
    _, first, second = (line.split() for line in size_table(rows, {"40": "chosen"}))
    assert first == ["40", "50.0%", "1.00", "1.50", "predicted", "1.25x", "predicted", "<-", "chosen"]
    assert second == ["40", "+", "5", "-", "2.00", "1.60", "8.00x"]


def test_a_head_takes_rows_for_other_ids(tiny_target, tiny_draft, frozen):
    """Its own rows stay, the others are the target's; a matrix of its own making takes none."""
    draft = load_draft(frozen)
    wider = with_ids(draft, tiny_target, TokenMap.identity(tiny_target.vocab_size))
    rows = wider.head.lm_head.weight
    assert torch.equal(rows[draft.token_map.ids], draft.head.lm_head.weight)
    outside = ~draft.token_map.t2d
    assert torch.equal(rows[outside], tiny_target.lm_head.weight[outside])
    with pytest.raises(BenchError, match="cannot change after training"):
        with_ids(tiny_draft, tiny_target, TokenMap.identity(tiny_target.vocab_size))


ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=ON_GPU)]
)
def test_a_head_as_it_was_opened_takes_rows(tiny_target, frozen, device, dtype):
    """It is opened on the CPU in its own dtype; with rows of a target elsewhere it is moved there, whole."""
    model = copy.deepcopy(tiny_target.model).to(device, dtype)
    target = Target(model=model, tokenizer=tiny_target.tokenizer, name="tiny", revision=None, dtype=dtype)
    wider = with_ids(load_draft(frozen), target, TokenMap.identity(target.vocab_size))
    assert {(one.device.type, one.dtype) for one in wider.head.parameters()} == {(device, dtype)}
    torch.testing.assert_close(wider.head.lm_head.weight, target.lm_head.weight)


def test_predictions_are_what_the_engine_accepts(tiny_target, frozen):
    """With all ids the forecast is exact; a map that lacks the answers' ids loses their drafts."""
    target = copy.deepcopy(tiny_target)  # it is packed
    whole = TokenMap.identity(tiny_target.vocab_size)
    map_of = lambda size: TokenMap.from_ids(range(size), whole.vocab_size)  # noqa: E731
    trial = Trial(target, load_draft(frozen), PROMPTS, Sampling(16, 0.0, 0), EngineConfig(max_running_requests=1))
    results = measure_sizes(trial, lambda: load_draft(frozen), [12, 250, whole.size], map_of, DraftShape(2, 3, 6))
    assert [one.name for one in results] == ["12", "250", str(whole.size)]
    assert results[0].coverage <= results[1].coverage <= results[2].coverage == 1.0
    assert results[0].predicted_accept_length <= results[2].predicted_accept_length
    best = predicted_size(results)
    assert all((one.speedup is None) == (abs(results.index(one) - results.index(best)) > 1) for one in results)
    assert all(one.head_seconds > 0 for one in results) and best_size(results).speedup > 0
    if results[2].accept_length is not None:
        assert results[2].predicted_accept_length == pytest.approx(results[2].accept_length)
