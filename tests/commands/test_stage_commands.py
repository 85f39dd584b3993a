"""The commands of single stages, called as the command line calls them, on the tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from toolkit import cli
from toolkit.checkpoint.draft_dir import DraftCheckpoint, save_draft
from toolkit.pipeline import run as training
from toolkit.pipeline.run import Run
from toolkit.targets.target import Target


@pytest.fixture
def recipe(tiny_target_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe and its prompts in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(
            json.dumps(
                {"conversations": [{"from": "human", "value": f"count {n} apples"}, {"from": "gpt", "value": "x"}]}
            )
            + "\n"
            for n in range(6)
        )
    )
    path = tmp_path / "r.yaml"
    path.write_text(
        f"name: tiny\ntarget: {{model: {tiny_target_directory}}}\nprompts: {{sources: [prompts.jsonl]}}\n"
        "rollouts: {max_tokens: 8, held_out: 0.1}\ntoken_map: {size: 128}\n"
    )
    return path


@pytest.fixture
def draft_dir(tiny_draft: DraftCheckpoint, tiny_target: Target, tiny_target_directory: Path, tmp_path: Path) -> Path:
    meta = {"target": {"name": str(tiny_target_directory), "revision": None, "fingerprint": None}}
    state = tiny_draft.head.state_dict()
    return save_draft(tmp_path / "ckpt", state, tiny_draft.head.config, tiny_draft.token_map, meta)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_stages_one_by_one_make_what_run_makes(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every stage is a command of its own over the same run folder, and says so when its input is missing."""
    run = Path("runs/tiny")
    assert cli.main(["rollouts", "--recipe", str(recipe)]) == 2
    assert "prompts/prompts.jsonl" in capsys.readouterr().err
    assert cli.main(["synthesize", "--recipe", str(recipe)]) == 0
    assert [len(row["messages"]) for row in rows(run / "prompts" / "prompts.jsonl")] == [1] * 6
    assert cli.main(["rollouts", "--recipe", str(recipe), "rollouts.max_running_requests=2"]) == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Run, "load_target", lambda *_: pytest.fail("a map needs a tokenizer and sizes, no weights"))
        assert cli.main(["build-token-map", "--recipe", str(recipe)]) == 0
    assert "128" in capsys.readouterr().out
    assert cli.main(["run", str(recipe), "--until", "token_map"]) == 0
    assert capsys.readouterr().out.count("skipped, up to date") == 3
    assert cli.main(["prepare-data", "--recipe", str(recipe)]) == 0
    assert capsys.readouterr().out.count("skipped, up to date") == 3


def test_rollouts_of_other_prompts_with_a_draft(recipe: Path, draft_dir: Path, monkeypatch) -> None:
    """A draft head makes rollouts quicker; the ids must be the plain ones, and the provenance must name the head. Of
    these no features are kept, whatever the recipe says, so that their target need not be the training's."""
    load, uses = Run.load_target, []
    monkeypatch.setattr(Run, "load_target", lambda self, use: uses.append(use) or load(self, use))
    plain, drafted = Path("plain.jsonl"), Path("drafted.jsonl")
    common = ["rollouts", "--recipe", str(recipe), "--prompts", "prompts.jsonl", "--out"]
    assert cli.main([*common, str(plain), "train.data.features=offline", "rollouts.keep_features=true"]) == 0
    assert cli.main([*common, str(drafted), "--draft", str(draft_dir)]) == 0
    ids = [{row["id"]: row["input_ids"] for row in rows(path)} for path in (plain, drafted)]
    assert ids[0] == ids[1]
    assert {row["provenance"]["draft"] for row in rows(drafted)} == {str(draft_dir)}
    assert uses == ["rollouts", "rollouts"]


