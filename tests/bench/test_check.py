"""`toolkit check` as it is typed: a good head passes, and each way to spoil one is named by the check that finds it.

The head is trained for seconds on the tiny target's own answers, so that it depends on the features it reads. Draws and
prompts are fixed, so every outcome is too.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.native_targets import FAMILIES, write_native_target
from toolkit.bench import check_decoding
from toolkit.bench.check import Unreadable, open_checked
from toolkit.bench.check_decoding import sampling_check, sign_flip_p
from toolkit.bench.checked_head import _first_drafts, _scores_after
from toolkit.bench.prompts import BUILTIN, builtin_prompts, limited
from toolkit.bench.records import read_record
from toolkit.bench.sampled_distribution import exact_distribution, g_test, most_even_distribution
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft, save_draft
from toolkit.cli import main
from toolkit.data.batches import Batch, Example, collate
from toolkit.data.chat_template import prompt_ids
from toolkit.heads.dspark import DSparkConfig
from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.heads.registry import build_head
from toolkit.infer.drafters.drafting_head import DraftingHead
from toolkit.infer.engine import round as engine_round
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify import verifiers
from toolkit.targets.load import load_target
from toolkit.tokenmap.build import build_token_map, forced_ids_for
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.block_unroll import unroll_blocks
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.head_snapshot import describe_target
from toolkit.train.step import TargetSide, micro_step, supervised_counts
from toolkit.train_settings import TrainSettings, UnrollSettings
from toolkit.weights import load_tensors, read_json, save_tensors, sha256_json, write_json

PROMPTS, TOKENS, SIZE, STEPS = 12, 12, 128, 2
SIZES = ["--limit", str(PROMPTS), "--max-tokens", str(TOKENS)]
CHOSEN = limited(builtin_prompts(), PROMPTS)
# Settings of a measurement that the check can be compared with.
MADE = {
    "prompts": BUILTIN, "prompts_sha256": sha256_json([asdict(one) for one in CHOSEN]), "limit": PROMPTS,
    "max_tokens": TOKENS, "temperature": 0.0,
}  # fmt: skip
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module", autouse=True)
def _few_draws():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_decoding, "DRAWS", 300)
        yield


def written_by(target, prompts, **sampling) -> Batch:
    """The target's answers to prompts as a batch of training."""
    engine = Engine(target)
    params = [SamplingParams(max_tokens=TOKENS, seed=seed, **sampling) for seed in range(len(prompts))]
    answers = [request.output_ids for request in engine.generate(prompts, params)]
    engine.close()
    examples = [
        Example(str(at), prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    return collate(examples, pad_id=0)


@pytest.fixture(scope="module")
def good_head(tiny_target_directory, tmp_path_factory) -> Path:
    """The draft directory of a head that knows the answers to the check's prompts, and what is sampled after them."""
    target = load_target(tiny_target_directory)
    texts = [prompt.turns[0] for prompt in limited(builtin_prompts(), PROMPTS)]
    prompts = [prompt_ids(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    cut = most_even_distribution(target, prompts, stages=1).prompt
    batches = [written_by(target, prompts), written_by(target, [cut] * 32, temperature=1.0, top_k=4, ignore_eos=True)]
    counts = sum(torch.bincount(batch.input_ids[batch.response], minlength=target.vocab_size) for batch in batches)
    forced = forced_ids_for(target.tokenizer, target.stop_ids, target.vocab_size)
    token_map = build_token_map(counts, size=SIZE, forced_ids=forced)
    settings = TrainSettings(unroll=UnrollSettings(ttt_steps=STEPS))
    plan = plan_head(settings, target, token_map)
    head = start_head(plan, settings, target, 0, batches[:1])
    side = TargetSide(target, plan.token_map, plan.aux_layer_ids, "fp32")
    model = trained_head(plan, settings, head, side.teacher)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in 25 * batches:
        loss, *_ = micro_step(model, side, batch, supervised_counts(batch, STEPS, 0), STEPS, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    side.capture.remove()
    meta = {"target": describe_target(target), "token_map_sha256": token_map.sha256}
    return save_draft(tmp_path_factory.mktemp("good") / "ckpt", head.state_dict(), plan.config, token_map, meta)


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
    status = main(["check", "--draft", str(directory), *SIZES, "--out", str(record), *more])
    return status, {row["check"]: row for row in read_record(record, "check")["rows"]}


def failed(rows: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, row in rows.items() if row["status"] == "FAILED"]


def test_a_good_head_passes(good_head, tmp_path, capsys):
    """All that can be checked is, and both shapes are, alone and in a batch."""
    status, rows = check(good_head, tmp_path / "check.json")
    page = capsys.readouterr().out
    assert status == 0 and page.splitlines()[-1] == "passed: 11 checks, 1 skipped", page
    assert [name for name, row in rows.items() if row["status"] == "skipped"] == ["acceptance"]
    assert all(f"  {name}  " in page for name in rows) and max(map(len, page.splitlines()[1:])) <= 120
    assert rows["greedy"] | {"answers": 30, "unequal": 0, "near_ties": 0} == rows["greedy"]
    assert "chain 4 and tree 4x4/16" in rows["greedy"]["detail"]
    for verify in ("target", "rejection", "block"):
        assert rows[f"sampling, {verify}"]["accepted"] > 30, "a test of draws without accepted drafts shows nothing"
    assert json.loads((tmp_path / "check.json").read_text())["passed"] is True


def aux_up(config, tensors):
    config["toolkit"]["aux_layer_ids"] = [one + 1 for one in config["toolkit"]["aux_layer_ids"]]


def aux_down(config, tensors):
    config["toolkit"]["aux_layer_ids"] = [one - 1 for one in config["toolkit"]["aux_layer_ids"]]


def aux_beyond(config, tensors):
    config["toolkit"]["aux_layer_ids"] = [2, 3, 40]


def aux_descending(config, tensors):
    config["toolkit"]["aux_layer_ids"] = [4, 3, 2]


def other_template(config, tensors):
    config["toolkit"]["target"]["template_sha256"] = "0" * 64


def other_map(config, tensors):
    size, vocab_size = config["draft_vocab_size"], config["vocab_size"]
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    token_map = TokenMap.from_ids([2, *[one for one in order if one != 2][: size - 1]], vocab_size)
    tensors |= {"d2t": token_map.d2t, "t2d": token_map.t2d}


def unrecorded_map(config, tensors):
    del config["toolkit"]["token_map_sha256"]
    other_map(config, tensors)


def map_with_a_duplicate(config, tensors):
    tensors["d2t"][5] -= 1 + tensors["d2t"][5] - tensors["d2t"][4]


def map_without_stops(config, tensors):
    del config["toolkit"]["token_map_sha256"]
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    absent = next(one for one in range(config["vocab_size"]) if one not in ids)
    token_map = TokenMap.from_ids([absent, *[one for one in ids.tolist() if one != 2]], config["vocab_size"])
    tensors |= {"d2t": token_map.d2t, "t2d": token_map.t2d}


def a_nan(config, tensors):
    tensors["midlayer.mlp.up_proj.weight"][3, 5] = math.nan


def other_rope(config, tensors):
    config["rope_parameters"]["rope_theta"] = 50.0


def other_target(config, tensors):
    config["toolkit"]["target"]["fingerprint"] = "0" * 16


def other_name(config, tensors):
    config["toolkit"]["target"] = {"name": "org/other"}


def missing_tensor(config, tensors):
    del tensors["fc.weight"]


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (aux_up, "aux layers", "[3, 4, 5] are off: [2, 3, 4] suit the head better"),
        (aux_down, "aux layers", "[1, 2, 3] are off: [2, 3, 4] suit the head better"),
        (aux_beyond, "aux layers", "aux_layer_ids is [2, 3, 40]; a target of 7 layers"),
        (aux_descending, "aux layers", "aux_layer_ids is [4, 3, 2]"),
        (other_template, "template", "trained with the template sha256 000000000000"),
        (other_map, "token map", "and the head was trained with"),
        (unrecorded_map, "token map", "belongs to another target"),
        (map_with_a_duplicate, "token map", "duplicate"),
        (map_without_stops, "token map", "none of the ids that end an answer"),
        (a_nan, "weights", "midlayer.mlp.up_proj.weight"),
        (missing_tensor, "weights", "missing: fc.weight"),
        (other_rope, "rope", "rope_theta 50.0"),
        (other_target, "target", "another configuration"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_spoilt_head_is_named(spoil, tmp_path, capsys, change, name, says):
    status, rows = check(spoil(change), tmp_path / "check.json")
    last = capsys.readouterr().out.splitlines()[-1]
    assert status == 1 and failed(rows) == [name] and last == f"FAILED: {name}", rows
    assert says in rows[name]["detail"]


def test_two_causes_are_both_named(spoil, tmp_path):
    """A check that fails does not hide the others."""
    status, rows = check(spoil(lambda *files: (other_template(*files), a_nan(*files))), tmp_path / "check.json")
    assert status == 1 and failed(rows) == ["weights", "template"]
    assert rows["greedy"]["detail"] == "not tried, as its weights are not finite"


def test_a_target_of_other_sizes(good_head, tiny_target, small_target_directory, tmp_path):
    status, rows = check(good_head, tmp_path / "check.json", "--target", str(small_target_directory))
    assert status == 1 and "vocab_size" in rows["target"]["detail"] and "token map" in failed(rows)
    assert rows["greedy"]["status"] == "skipped"


@pytest.fixture
def small_target_directory(tiny_target, tmp_path):
    """A target of another width and vocabulary, with the tiny target's tokenizer."""
    config = type(tiny_target.config)(**(tiny_target.config.to_dict() | {"vocab_size": 480, "hidden_size": 32}))
    directory = tmp_path / "other-sizes"
    type(tiny_target.model)(config).save_pretrained(directory)
    tiny_target.tokenizer.save_pretrained(directory)
    return directory


def test_a_copy_of_the_target_is_the_target(good_head, tiny_target_directory, tmp_path, monkeypatch):
    """Its name is another folder's; the configuration tells. A name without a fingerprint tells nothing of a folder."""
    copy = shutil.copytree(tiny_target_directory, tmp_path / "moved")
    status, rows = check(good_head, tmp_path / "check.json", "--target", str(copy))
    assert status == 0 and "has the configuration of" in rows["target"]["detail"]
    named = shutil.copytree(good_head, tmp_path / "named")
    config = read_json(named / "config.json")
    other_name(config, {})
    write_json(named / "config.json", config)
    status, rows = check(named, tmp_path / "check.json", "--target", str(copy))
    assert (status, rows["target"]["status"], rows["template"]["status"]) == (0, "skipped", "skipped")


def test_acceptance_below_its_record(good_head, tmp_path):
    """A record of greedy built-in prompts gives the shapes too, and is compared only where it is one."""
    directory = shutil.copytree(good_head, tmp_path / "measured")
    row = {"shape": "chain", "num_steps": 3, "top_k": 1, "num_draft_tokens": 4}
    for length, temperature, status in ((3.9, 0.0, "FAILED"), (1.1, 0.0, "ok"), (3.9, 1.0, "skipped")):
        rows = [row | {"accept_length": length, "interval": [length - 0.02, length + 0.05]}]
        rows.insert(0, rows[0] | {"num_steps": 1, "num_draft_tokens": 2, "interval": [None, None]})
        made = {"settings": MADE | {"temperature": temperature}, "target": {"dtype": "float32"}, "rows": rows}
        write_json(directory / "measured.json", made)
        _, found = check(directory, tmp_path / "check.json")
        assert found["acceptance"]["status"] == status, found["acceptance"]
        assert found["acceptance"]["shape"] == ("4,1,5" if temperature else "3,1,4")


@pytest.mark.parametrize(
    ("settings", "target", "says"),
    [
        ({}, {"dtype": "bfloat16"}, "which has dtype bfloat16, here float32"),
        ({}, {"dtype": "float32", "quantization": "int8"}, "which has quantization int8, here None"),
        ({"max_tokens": 96}, {"dtype": "float32"}, "which has max_tokens 96, here 12"),
        (
            {"prompts_sha256": "0", "limit": None},
            {"dtype": "float32"},
            "which has all built-in prompts, here 12 ",
        ),
    ],
)
def test_acceptance_is_compared_with_a_like_record_only(good_head, tmp_path, capsys, settings, target, says):
    """Longer answers, other prompts or rounding have another accept_length: no fault of the head. It is not passed."""
    directory = shutil.copytree(good_head, tmp_path / "measured")
    row = {"shape": "chain", "num_steps": 3, "top_k": 1, "num_draft_tokens": 4}
    rows = [row | {"accept_length": 3.9, "interval": [3.8, 4.0]}]
    write_json(directory / "measured.json", {"settings": MADE | settings, "target": target, "rows": rows})
    status, found = check(directory, tmp_path / "check.json")
    assert status == 0 and found["acceptance"]["status"] == "skipped"
    assert f"not compared with measured.json, {says}" in found["acceptance"]["detail"]
    assert capsys.readouterr().out.splitlines()[-1] == "passed: 11 checks, 1 skipped"


# -- an engine that is wrong -------------------------------------------------------------------------------------------


def test_a_lossy_engine_is_found(good_head, tmp_path, monkeypatch):
    """Accepted tokens that are off by one are not plain decoding's, and the first is given with both logits."""
    honest = engine_round.follow
    wrong = lambda tree, chosen: honest(tree, chosen if chosen.shape[1] == 1 else (chosen + 1) % 400)  # noqa: E731
    monkeypatch.setattr(engine_round, "follow", wrong)
    status, rows = check(good_head, tmp_path / "check.json")
    assert status == 1 and {"greedy", "sampling, target", "sampling, rejection", "sampling, block"} <= set(failed(rows))
    assert "token 1 is" in rows["greedy"]["detail"] and "(logit" in rows["greedy"]["detail"]


def test_a_rule_of_another_distribution_is_found(good_head, monkeypatch):
    """A rejected draft that is replaced from p itself, as in the tests of the verifiers."""

    def residual_is_p(chains):
        kept, _ = verifiers.rejection(chains)
        return kept, chains.p[torch.arange(len(kept)), kept]

    head = open_checked(EngineConfig(draft=good_head, dtype="float32"), PROMPTS, TOKENS)
    assert not isinstance(head, Unreadable)
    monkeypatch.setattr(check_decoding, "DRAWS", 1000)
    assert sampling_check(head, "rejection").status == "ok"
    wrong = replace(verifiers.REJECTION, choose=verifiers.by(residual_is_p))
    monkeypatch.setitem(verifiers.VERIFIERS, "rejection", wrong)
    found = sampling_check(head, "rejection")
    assert found.status == "FAILED" and found.numbers["p"] < 1e-6, found


# -- statistics --------------------------------------------------------------------------------------------------------


def test_sign_flips_by_hand():
    """Of eight choices of signs of 1, 2, 3 one has a sum of 6, and two of 4 and more."""
    assert sign_flip_p(np.array([1.0, 2.0, 3.0])) == 1 / 8
    assert sign_flip_p(np.array([-1.0, 2.0, 3.0])) == 2 / 8
    assert sign_flip_p(np.array([-1.0, -2.0, -3.0])) == 1
    assert sign_flip_p(np.zeros(4)) == 1
    many = np.random.default_rng(1).normal(size=40)
    assert sign_flip_p(many + 2) < 1e-4 and abs(sign_flip_p(many) - 0.5) < 0.5


def test_g_by_hand():
    """2 * (60 ln 1.2 + 40 ln 0.8) of one degree of freedom; rare cells are one cell."""
    g, freedom, p = g_test(torch.tensor([60.0, 40.0]), torch.tensor([50.0, 50.0]))
    assert g == pytest.approx(4.0271, abs=1e-4) and freedom == 1 and p == pytest.approx(0.04478, abs=1e-5)
    g, freedom, _ = g_test(torch.tensor([50.0, 40.0, 7.0, 3.0]), torch.tensor([50.0, 40.0, 6.0, 4.0]))
    assert (g, freedom) == (pytest.approx(0.0, abs=1e-9), 2)


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


@pytest.mark.parametrize(("config_class", "head_class"), [(Eagle2Config, Eagle2Head), (MtpConfig, MtpHead)])
def test_heads_that_share_the_output_matrix(tiny_target, tiny_target_directory, tmp_path, config_class, head_class):
    """They have no map and no auxiliary layers, which is said; the rest is checked."""
    torch.manual_seed(5)
    head = head_class(config_class.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size))
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    directory = save_draft(tmp_path / "ckpt", head.state_dict(), head.config, None, meta)
    status, rows = check(directory, tmp_path / "check.json")
    skipped = [name for name, row in rows.items() if row["status"] == "skipped"]
    assert status == 0 and skipped == ["template", "token map", "aux layers", "acceptance"], rows


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_first_drafts_of_a_block_drafter(tiny_target, kind):
    """The check computes them by dense attention, training all places of all blocks at once: the same states."""
    torch.manual_seed(5)
    own = (
        {"sample_from_anchor": False, "confidence": False, "markov_rank": 0} if kind == "dflash" else {"markov_rank": 8}
    )
    config = DSparkConfig.from_target_config(
        tiny_target.config, vocab_size=tiny_target.vocab_size, target_hidden_size=tiny_target.hidden_size,
        draft_vocab_size=90, aux_layer_ids=(1, 2, 3), num_hidden_layers=2, **own,
    )  # fmt: skip
    head, text = build_head(config).requires_grad_(False), torch.arange(3, 15)
    head.read_target(tiny_target.embed_tokens)
    features, embeds = torch.randn(len(text), config.feature_size), tiny_target.embed_tokens(text).detach()
    found = _first_drafts(head, embeds[1:], head.first_hidden(features[:-1]))
    wanted = next(unroll_blocks(head, features[None], embeds[None], 3))[0, :-1]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    drafting = DraftingHead(DraftCheckpoint(head, TokenMap.from_ids(range(90), tiny_target.vocab_size)), tiny_target)
    scores = _scores_after(drafting, found, text[1:])
    drafting.remove()
    torch.testing.assert_close(scores, head.logits(head.after(found, text[1:])), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("state", ["skipped", "ok", "FAILED"])
def test_the_map_of_a_head_that_shares_the_output_matrix(
    good_head, tiny_target, tiny_target_directory, tmp_path, state
):
    """Any map's ids have rows in the target's matrix. Without a hash nothing passes the right one."""
    torch.manual_seed(5)
    token_map = load_draft(good_head).token_map
    if state == "FAILED":
        tensors = {}
        other_map({"draft_vocab_size": 80, "vocab_size": tiny_target.vocab_size}, tensors)
        token_map = TokenMap.from_ids(tensors["t2d"].nonzero()[:, 0].tolist(), tiny_target.vocab_size)
    meta = {"target": {"name": str(tiny_target_directory), "revision": None}}
    meta |= {"token_map_sha256": token_map.sha256} if state == "ok" else {}
    config = MtpConfig.from_target_config(tiny_target.config, vocab_size=tiny_target.vocab_size)
    directory = save_draft(tmp_path / "ckpt", MtpHead(config).state_dict(), config, token_map, meta)
    status, rows = check(directory, tmp_path / "check.json")
    assert (rows["token map"]["status"], status) == (state, int(state == "FAILED")), rows["token map"]
    says = {"skipped": "nothing tells whose map it is", "ok": "sha256 as recorded", "FAILED": "covers 50% at least"}
    assert says[state] in rows["token map"]["detail"]


@pytest.mark.parametrize("family", [name for name in ("mimo", "qwen3.5") if name in FAMILIES])
def test_the_target_s_own_module(tiny_target, tmp_path, family):
    """Latent and linear attention; of a hybrid target no trees are verified."""
    write_native_target(tmp_path / family, family, tiny_target.tokenizer, agreeing=True)
    status, rows = check(Path("native"), tmp_path / "check.json", "--target", str(tmp_path / family))
    assert status == 0 and rows["target"]["detail"].startswith("the module is part of"), rows
    assert ("take no tree" in rows["greedy"]["detail"]) == (family != "mimo")


# -- what is no head ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--draft is not given; a head is needed"),
        (["--draft", "ngram", "--target", "smollm2-135m"], "--draft is ngram; a head is needed"),
        (["--draft", "/absent"], "is no draft directory"),
        (["--draft", "ngram", "--limit", "0"], "a head is needed"),
    ],
)
def test_what_is_no_head_is_an_error(capsys, words, says):
    """Status 2 is a mistyped command, status 1 a head that failed."""
    assert main(["check", *words]) == 2
    assert says in capsys.readouterr().err


def test_sizes_below_one(good_head, capsys):
    assert main(["check", "--draft", str(good_head), "--limit", "0"]) == 2
    assert "--limit is 0; at least 1 is needed" in capsys.readouterr().err
    assert main(["check", "--draft", str(good_head), "--max-tokens", "500"]) == 2
    assert "give fewer --max-tokens" in capsys.readouterr().err


def test_few_prompts_cannot_tell(good_head, tmp_path):
    """Of four coins all show heads once in 16 times, which is no proof of anything."""
    record = tmp_path / "check.json"
    assert main(["check", "--draft", str(good_head), "--limit", "4", "--max-tokens", "8", "--out", str(record)]) == 0
    row = next(row for row in read_record(record, "check")["rows"] if row["check"] == "aux layers")
    assert row["status"] == "skipped" and "4 prompts cannot tell" in row["detail"]
