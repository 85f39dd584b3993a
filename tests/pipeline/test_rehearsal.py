"""A rehearsal: stand-in targets, the counts that a rehearsal replaces, and its estimate for the whole recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from toolkit.cli import main
from toolkit.errors import TargetError
from toolkit.pipeline.rehearsal import estimate, rehearsed, write_prompts
from toolkit.pipeline.run import METRICS, PROMPTS, ROLLOUTS, ROLLOUTS_STATS, Run
from toolkit.pipeline.stages import FILE_NAME
from toolkit.targets import stand_in
from toolkit.targets.load import load_tokenizer, read_target
from toolkit.weights import write_json

RECIPE = """
name: big
target: {model: org/big, revision: abc}
prompts: {sources: ["hub:org/chats"], limit: 5000}
rollouts: {max_tokens: 24, max_running_requests: 8}
token_map: {size: 300}
train:
  epochs: 2
  data: {global_batch: 16, micro_batch: 2}
  on_policy: {every: 200, prompts: 3000}
bench: {shapes: ["adaptive", "2,1,3"]}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
    shape = {"model_type": "llama", "vocab_size": 5000, "max_position_embeddings": 512, **sizes}
    monkeypatch.setitem(stand_in.SHAPES, "tiny", shape)
    path = tmp_path / "big.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def test_a_stand_in_has_the_published_shape_and_the_same_weights_each_time(recipe: Path) -> None:
    first, second = read_target("stand-in:tiny", dtype="float32"), read_target("stand-in:tiny", dtype="float32")
    assert (first.n_layers, first.vocab_size, first.name) == (6, 5000, "stand-in:tiny")
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.fingerprint == second.fingerprint
    with pytest.raises(TargetError, match="no published shape here; give one of stand-in:smollm2-135m"):
        read_target("stand-in:gpt-9")


def test_its_tokenizer_writes_texts_back_and_every_id_has_a_text(recipe: Path) -> None:
    tokenizer = load_tokenizer("stand-in:tiny")
    text = "Grüße, 123 <|im_end|>\n"
    assert len(tokenizer) == 5000
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.decode([token]) for token in range(5000))


def test_only_counts_are_small_and_the_user_may_choose_them(recipe: Path) -> None:
    small, whole, given = rehearsed(recipe, ["target.model=stand-in:tiny", "train.max_steps=7"])
    assert whole is not None
    assert small.run_dir == "runs/big-rehearsal"
    assert small.train.max_steps == 7
    assert small.rollouts.max_tokens == whole.rollouts.max_tokens
    assert small.train.data == whole.train.data
    assert (small.train.on_policy.every, small.train.on_policy.prompts) == (2, None)
    assert not Path(small.run_dir).exists(), "--print-config writes nothing"
    write_prompts(small)
    prompts = Path(small.prompts.sources[0]).read_text(encoding="utf-8").splitlines()
    assert len(prompts) * (1 - small.rollouts.held_out) >= 7 * small.train.data.global_batch
    assert rehearsed(recipe, ["run_dir=other"])[1:] == (None, ["run_dir=other"])


@pytest.mark.parametrize("sources", [["chats.jsonl"], ["hub:org/chats"], []])
def test_a_users_sources_are_read_and_never_written(recipe: Path, sources: list[str]) -> None:
    Path("chats.jsonl").write_text("mine", encoding="utf-8")
    small, _, _ = rehearsed(recipe, ["target.model=stand-in:tiny", f"prompts.sources={json.dumps(sources)}"])
    write_prompts(small)
    assert small.prompts.sources == tuple(sources)
    assert Path("chats.jsonl").read_text(encoding="utf-8") == "mine"
    assert {one.name for one in recipe.parent.iterdir()} == {"big.yaml", "chats.jsonl", "runs"}
    assert small.prompts.limit == 80, "4 steps of 16 without 20 %"


def test_the_stages_run_and_their_times_are_those_of_the_whole_recipe(recipe: Path, capsys) -> None:
    options = ["target.model=stand-in:tiny", "rollouts.max_tokens=8"]
    assert main(["run", str(recipe), *options, "--until", "token_map"]) == 0
    small, whole, given = rehearsed(recipe, options)
    run = Run(small, recipe, given)
    rows = [json.loads(line) for line in (run.folder / ROLLOUTS).read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len((run.folder / PROMPTS).read_text(encoding="utf-8").splitlines()) == 80
    assert json.loads((run.folder / ROLLOUTS_STATS).read_text(encoding="utf-8"))["response_tokens"] > 300
    (run.folder / METRICS).parent.mkdir()
    steps = [{"seconds_per_step": one, "tokens_per_s": 100.0, "peak_memory_bytes": 2e9} for one in (60.0, 2.0, 2.0)]
    (run.folder / METRICS).write_text("".join(json.dumps(one) + "\n" for one in steps), encoding="utf-8")
    for folder, seconds in (("rollouts", 8.0), ("bench", 30.0)):
        write_json(run.folder / folder / FILE_NAME, {"seconds": seconds, "sessions": 1})
    text = estimate(run, whole)
    assert "at most 8.3 min for 5,000 conversations" in text  # 80 took 8 s
    assert "19.8 min: 594 steps of 2.00 s" in text  # 2 epochs of 5,000 without 5 % held out, by 16
    assert "2.0 GB" in text
    assert "at most 5.0 min for 40 prompts" in text  # 4 took 30 s
    write_json(run.folder / "rollouts" / FILE_NAME, {"stage": "rollouts", "seconds": 1.0, "sessions": 2})
    assert "rollouts   not known, because the stage was resumed; --force rollouts" in estimate(run, whole)
