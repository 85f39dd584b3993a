"""`toolkit check` as it is typed: a good head passes, and each way to spoil one is named by the check that finds it.

The head is trained for seconds on the tiny target's own answers, so that it depends on the features it reads. Draws and
prompts are fixed, so every outcome is too.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.native_targets import FAMILIES, write_native_target
from tests.train.conftest import answered
from toolkit.bench import check as bench_check
from toolkit.bench.check import exact_distribution, most_even_distribution, open_checked
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.records import read_record
from toolkit.checkpoint.draft_dir import save_draft
from toolkit.cli import main
from toolkit.data.batches import Batch
from toolkit.data.chat_template import prompt_ids
from toolkit.infer.engine import round as engine_round
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify import verifiers
from toolkit.targets.load import read_target
from toolkit.targets.target import describe_target
from toolkit.tokenmap.build import build_token_map, forced_ids_for
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.step import micro_step, supervised_counts
from toolkit.train.target_side import TargetSide
from toolkit.train_settings import HeadSettings, TrainSettings, UnrollSettings
from toolkit.weights import load_tensors, read_json, save_tensors, write_json

PROMPTS, TOKENS, SIZE, STEPS = 8, 8, 128, 2
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module", autouse=True)
def _small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_check, "DRAWS", 300)
        patch.setattr(bench_check, "PROMPTS", PROMPTS)
        patch.setattr(bench_check, "MAX_TOKENS", TOKENS)
        yield


def written_by(target, prompts, **sampling) -> Batch:
    """The target's answers to prompts as a batch of training."""
    engine = Engine(target)
    params = [SamplingParams(max_tokens=TOKENS, seed=seed, **sampling) for seed in range(len(prompts))]
    answers = [request.output_ids for request in engine.generate(prompts, params)]
    engine.close()
    return answered(prompts, answers)


