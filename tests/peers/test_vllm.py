"""vLLM serves what we export: on the same prompts its tokens and its acceptance counts are our engine's.

Opt-in. TOOLKIT_VLLM_PYTHON names the interpreter of an environment with vLLM's CPU build, TOOLKIT_PEERS_DRAFT a
trained EAGLE-3 head (the ckpt/ of a run). Both sides in float32, greedy, chains of three, one prompt at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit import LLM, SamplingParams
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft, save_draft
from toolkit.cli import main
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.targets.facts import target_facts
from toolkit.train.warm_start import initialise_random

WORKER = Path(__file__).resolve().parents[2] / "benchmarks" / "engine_worker.py"
STEPS, PROMPTS, MAX_TOKENS, MAX_CONTEXT = 3, 8, 48, 512
SIZE = 6.0  # of a random layer over its first deviation of 0.02
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        "TOOLKIT_VLLM_PYTHON" not in os.environ, reason="TOOLKIT_VLLM_PYTHON names no interpreter that has vLLM"
    ),
    pytest.mark.skipif("TOOLKIT_PEERS_DRAFT" not in os.environ, reason="TOOLKIT_PEERS_DRAFT names no trained head"),
]


@pytest.fixture(scope="module")
def trained() -> DraftCheckpoint:
    return load_draft(os.environ["TOOLKIT_PEERS_DRAFT"])


def our_answers(directory: Path, chats: list[Any]) -> list[dict[str, Any]]:
    """Ids, and the counts that vLLM keeps: all drafts, the last one too, of which the answer's end cuts a part."""
    asked = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(draft=directory, shape=f"{STEPS},1,{STEPS + 1}", dtype="float32", prefix_cache=False) as llm:
        done = [llm.generate([chat], asked)[0] for chat in chats]
    return [
        {
            "prompt_ids": one.prompt_ids,
            "output_ids": one.token_ids,
            "drafts": len(one.events),
            "accepted_by_depth": [sum(event.accepted > depth for event in one.events) for depth in range(STEPS)],
        }
        for one in done
    ]


def vllms_answers(
    directory: Path | str, target: str, prompts: list[list[int]], *, steps: int = STEPS, **more: Any
) -> tuple[str, list[dict[str, Any]]]:
    """vLLM's version, and its answers in the same words; its process ends with its input."""
    settings = {"engine": "vllm", "directory": target, "revision": None, "draft": str(directory), "num_steps": steps}
    settings |= {"dtype": "float32", "context_length": MAX_CONTEXT, "max_running_requests": 1, "eager": True}
    settings |= {"threads": 1, **more}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [os.environ["TOOLKIT_VLLM_PYTHON"], str(WORKER), json.dumps(settings)],
        input="".join(json.dumps({"prompt_ids": [ids], "max_tokens": MAX_TOKENS}) + "\n" for ids in prompts),
        capture_output=True,
        text=True,
        env=environment,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    ready, *replies = map(json.loads, done.stdout.splitlines())
    answers = [
        {
            "output_ids": one["output_ids"][0],
            "drafts": one["verify_steps"],
            "accepted_by_depth": one["accepted_by_depth"],
        }
        for one in replies
    ]
    return ready["version"], answers


@pytest.mark.parametrize("layers", [1, 2])
def test_tokens_and_counts(trained, verdicts, tmp_path, layers):
    """A tensor that vLLM places elsewhere, a norm, a rope or an auxiliary layer that it reads otherwise changes which
    drafts are accepted, even where the tokens stay the same."""
    chats = [[{"role": "user", "content": one.turns[0]}] for one in limited(builtin_prompts(), PROMPTS)]
    own, exported = tmp_path / "own", tmp_path / "vllm"
    head = trained if layers == 1 else with_random_layers(trained, layers)
    save_draft(own, head.head.state_dict(), head.head.config, head.token_map, {"target": head.meta["target"]})
    assert main(["export", "--draft", str(own), "--to", "vllm", "--out", str(exported)]) == 0
    ours = our_answers(own, chats)
    target = target_facts(head.meta["target"]["name"]).source
    version, theirs = vllms_answers(exported, target, [one.pop("prompt_ids") for one in ours])
    pairs = list(zip(ours, theirs, strict=True))
    equal = [mine == its for mine, its in pairs]
    verdicts.append(
        {
            "judge": f"vLLM {version}, CPU build",
            "head": "trained" if layers == 1 else "trained, and a random second layer behind it",
            "compared": f"float32, greedy, chain of {STEPS}, {MAX_TOKENS} tokens of each prompt",
            "prompts": [
                {
                    "tokens_equal": mine.pop("output_ids") == its.pop("output_ids"),
                    "ours": mine,
                    "theirs": its,
                }
                for mine, its in pairs
            ],
        }
    )
    assert all(equal), "tokens or counts differ"
    assert sum(sum(one["accepted_by_depth"]) for one in ours) > 20, "counts near zero would compare nothing"


def with_random_layers(draft: DraftCheckpoint, layers: int) -> DraftCheckpoint:
    """The head with further layers behind its own; random ones, large enough to change its drafts and not all."""
    head = Eagle3Head(replace(draft.head.config, num_hidden_layers=layers)).requires_grad_(False)
    initialise_random(head, seed=0)
    for layer in head.layers.values():
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight.mul_(SIZE)
    head.load_state_dict(draft.head.state_dict(), strict=False)
    return replace(draft, head=head.eval())