def test_token_map_of_any_corpora(
    recipe: Path, tiny_target: Target, tiny_target_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FR-Spec's use: a map from corpora, without rollouts; special and end-of-turn ids are always in it. Other sizes
    need no text again."""
    Path("corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    Path("chat.jsonl").write_text(
        json.dumps({"category": "trips", "messages": [{"role": "assistant", "content": "rivers and trains"}]}) + "\n"
    )
    Path("unseen.txt").write_text("seven wizards\n")
    command = ["build-token-map", "--recipe", str(recipe)]
    corpora = ["--corpus", "corpus.txt", "chat.jsonl:3", "--held-out", "unseen.txt", "--num-proc", "1"]
    named = ["--tokenizer", str(tiny_target_directory)]
    assert cli.main([*command, *corpora, *named, "--coverage", "0.9", "--out", "map"]) == 0
    report = json.loads(Path("map/coverage.json").read_text())
    assert report["coverage"] >= 0.9 > report["held_out_coverage"]
    assert [(one["spec"], one["weight"], one["held_out"]) for one in report["corpora"]] == [
        ("corpus.txt", 1, False), ("chat.jsonl", 3, False), ("unseen.txt", 1, True),
    ]  # fmt: skip
    kept = torch.load(f"map/freq_{report['size']}.pt", weights_only=True)
    assert kept == sorted(set(kept)) and tiny_target.stop_ids <= set(kept)
    shown = capsys.readouterr().out
    for words in ("held out", "<- the map", "chat.jsonl ", "  trips ", "unseen.txt (held out)", "coverage.svg"):
        assert words in shown
    assert "<svg" in Path("map/coverage.svg").read_text() and "chat.jsonl" in Path("map/coverage.svg").read_text()
    Path("corpus.txt").unlink()
    assert cli.main([*command, "--counts", "map", "--size", "20", "--out", "small"]) == 0
    assert len(torch.load("small/freq_20.pt", weights_only=True)) == 20
    assert cli.main([*command, "--counts", "map", "--out", "default"]) == 0
    assert Path("default/freq_128.pt").is_file(), "the recipe's size"


def test_two_token_maps_and_a_broken_one(
    recipe: Path, tiny_target_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists of others have duplicates and lack the end of a turn; what two maps differ in decides which one to take."""
    Path("corpus.txt").write_text("the quick brown fox\n" * 50)
    command, named = ["build-token-map", "--recipe", str(recipe)], ["--tokenizer", str(tiny_target_directory)]
    assert (
        cli.main([*command, "--corpus", "corpus.txt", *named, "--size", "20", "--out", "map", "--num-proc", "1"]) == 0
    )
    kept = torch.load("map/freq_20.pt", weights_only=True)
    torch.save([*kept[3:], kept[5]], "broken.pt")  # the special ids are the first three
    capsys.readouterr()
    assert cli.main(["inspect", "broken.pt", "--target", str(tiny_target_directory)]) == 1
    shown = capsys.readouterr().out
    assert "1 duplicates" in shown and "3 special ids are missing" in shown and "--repair" in shown
    assert cli.main(["inspect", "map/freq_20.pt", "--target", str(tiny_target_directory)]) == 0
    assert cli.main([*command, "--repair", "broken.pt", *named, "--counts", "map", "--out", "repaired"]) == 0
    assert torch.load("repaired/freq_18.pt", weights_only=True)[:3] == kept[:3]
    assert "3 special ids are missing" in capsys.readouterr().out
    assert cli.main([*command, "--repair", "broken.pt", *named, "--out", "alone"]) == 0
    assert not Path("alone/coverage.json").exists() and Path("alone/d2t.npy").is_file()
    capsys.readouterr()
    assert cli.main([*command, "--diff", "map", "broken.pt", "--counts", "map"]) == 0
    shown = capsys.readouterr().out
    assert "in both 17; only in A 3; only in B 0" in shown and "'<|im_end|>'" in shown
    tokens = json.loads(Path("map/coverage.json").read_text())["tokens"]
    assert f"covered of {tokens:,} counted tokens: A 100.00 %, B 100.00 %" in shown
    assert cli.main([*command, "--diff", "map", "map/token_map.safetensors"]) == 0
    assert "the maps are equal" in capsys.readouterr().out


def test_train_passes_the_exit_status_on(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script must see that training failed, and with what; the next `toolkit train` goes on with the stage."""
    assert cli.main(["run", str(recipe), "--until", "token_map"]) == 0
    lines: list[list[str]] = []
    monkeypatch.setattr(training, "run_training", lambda line: lines.append(list(line)) or 143)
    overrides = ["train.data.global_batch=4", "train.data.micro_batch=2"]
    assert cli.main(["train", "--recipe", str(recipe), "--num-processes", "2", *overrides]) == 143
    assert lines[0][-4:] == ["--recipe", str(recipe), *overrides] and "2" in lines[0]
    assert "status 143" in capsys.readouterr().err
    assert json.loads(Path("runs/tiny/train/manifest.json").read_text())["status"] == "running"


def test_train_does_not_take_outdated_rollouts(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a target or settings that changed since; files that no stage of ours wrote are taken as they are."""
    assert cli.main(["run", str(recipe), "--until", "token_map"]) == 0
    monkeypatch.setattr(training, "run_training", lambda line: 143)
    for manifest, redone in ((True, 1), (False, 0)):
        if not manifest:
            Path("runs/tiny/rollouts/manifest.json").unlink()
        capsys.readouterr()
        assert cli.main(["train", "--recipe", str(recipe), f"rollouts.max_tokens={7 - redone}"]) == 143
        assert capsys.readouterr().out.count("rollouts   redone, because") == redone