def train_good(tiny_target_directory: Path, directory: Path, head_settings: HeadSettings) -> Path:
    """A head that knows the answers to the check's prompts, and what is sampled after them, as a draft directory."""
    target = read_target(tiny_target_directory)
    texts = [prompt.turns[0] for prompt in limited(builtin_prompts(), PROMPTS)]
    prompts = [prompt_ids(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    cut = most_even_distribution(target, prompts, stages=1).prompt
    batches = [written_by(target, prompts), written_by(target, [cut] * 32, temperature=1.0, top_k=4, ignore_eos=True)]
    counts = sum(torch.bincount(batch.input_ids[batch.response], minlength=target.vocab_size) for batch in batches)
    forced = forced_ids_for(target.tokenizer, target.stop_ids, target.vocab_size)
    token_map = build_token_map(counts, size=SIZE, forced_ids=forced)
    settings = TrainSettings(head=head_settings, unroll=UnrollSettings(ttt_steps=STEPS))
    plan = plan_head(settings, target, token_map)
    head = start_head(plan, settings, target, 0, batches[:1])
    side = TargetSide(target, plan.token_map, plan.aux_layer_ids, "fp32")
    side.features = cache(side.features)
    model = trained_head(plan, settings, head, side.teacher)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in 25 * batches:
        loss, *_ = micro_step(model, side, batch, supervised_counts(batch, STEPS), STEPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    side.capture.remove()
    meta = {"target": describe_target(target), "token_map_sha256": token_map.sha256}
    save_draft(directory, head.state_dict(), plan.config, token_map, meta)
    write_json(directory / "measured.json", {"check": open_checked(EngineConfig(draft=directory)).reference})
    return directory


@pytest.fixture(scope="module")
def good_head(tiny_target_directory, tmp_path_factory) -> Path:
    return train_good(tiny_target_directory, tmp_path_factory.mktemp("good") / "ckpt", HeadSettings())


@pytest.fixture
def spoil(good_head, tmp_path) -> Callable[[Change], Path]:
    """A copy of the good head with a changed config.json or changed tensors."""

    def make(change: Change) -> Path:
        directory = shutil.copytree(good_head, tmp_path / "spoilt")
        config, tensors = read_json(directory / "config.json"), load_tensors(directory / "model.safetensors")
        change(config, tensors)
        write_json(directory / "config.json", config)
        save_tensors(directory / "model.safetensors", tensors)
        return directory

    return make


def check(directory: Path, record: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the record's rows by check."""
    status = main(["check", "--draft", str(directory), "--quick", "--out", str(record), *more])
    return status, {row["check"]: row for row in read_record(record, "check")["rows"]}


def failed(rows: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, row in rows.items() if row["status"] == "FAILED"]


def test_a_good_head_passes(good_head, tmp_path, capsys):
    """All is checked, and both shapes are, alone and in a batch."""
    record = tmp_path / "check.json"
    assert main(["check", "--draft", str(good_head), "--out", str(record)]) == 0
    rows, page = {row["check"]: row for row in read_record(record, "check")["rows"]}, capsys.readouterr().out
    assert page.splitlines()[-1] == "passed: 10 checks", page
    assert all(f"  {name}  " in page for name in rows) and max(map(len, page.splitlines())) <= 120
    assert rows["greedy"] | {"answers": 13, "unequal": 0, "near_ties": 0} == rows["greedy"]
    assert "chain 4 and tree 4x4/16" in rows["greedy"]["detail"]
    assert rows["acceptance"]["compared"] == rows["acceptance"]["measured"] > 1.3, "it does not depend on its features"
    for verify in ("target", "rejection", "block"):
        assert rows[f"sampling, {verify}"]["accepted"] > 30, "a test of draws without accepted drafts shows nothing"
    assert json.loads(record.read_text())["passed"] is True


# Each changes a head that was measured. The weights and the map have hashes, so that the cause is known.


def aux_up(config, tensors):
    config["toolkit"]["aux_layer_ids"] = [one + 1 for one in config["toolkit"]["aux_layer_ids"]]


def other_template(config, tensors):
    config["toolkit"]["target"]["template_sha256"] = "0" * 64


def unrecorded_map(config, tensors):
    del config["toolkit"]["token_map_sha256"]
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    token_map = TokenMap.from_ids(
        sorted({2, *((ids + 1) % config["vocab_size"]).tolist()})[: len(ids)], config["vocab_size"]
    )
    tensors |= {"d2t": token_map.d2t, "t2d": token_map.t2d}


def map_with_a_duplicate(config, tensors):
    tensors["d2t"][5] -= 1 + tensors["d2t"][5] - tensors["d2t"][4]


def a_nan(config, tensors):
    tensors["midlayer.mlp.up_proj.weight"][3, 5] = math.nan


def other_rope(config, tensors):
    config["rope_parameters"]["rope_theta"] = 50.0


def missing_tensor(config, tensors):
    del tensors["fc.weight"]


def norms_swapped(config, tensors):
    one, other = "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"
    tensors[one], tensors[other] = tensors[other] * 3, tensors[one] / 3


def fc_blocks_swapped(config, tensors):
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(3, dim=1)[::-1], dim=1)


def larger_logits(config, tensors):
    tensors["lm_head.weight"] *= 1.5


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (aux_up, "acceptance", "aux_layer_ids is [3, 4, 5], was [2, 3, 4]"),
        (other_template, "template", "trained with the template sha256 000000000000"),
        (unrecorded_map, "token map", "and the head was made with"),
        (map_with_a_duplicate, "token map", "duplicate"),
        (a_nan, "weights", "midlayer.mlp.up_proj.weight"),
        (missing_tensor, "weights", "missing: fc.weight"),
        (other_rope, "rope", "rope_theta 50.0"),
        (norms_swapped, "acceptance", "changed since: values of midlayer.input_layernorm.weight, midlayer.hidden"),
        (fc_blocks_swapped, "acceptance", "changed since: values of fc.weight"),
        (larger_logits, None, "changed since: values of lm_head.weight, without harm"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_altered_head_has_one_cause(spoil, tmp_path, capsys, change, name, says):
    status, rows = check(spoil(change), tmp_path / "check.json")
    last = capsys.readouterr().out.splitlines()[-1]
    assert failed(rows) == ([name] if name else []) and status == bool(name), rows
    assert says in rows[name or "acceptance"]["detail"] and last.startswith("FAILED" if name else "passed")


def test_a_head_that_no_run_has_measured(spoil, tmp_path):
    """Layers that are counted otherwise show."""
    directory = spoil(aux_up)
    (directory / "measured.json").unlink()
    status, rows = check(directory, tmp_path / "check.json")
    says = "with the layers [2, 3, 4] in place of its aux_layer_ids [3, 4, 5]: they are counted otherwise"
    assert says in rows["acceptance"]["detail"] and status == (rows["acceptance"]["status"] == "FAILED")


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        (lambda text, steps, accepted: (text, steps, 0), "skipped", "too little"),
        (lambda text, steps, accepted: ("0", steps, accepted), "FAILED", "the target writes 8 of 8"),
    ],
    ids=["near zero", "target"],
)
def test_a_measurement_that_differs_otherwise(good_head, tmp_path, change, status, says):
    """A head that accepted next to nothing; another target under the same name."""
    directory = shutil.copytree(good_head, tmp_path / "measured")
    measured = read_json(directory / "measured.json")
    answers = measured["check"]["answers"]
    measured["check"]["answers"] = {key: change(*one) for key, one in answers.items()}
    write_json(directory / "measured.json", measured)
    row = check(directory, tmp_path / "check.json")[1]["acceptance"]
    assert row["status"] == status and says in row["detail"]


# -- an engine that is wrong -------------------------------------------------------------------------------------------


def test_a_lossy_engine_is_found(good_head, tmp_path, monkeypatch):
    """Accepted tokens that are off by one are not plain decoding's, and the first is given with both logits."""
    honest = engine_round.follow
    wrong = lambda tree, chosen: honest(tree, chosen if chosen.shape[1] == 1 else (chosen + 1) % 400)  # noqa: E731
    monkeypatch.setattr(engine_round, "follow", wrong)
    status, rows = check(good_head, tmp_path / "check.json")
    assert status == 1 and "greedy" in failed(rows)
    assert "token 1 is" in rows["greedy"]["detail"] and "(logit" in rows["greedy"]["detail"]


def test_a_rule_of_another_distribution_is_found(good_head, monkeypatch):
    """A rejected draft that is replaced from p itself, as in the tests of the verifiers."""

    def residual_is_p(chains):
        kept, _ = verifiers.rejection(chains)
        return kept, chains.p[torch.arange(len(kept)), kept]

    head = open_checked(EngineConfig(draft=good_head, dtype="float32"))
    monkeypatch.setattr(bench_check, "DRAWS", 1000)
    wrong = replace(verifiers.REJECTION, choose=verifiers.by(residual_is_p))
    monkeypatch.setitem(verifiers.VERIFIERS, "rejection", wrong)
    found = bench_check.sampling_check(head, "rejection")
    assert found.status == "FAILED" and found.numbers["p"] < 1e-6, found


# -- statistics --------------------------------------------------------------------------------------------------------


def test_the_exact_distribution_is_that_of_the_target(tiny_target):
    """Against a product of conditional distributions, one forward each."""
    exact = exact_distribution(tiny_target, [5, 6, 7])
    assert len(exact.probabilities) == 64 and sum(exact.probabilities.values()) == pytest.approx(1)
    path, chance = max(exact.probabilities.items(), key=lambda item: item[1])
    wanted = 1.0
    for at in range(3):
        logits = tiny_target.model(input_ids=torch.tensor([[5, 6, 7, *path[:at]]])).logits[0, -1].double()
        kept = logits.topk(4)
        wanted *= float(kept.values.softmax(0)[kept.indices.tolist().index(path[at])])
    assert chance == pytest.approx(wanted, rel=1e-4)


# -- other kinds of head -----------------------------------------------------------------------------------------------


@pytest.mark.skipif("qwen3.5" not in FAMILIES, reason="needs transformers 5.23 or later")
def test_the_target_s_own_module(tiny_target, tmp_path):
    """Linear attention: no trees are verified."""
    write_native_target(tmp_path / "target", "qwen3.5", tiny_target.tokenizer, agreeing=True)
    status, rows = check(Path("native"), tmp_path / "check.json", "--target", str(tmp_path / "target"))
    assert status == 0 and rows["target"]["detail"].startswith("the module is part of"), rows
    assert "take no tree" in rows["greedy"]["detail"]


@pytest.mark.slow
def test_a_causal_block_head_in_every_command(tiny_target_directory, tmp_path, monkeypatch, capsys):
    """JetSpec's: `check` passes it, `search` measures what it forecast, and `export` says who writes its GGUF file."""
    jetspec = HeadSettings(kind="dspark", causal=True, markov_rank=0)
    directory = train_good(tiny_target_directory, tmp_path / "ckpt", jetspec)
    status, rows = check(directory, tmp_path / "check.json")
    assert status == 0 and rows["acceptance"]["measured"] > 1.3, rows
    for few in ("step_times.TURNS", "step_times.AGAIN_TURNS", "search.PASSES"):
        monkeypatch.setattr(f"toolkit.bench.{few}", 1)
    record = tmp_path / "s.json"
    small = ["--limit", "3", "--max-tokens", "12", "--top-k", "1", "2", "--num-draft-tokens", "4", "--out", str(record)]
    assert main(["forecast", "--draft", str(directory), *small]) == 0
    wanted = {
        f"{row['num_steps']},{row['top_k']},{row['num_draft_tokens']}": row["accept_length"]
        for row in read_record(record, "forecast")["rows"]
    }
    assert main(["search", "--draft", str(directory), *small]) == 0
    found = {row["setting"]: row for row in read_record(record, "search")["rows"] if row["measured_tokens_per_s"]}
    assert found["perfect drafts"]["accept_length"] == STEPS + 1 and len(wanted.keys() & found.keys()) == 3
    for name in wanted.keys() & found.keys():
        assert found[name]["accept_length"] == pytest.approx(wanted[name]), name
    assert main(["export", "--draft", str(directory), "--to", "gguf", "--out", str(tmp_path / "o")]) == 2
    assert "llama.cpp's own converter" in capsys.readouterr().err


# -- what is no head ---------------------------------------------------------------------------------------------------


def test_what_is_no_head_is_an_error(capsys):
    """Status 2 is a mistyped command, status 1 a head that failed."""
    assert main(["check", "--draft", "/absent"]) == 2
    assert "is no draft directory" in capsys.readouterr().err
