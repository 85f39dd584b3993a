"""vLLM drafts with an exported block head as our engine does: the same tokens, and as many accepted drafts by depth.

Opt-in: TOOLKIT_VLLM_PYTHON names the interpreter of an environment with vLLM's CPU build, which serves DFlash's form
(no Markov bias) alone. The target is tiny and random, and the head knows its answers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.peers.test_vllm import MAX_TOKENS, STEPS, our_answers, vllms_answers
from tests.train.conftest import answered, answers_of, fit
from toolkit.checkpoint.draft_dir import save_draft
from toolkit.cli import main
from toolkit.infer.request.params import SamplingParams
from toolkit.targets.load import read_target
from toolkit.targets.target import describe_target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.target_side import TargetSide
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings

PROMPTS, UPDATES = 8, 150
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        "TOOLKIT_VLLM_PYTHON" not in os.environ, reason="TOOLKIT_VLLM_PYTHON names no interpreter that has vLLM"
    ),
]


def write_head(target: Path, prompts: list[list[int]], directory: Path, **variants: Any) -> Path:
    """A head of two layers and a cut vocabulary, trained on the target's answers, as a draft directory."""
    loaded = read_target(target)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    batch = answered(prompts, answers_of(loaded, prompts, params))
    settings = TrainSettings(
        head=HeadSettings(kind="dspark", layers=2, markov_rank=0, **variants), unroll=UnrollSettings(ttt_steps=STEPS)
    )
    kept = TokenMap.from_ids(range(loaded.vocab_size - 40), loaded.vocab_size)
    plan = plan_head(settings, loaded, kept)
    side = TargetSide(loaded, plan.token_map, plan.aux_layer_ids, "fp32")
    model = trained_head(plan, settings, start_head(plan, settings, loaded, 0, [batch]), side.teacher)
    fit(model, side, batch, STEPS, updates=UPDATES)
    side.capture.remove()
    first, second = (layer.self_attn.k_norm.weight.data for layer in model.head.layers)
    second.copy_(first)  # vLLM 0.32.0 on a CPU reads the first layer's for the keys of all layers
    meta = {"target": describe_target(loaded), "token_map_sha256": kept.sha256}
    return save_draft(directory, model.head.state_dict(), plan.config, plan.token_map, meta)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both directions"])
def test_tokens_and_counts(target: Path, tmp_path: Path, verdicts: list[dict[str, Any]], causal: bool) -> None:
    """A block mask of the other kind, a place or an auxiliary layer off by one changes which drafts are accepted."""
    prompts = [[(17 * place * place + 5 * n) % 380 + 5 for n in range(6 + place)] for place in range(PROMPTS)]
    own = write_head(target, prompts, tmp_path / "own", causal=causal)
    assert main(["export", "--draft", str(own), "--to", "vllm", "--out", str(tmp_path / "vllm")]) == 0
    ours = our_answers(own, prompts)
    given = [one.pop("prompt_ids") for one in ours]
    version, theirs = vllms_answers(tmp_path / "vllm", str(target), given, method="dflash")
    different = [(dict(mine), dict(its)) for mine, its in zip(ours, theirs, strict=True) if mine != its]
    verdicts.append(
        {
            "judge": f"vLLM {version}, CPU build",
            "head": f"trained, DFlash's form, {'causal' if causal else 'not causal'}",
            "compared": f"float32, greedy, chain of {STEPS}, {MAX_TOKENS} tokens of each prompt",
            "prompts": [
                {"tokens_equal": mine.pop("output_ids") == its.pop("output_ids"), "ours": mine, "theirs": its}
                for mine, its in zip(ours, theirs, strict=True)
            ],
        }
    )
    assert not different, different
    assert sum(one["accepted_by_depth"][2] for one in ours) > 20, "counts near zero would compare nothing"
