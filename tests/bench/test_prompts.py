import json
from collections import Counter

import pytest

from toolkit.bench.prompts import PLACEHOLDER, Prompt, builtin_prompts, limited, read_prompt_files, read_prompts
from toolkit.jsonl import DataError

GOOD = {"question_id": 1, "category": "math", "turns": ["What is 2 + 2?"], "reference": ["4"]}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_builtin_prompts_are_forty_of_eight_kinds():
    """The report's by-task table and the README promise eight kinds of five."""
    prompts = builtin_prompts()
    assert Counter(prompt.task for prompt in prompts) == dict.fromkeys({prompt.task for prompt in prompts}, 5)
    assert len(prompts) == len({prompt.question_id for prompt in prompts}) == 40
    assert len({turn for prompt in prompts for turn in prompt.turns}) == sum(len(prompt.turns) for prompt in prompts)
    assert 2 <= sum(len(prompt.turns) == 2 for prompt in prompts) <= 8


def test_mt_bench_rows_are_read(tmp_path):
    """Further keys are allowed, blank lines too; a row without a category belongs to the file's name."""
    path = write(tmp_path / "alpaca.jsonl", GOOD, "", {"question_id": "b", "category": "", "turns": ["one", "two"]})
    first, second = read_prompts(path)
    assert (first.question_id, first.task, first.turns) == ("1", "math", ("What is 2 + 2?",))
    assert (second.question_id, second.task, second.turns) == ("b", "alpaca", ("one", "two"))


def test_conversations_are_read_with_their_system_message(tmp_path):
    """A head trained on chats is measured on other chats of the same file, under the same system prompt."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "an answer that the target replaces"},
        {"role": "user", "content": "two"},
    ]
    share_gpt = {"id": "b", "category": "math", "conversations": [{"from": "human", "value": "three"}]}
    first, second = read_prompts(write(tmp_path / "chats.jsonl", {"messages": messages}, share_gpt))
    assert (first.question_id, first.task, first.turns, first.system) == (
        "chats-1",
        "chats",
        ("one", "two"),
        "Be brief.",
    )
    assert (second.question_id, second.task, second.turns, second.system) == ("b", "math", ("three",), None)


def test_limit_takes_from_every_task_before_it_takes_twice():
    """The first ten of forty prompts have only two kinds of task."""
    few = limited(builtin_prompts(), 10)
    assert sorted(Counter(prompt.task for prompt in few).values()) == [1] * 6 + [2] * 2
    assert [int(prompt.question_id) for prompt in few] == sorted(int(prompt.question_id) for prompt in few)
    assert len(limited(builtin_prompts(), None)) == 40


def test_rows_of_speed_bench_that_are_placeholders_are_left_out_and_counted(monkeypatch, caplog):
    """Answers to the placeholder's text would be measured as if they were the benchmark's; so would one later turn."""
    rows = [
        {"question_id": "a", "category": "math", "turns": ["one", "two"], "source": "x"},
        {"question_id": "b", "category": "math", "turns": [PLACEHOLDER]},
        {"question_id": "c", "category": "qa", "turns": ["three", f"four {PLACEHOLDER}"]},
    ]
    sources = []
    monkeypatch.setattr("toolkit.bench.prompts.load_rows", lambda source, **options: sources.append(source) or rows)
    assert read_prompts("speed-bench") == [Prompt("a", "math", ("one", "two"))]
    assert sources == ["hub:nvidia/SPEED-Bench/qualitative:test"]
    assert "2 of the 3 rows of speed-bench are placeholders and are left out" in caplog.text


def test_several_files_are_a_task_each(tmp_path):
    """MT-bench's own categories, and ids that each file counts from 0, would mix the tasks of a table."""
    files = [tmp_path / "mt_bench" / "question.jsonl", tmp_path / "gsm8k" / "question.jsonl", tmp_path / "code.jsonl"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"question_id": 0, "category": "writing", "turns": ["one"]}\n')
    found = read_prompt_files(files)
    assert [(one.task, one.question_id) for one in found] == [
        ("mt_bench", "mt_bench/0"),
        ("gsm8k", "gsm8k/0"),
        ("code", "code/0"),
    ]
    assert read_prompt_files(files[:1])[0].task == "writing", "one file keeps its categories"
    with pytest.raises(DataError, match="would be one task"):
        read_prompt_files([files[0], files[0]])
