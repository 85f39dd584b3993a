"""The rollout benchmark on a tiny target: who writes what, and what is counted. No times."""

from __future__ import annotations

import json

import pytest
import torch

from toolkit.bench.records import read_record
from toolkit.bench.side_by_side import BenchError
from toolkit.targets.load import load_target


@pytest.fixture
def bench(script, monkeypatch, tiny_target_directory, tmp_path):
    """Runs the script on the tiny target; returns its rows."""
    rollouts = script("rollouts")
    monkeypatch.setattr(rollouts.torch, "set_num_threads", lambda count: None)

    def run(*more: str) -> list[dict]:
        out = tmp_path / "rollouts.json"
        line = [
            "--target",
            str(tiny_target_directory),
            "--hf-dtype",
            "float32",
            "--max-tokens",
            "12",
            "--out",
            str(out),
        ]
        assert rollouts.main([*line, *more]) == 0
        return read_record(out, "engine")["rows"]

    return run


@pytest.mark.parametrize("ends", ["stop", "length"])
def test_both_write_the_same_answers_and_count_them_alike(bench, monkeypatch, script, tiny_target_directory, ends):
    """Padding that is read, a stop id that one side writes past, or an answer dropped would win or lose the race."""
    stop = torch.tensor(sorted(load_target(tiny_target_directory).stop_ids))
    real = script("rollouts").load_target

    def stopping(*args, **kwargs):
        """The tiny target hardly ever stops by itself: ids of its answers become stop ids."""
        target = real(*args, **kwargs)
        target.__dict__["stop_ids"] = frozenset(range(0, target.vocab_size, 5)) | set(stop.tolist())
        return target

    monkeypatch.setattr(script("rollouts"), "load_target", stopping)
    rows = bench("--batch", "2", "3", "--limit", "9", "--repeats", "2", "--ends", ends)
    assert [(row["engine"], row["batch"], row["queues"]) for row in rows] == [
        ("ours", 2, 2), ("hf-generate-float32", 2, 2), ("ours", 3, 1), ("hf-generate-float32", 3, 1),
    ]  # fmt: skip
    for row in rows:
        assert row["answers"] == row["equal"] == 18, "float32: the answers must be equal"
        assert row["interval"] == [None, None], "two queues say nothing about spread"
    assert len({row["tokens"] for row in rows}) == 1
    assert (rows[0]["tokens"] == 18 * 12) == (ends == "length"), "stop ids end answers, or nothing does"
    assert rows[0]["ratio"] == 1


def test_compiled_forwards_are_a_row_of_their_own(bench, traced_programs):
    """The same answers. (Graphs are traced here and not compiled.)"""
    rows = bench("--batch", "2", "--limit", "4", "--torch-compile")
    assert traced_programs
    assert [row["engine"] for row in rows] == ["ours", "hf-generate-float32", "ours-compiled"]
    assert all(row["answers"] == row["equal"] == 4 for row in rows)
    assert rows[0]["version"] == rows[2]["version"] != rows[1]["version"]


def test_a_ratio_is_of_equal_numbers_of_tokens(script):
    """An engine that writes half as much in half the time is as fast."""
    rollouts = script("rollouts")
    turns = {
        "ours": [rollouts.Turn(0, 4.0, [[1, 2], [3, 4]])],
        "hf": [rollouts.Turn(0, 2.0, [[1], [3]])],
        "slow": [rollouts.Turn(0, 12.0, [[1, 2], [3, 5]])],
    }

    class Loaded:
        dtype, weight_bits = torch.float32, 32.0

    rows = rollouts.rows_of(turns, 2, dict.fromkeys(turns, Loaded()), 10)
    assert [row["ratio"] for row in rows] == [1, 1, 3] and [row["equal"] for row in rows] == [2, 0, 1]
    assert rows[0]["interval"] == [None, None] and rows[1]["tokens_per_s"] == 1


def test_repeats_of_a_queue_are_no_further_units(script):
    """Taken for queues of their own, six repeats of two queues would look like a measurement of twelve."""
    rollouts = script("rollouts")

    def found(queues: int, repeats: int) -> tuple[float, float] | None:
        ours = [rollouts.Turn(queue, 1.0 + queue, []) for _ in range(repeats) for queue in range(queues)]
        return rollouts.interval_of([2.0 * (1 + turn.queue % 2) * turn.seconds for turn in ours], ours)

    assert found(2, 6) is None and found(4, 3) is None
    assert found(6, 4) == pytest.approx(found(6, 1)) and 2 <= found(6, 1)[0] < found(6, 1)[1] <= 4


def test_first_user_turns_of_a_file_are_asked(script, tmp_path, tiny_target):
    """With their system message; and too few of them are an error that says so."""
    rollouts, file = script("rollouts"), tmp_path / "prompts.jsonl"
    messages = [("system", "Be short."), ("user", "Hello?"), ("assistant", "Hi."), ("user", "And now?")]
    row = {"messages": [{"role": role, "content": text} for role, text in messages]}
    file.write_text("".join(json.dumps({**row, "id": str(number)}) + "\n" for number in range(3)))
    line = ["--prompts", str(file), "--batch", "2"]
    prompts = rollouts.prompts_of(rollouts.arguments().parse_args(line), tiny_target.tokenizer)
    text = tiny_target.tokenizer.decode(prompts[0])
    assert len(prompts) == 3 and "Be short." in text and "Hello?" in text and "And now?" not in text
    with pytest.raises(BenchError, match="--batch 4 needs .* 3 were found"):
        rollouts.prompts_of(rollouts.arguments().parse_args([*line, "--batch", "4"]), tiny_target.tokenizer)
