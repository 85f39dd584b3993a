"""The whole pipeline on a tiny target: every stage, killed and resumed, skipped when nothing changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.errors import TargetError
from toolkit.infer.request.params import DraftShapeError
from toolkit.jsonl import DataError
from toolkit.pipeline.run import Run, local_files
from toolkit.recipe import RecipeError, load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = """
name: tiny
target: {{model: {target}}}
prompts: {{sources: [prompts.jsonl]}}
rollouts: {{max_tokens: 24, max_running_requests: 4, held_out: 0.25}}
token_map: {{size: 128}}
train: {{max_steps: 24, epochs: 99, save_every: 5, precision: fp32, unroll: {{ttt_steps: 2}},
        data: {{global_batch: 4, micro_batch: 4, max_length: 128}}, evaluation: {{eval_every: 12}}}}
bench: {{limit: 2, max_tokens: 10, shapes: ["adaptive", "2,1,3", "2,2,4"], warmup: 0, further_temperatures: [0.8]}}
"""


@pytest.fixture(scope="module")
def home(tiny_target_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recipe, its prompts and a target that has, as many have, more rows than its tokenizer
    has ids."""
    home = tmp_path_factory.mktemp("home")
    target = shutil.copytree(tiny_target_directory, home / "target")
    model = AutoModelForCausalLM.from_pretrained(target)
    ids = model.config.vocab_size
    model.resize_token_embeddings(ids + 8, mean_resizing=False)
    for rows in (model.get_input_embeddings(), model.get_output_embeddings()):
        torch.nn.init.zeros_(rows.weight[ids:])
    model.save_pretrained(target)
    (home / "tiny.yaml").write_text(RECIPE.format(target=target))
    texts = [f"count {number} apples and write about rivers" for number in range(32)]
    rows = [{"id": f"p{at}", "messages": [{"role": "user", "content": text}]} for at, text in enumerate(texts)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def start(home: Path, *arguments: str, command: Sequence[str] = ("run", "tiny.yaml")) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "toolkit", *command, *arguments],
        cwd=home,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
    return out


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, str]:
    """The folder of a run without interruptions, and what it printed."""
    out = finish(start(home))
    return home / "runs" / "tiny", out


def rows_of(path: Path) -> list[dict]:
    """Rows of a .jsonl file; wall times differ from run to run."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds_per_step"} for row in rows]


@pytest.mark.process
def test_run_leaves_a_report_and_says_what_to_type_next(finished: tuple[Path, str]) -> None:
    """The promise of README's first command."""
    folder, out = finished
    record = json.loads((folder / "report.json").read_text())
    assert record["what"] == "acceptance" and {"date", "commit", "hardware", "versions", "rows"} <= record.keys()
    whole = [row for row in record["rows"] if row["task"] == "all"]
    assert [row["num_draft_tokens"] for row in whole] == [4, 4, 3, 4] and all(row["tokens_equal"] for row in whole)
    assert (folder / "report.html").stat().st_size > 1000
    vocab_size = json.loads((folder / "ckpt" / "config.json").read_text())["vocab_size"]
    assert vocab_size == 8 + len(AutoTokenizer.from_pretrained(folder.parents[1] / "target"))
    assert {"freq_128.pt", "token_map.safetensors", "coverage.json"} <= set(os.listdir(folder / "token_map"))
    measured = json.loads((folder / "ckpt" / "measured.json").read_text())
    assert measured["best_shape"] in ("2,1,3", "2,2,4") and measured["adaptive_shape"] == "2,2,4"
    assert measured["outcome"] in out and out.index("the head alone: accept_length") < out.index("next:")
    assert {"shape", "settings", "tensors", "answers"} == measured["check"].keys(), "what `toolkit check` compares with"
    pays = measured["recommended"] is not None  # with a target this small, drafting may cost more than it saves
    for command in ("serve", "chat"):
        assert (f"toolkit {command} --draft runs/tiny/ckpt" in out) == pays
    assert ("toolkit bench acceptance --draft ngram" in out) != pays
    assert "accept_length" in out


@pytest.mark.process
def test_second_run_skips_all_without_torch(finished: tuple[Path, str], home: Path) -> None:
    """README promises seconds. Nothing heavy is imported to find out that nothing has changed."""
    code = (
        "import sys; from toolkit.cli import main; status = main(['run', 'tiny.yaml']); "
        "sys.exit(status or 3 * ('torch' in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped, up to date") == 6


@pytest.mark.process
def test_killed_in_rollouts_and_in_training_it_continues(finished: tuple[Path, str], home: Path) -> None:
    """SIGKILL leaves no time to tidy up: the files must be enough, and the curve must be the uninterrupted one.

    Should a machine be so quick that a stage ends before the kill, the comparison below still holds.
    """
    whole, folder = finished[0], home / "runs" / "killed"
    kill_when(start(home, "run_dir=runs/killed"), folder / "rollouts" / "rollouts.jsonl", 3)
    kill_when(start(home, "run_dir=runs/killed"), folder / "train" / "metrics.jsonl", 8)
    out = finish(start(home, "run_dir=runs/killed"))
    assert "[2/6] rollouts   skipped" in out
    ours, theirs = ({row["id"]: row for row in rows_of(run / "rollouts" / "rollouts.jsonl")} for run in (folder, whole))
    assert ours == theirs
    if list(ours) == list(theirs):  # rollouts are written as they end; another order means other batches
        assert rows_of(folder / "train" / "metrics.jsonl") == rows_of(whole / "train" / "metrics.jsonl")
    steps = [row["step"] for row in rows_of(folder / "train" / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, 25)), "a step was lost or logged twice"


def kill_when(process: subprocess.Popen[str], path: Path, lines: int) -> None:
    """SIGKILL the process as soon as `path` has so many lines (or let it end before)."""
    try:
        while process.poll() is None and not (path.exists() and path.read_text().count("\n") >= lines):
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_another_target_on_disk_is_another_input(tiny_target_directory: Path) -> None:
    """A target trained further in place has the old path and other weights."""
    files = local_files(str(tiny_target_directory), "target", ("*.json", "*.safetensors"))
    assert "target model.safetensors" in files and "target config.json" in files
    assert local_files("smollm2-135m", "target", ("*.json",)) == {}


def test_mistakes_of_the_last_stages_are_found_first(home: Path) -> None:
    """A shape or prompts file that the measurement refuses must not cost a training first."""
    for override, error, told in (
        ("bench.shapes=['4,1,9']", DraftShapeError, "4,1,9"),
        ("bench.prompts=[absent.jsonl]", DataError, "absent.jsonl"),
        ("train.data.global_batch=5", RecipeError, "a multiple of 2"),
        ("train.data.micro_batch=1.5", RecipeError, "integer"),
        ("train.head.aux_layer_ids=[1,2,99]", TargetError, "aux_layer_ids"),
    ):
        with pytest.raises(error, match=told):
            recipe = load_recipe(home / "tiny.yaml", [override])
            _ = Run(recipe, home / "tiny.yaml", processes=2, trains=True).target
