"""`rollouts.server` on our own server: what it writes is what the bundled engine writes, without weights here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infer.running_server import running
from toolkit import cli
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.server.completions import Served
from toolkit.pipeline.run import Run
from toolkit.targets.target import Target

# Other defaults than rollouts have, as a target's generation config may state them.
DEFAULTS = SamplingParams(temperature=0.3, top_p=0.5, top_k=3, min_p=0.2, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def url(tiny_target: Target) -> Iterator[str]:
    engine = Engine(tiny_target, max_running_requests=4)
    with running(Served("tiny-target0", tiny_target.tokenizer, engine, 300, "fp_x", None, DEFAULTS)) as address:
        yield address
    engine.close()


@pytest.fixture
def recipe(tiny_target_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    turns = [[f"count {number} apples", "and the rivers?"][: 1 + number % 2] for number in range(8)]
    rows = [
        {"id": f"p{at}", "messages": [{"role": "user", "content": turn} for turn in one]}
        for at, one in enumerate(turns)
    ]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = Path("r.yaml")
    path.write_text(
        f"name: tiny\ntarget: {{model: {tiny_target_directory}}}\nprompts: {{sources: [prompts.jsonl]}}\n"
        "rollouts: {max_tokens: 8, held_out: 0.1, temperature: 0.8, top_p: 0.9}\n"
    )
    return path


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Run, use: str) -> Target:
        raise AssertionError("the target's weights were loaded")

    monkeypatch.setattr(Run, "load_target", load)


def rows(path: str) -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, Path(path).read_text().splitlines())}


def test_the_same_rollouts(recipe: Path, url: str, request: pytest.FixtureRequest) -> None:
    """Sampled, of several turns: all that sampling, template or stop ids could change changes the ids."""
    common = ["rollouts", "--recipe", str(recipe), "--prompts", "prompts.jsonl", "--out"]
    assert cli.main([*common, "engine.jsonl"]) == 0
    request.getfixturevalue("no_weights")
    assert cli.main([*common, "served.jsonl", f"rollouts.server={url}"]) == 0
    ours, theirs = rows("engine.jsonl"), rows("served.jsonl")
    by = {row["id"]: row["provenance"].pop("server") for row in theirs.values()}
    assert ours == theirs and len(ours) == 8
    assert {json.dumps(one) for one in by.values()} == {
        '{"model": "tiny-target0", "engine": "toolkit", "version": "0.1.0"}'
    }


def test_stages(recipe: Path, url: str, no_weights: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Other servers do not make rollouts stale; another model there does. A draft head cannot come along."""
    command = [str(recipe), "--until", "rollouts"]
    assert cli.main(["run", *command, f"rollouts.server={url}"]) == 0
    Path("servers.txt").write_text(f"# here\n{url}/v1\n")
    assert cli.main(["run", *command, "rollouts.server=[servers.txt]", "rollouts.max_running_requests=2"]) == 0
    assert capsys.readouterr().out.count("skipped, up to date") == 2
    assert cli.main(["run", *command, f"rollouts.server={url}", "rollouts.server_model=other"]) == 2
    said = capsys.readouterr().err
    assert "serves 'tiny-target0', but rollouts.server_model is 'other'" in said
    given = ["--prompts", "prompts.jsonl", "--out", "x.jsonl", "--draft", "ckpt", f"rollouts.server={url}"]
    assert cli.main(["rollouts", "--recipe", str(recipe), *given]) == 2
    assert "--draft is for the bundled engine" in capsys.readouterr().err


def test_prompts(recipe: Path, url: str, request: pytest.FixtureRequest) -> None:
    """What the target writes itself, whether it is of use or not (this one is random)."""
    settings = ["prompts.sources=[]", "prompts.synthesize=4", "prompts.max_tokens=12"]
    common = ["synthesize", "--recipe", str(recipe), *settings]
    cli.main([*common, "--out", "engine/prompts.jsonl"])
    request.getfixturevalue("no_weights")
    cli.main([*common, f"rollouts.server={url}", "--out", "served/prompts.jsonl"])
    written = [
        {row["attempt"]: row["output_ids"] for row in map(json.loads, Path(name, "attempts.jsonl").open())}
        for name in ("engine", "served")
    ]
    assert written[0] == written[1] and len(written[0]) == 16
