"""The order in which prompts are answered again."""

from __future__ import annotations

import json

import pytest

from toolkit.data.conversations import Conversation
from toolkit.jsonl import DataError
from toolkit.train.engine_client import read_pool, take_prompts

POOL = [Conversation(name, ({"role": "user", "content": name},)) for name in "abcdefg"]


@pytest.mark.parametrize("count", [1, 3, 7, 10])
def test_none_twice_before_all_once(count):
    """Taken in portions of any size, also ones that reach over a pass or hold several: each pass has each prompt once,
    in an order of its own, and no id repeats (rows of one file are told apart by it, and draws seeded)."""
    taken = [one for start in range(0, 28, count) for one in take_prompts(POOL, 5, start, count)][:28]
    assert taken == take_prompts(POOL, 5, 0, 28)
    passes = [[one.messages[0]["content"] for one in taken[at : at + 7]] for at in range(0, 28, 7)]
    assert all(sorted(names) == list("abcdefg") for names in passes) and len(set(map(tuple, passes))) > 1
    assert len({one.id for one in taken}) == 28
    assert take_prompts(POOL, 6, 0, 7) != taken[:7]


def test_the_pool_is_the_training_split(tmp_path):
    """A held-out prompt in it would be trained on, and every measurement too good. Answers are not asked again."""
    path = tmp_path / "rollouts.jsonl"

    def row(name, split):
        said = [{"role": "user", "content": f"ask {name}"}, {"role": "assistant", "content": "yes"}]
        return {"id": name, "split": split, "messages": said}

    rows = [row("b", "train"), row("a", "held_out"), row("c", "train"), row("aa", "train")]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    pool = read_pool(path)
    assert [(one.id, [message["content"] for message in one.messages]) for one in pool] == [
        ("aa", ["ask aa"]),
        ("b", ["ask b"]),
        ("c", ["ask c"]),
    ]
    path.write_text(json.dumps({"id": "x", "split": "train", "messages": []}) + "\n")
    with pytest.raises(DataError, match="rollouts.jsonl:1: the rollout has no messages"):
        read_pool(path)
