"""`toolkit plan` as it is typed."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from toolkit.cli import main
from toolkit.recipe import DEMO_RECIPE
from toolkit.weights import write_json

WORK = ["--input", "100", "--output", "50", "--gpus", "1"]


def test_plan_of_a_head_with_measured_chains(tiny_draft_directory, tiny_target_directory, tmp_path, capsys):
    """The head's own measurement, its size, and what to type: export, then the launch line."""
    import shutil

    head = tmp_path / "head"
    shutil.copytree(tiny_draft_directory, head)
    rows = [{"top_k": 1, "num_steps": 2, "accept_rate": [0.9, 0.8], "temperature": 0.0, "verify_steps": 9}]
    rows.append(rows[0] | {"shape": "adaptive", "num_steps": 7})  # its accept_rate is of the steps that it chose
    write_json(head / "measured.json", {"rows": rows})
    typed = ["plan", str(tiny_target_directory), *WORK, "--concurrency", "4", "--draft", str(head)]
    typed += ["--gpu-bandwidth", "0.01"]  # so slow that a tiny model is worth drafting for
    assert main([*typed, "--engine", "vllm"]) == 0
    said = capsys.readouterr().out
    assert "1: 1.90, 2: 2.62 (measured.json: a chain of 2, temperature 0.0, 9 verify steps)" in said
    assert f"toolkit export --draft {head} --to vllm --out OUT --target {tiny_target_directory}" in said
    assert "6 costs fitted to 6 published figures" in said
    line = next(line for line in said.splitlines() if line.startswith("vllm serve"))
    assert json.loads(line.split("--speculative-config '")[1].split("'")[0])["model"] == "OUT"
    measured = [*typed, "--layout", "tp1", "--step-ms", "1:500,2:500"]
    assert main(measured) == 0
    assert "from your measured steps" in capsys.readouterr().out


def test_plan_of_more_than_there_is_room_for(tiny_target_directory, capsys):
    """The tiny target has 512 positions, and a rank at most 1,024 places."""
    typed = ["plan", str(tiny_target_directory), "--input", "500", "--output", "50", "--gpus", "1"]
    assert main([*typed, "--concurrency", "5000"]) == 0
    said = capsys.readouterr().out
    assert "550 tokens a request are more than the target's max_position_embeddings of 512" in said
    places = int(said.split("request(s) a rank")[0].split()[-1])
    assert f"of 5000 requests in flight {places} are served at a time; the other {5000 - places} wait first" in said
    assert main(["plan", str(tiny_target_directory), *WORK, "--concurrency", "4"]) == 0
    said = capsys.readouterr().out
    assert "max_position_embeddings" not in said and "wait first" not in said


def test_plans_without_a_directory(tiny_target_directory, capsys):
    """Without a head decoding is plain; a head yet to come is named on the line, and there is nothing to export."""
    assert main(["plan", str(tiny_target_directory), *WORK, "--rate", "2"]) == 0
    said = capsys.readouterr().out
    assert "plain decoding" in said and "speculative" not in said and "--max-running-requests" in said
    words = ["--head", "eagle2", "--concurrency", "256", "--accept-lengths", "1:1.9", "--gpu-bandwidth", "0.01"]
    assert main(["plan", str(tiny_target_directory), *WORK, *words]) == 0
    said = capsys.readouterr().out
    assert "--speculative-draft-model-path HEAD" in said and "exported" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--concurrency", "4", "--gpu", "MI300X"], "give --gpu-memory GB"),
        (["--concurrency", "4", "--layout", "pp2"], "tpN"),
        (["--concurrency", "4", "--head", "eagle3"], "accept lengths are missing"),
    ],
)
def test_wrong_words(tiny_target_directory, capsys, words, says):
    assert main(["plan", str(tiny_target_directory), *WORK, *words]) == 2
    assert says in capsys.readouterr().err


def test_a_head_of_another_target(tiny_draft_directory, tiny_target_directory, tmp_path, capsys):
    config = json.loads((tiny_target_directory / "config.json").read_text()) | {"vocab_size": 400}
    (tmp_path / "config.json").write_text(json.dumps(config))
    typed = ["plan", str(tmp_path), *WORK, "--concurrency", "1", "--draft", str(tiny_draft_directory)]
    assert main([*typed, "--accept-lengths", "1:1.5"]) == 2
    assert "belongs to another target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quantization", "words", "size"),
    [({}, [], 1.1), ({"quant_method": "fp8"}, [], 0.5), ({"quant_method": "new"}, ["--weight-bits", "4"], 0.3)],
)
def test_the_weights_of_a_multimodal_target_in_training(tmp_path, capsys, quantization, words, size):
    """Half a billion in its layers. Such a checkpoint states its quantization beside the text model's configuration."""
    text = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 16}
    text |= {"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1000}
    config = AutoConfig.for_model("qwen3_5", text_config=text).to_dict()
    write_json(tmp_path / "config.json", config | {"quantization_config": quantization})
    assert main(["plan", str(tmp_path), "--train", str(DEMO_RECIPE), "--gpus", "1", *words]) == 0
    assert f"GB held: target {size}," in capsys.readouterr().out
