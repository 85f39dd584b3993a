"""Prompts for fresh rollouts: an endless sequence of passes over a pool, each in its own random order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from toolkit.data.conversations import Conversation, Conversations, conversation_from_row, user_turns
from toolkit.jsonl import DataError, StoredRows


def read_pool(rollouts: str | Path) -> Conversations:
    """Read the prompts of the training split of a rollouts file, sorted by id; held-out prompts are excluded.

    Memory: the id and about 30 bytes per prompt; messages are read on access.
    Raises `DataError` for rows without messages, and when the split is empty.
    """
    rows = StoredRows(rollouts)
    pool: list[tuple[str, int]] = []  # id, place among the rows
    for at, row in enumerate(rows):
        if row.get("split") != "train":
            continue
        if not row.get("messages"):
            raise DataError(
                f"{rows.where(at)}: the rollout has no messages, so its prompt cannot be answered again; use rollouts "
                "that `toolkit rollouts` wrote, or set train.on_policy.every=null"
            )
        pool.append((conversation_from_row(row, rows.where(at), str(row["id"])).id, at))
    if not pool:
        raise DataError(
            f"{rollouts} has no rollouts of the training split, whose prompts are to be answered again; "
            "write more rollouts, or set train.on_policy.every=null"
        )
    pool.sort(key=itemgetter(0))
    rows.keep([at for _, at in pool])
    return Conversations(
        [name for name, _ in pool], lambda at: user_turns(conversation_from_row(rows[at], rows.where(at), ""))
    )


def take_prompts(pool: Sequence[Conversation], seed: int, start: int, count: int) -> list[Conversation]:
    """Return prompts start .. start+count-1 of the sequence, a pure function of the arguments.

    From the second pass on, the number of the pass is appended to the id (`id@2`): ids stay unique, and draws seeded by
    them differ.
    """
    taken: list[Conversation] = []
    while len(taken) < count:
        number, first = divmod(start + len(taken), len(pool))
        order = list(range(len(pool)))
        random.Random(f"prompt pool {seed} {number}").shuffle(order)
        for index in order[first : first + count - len(taken)]:
            one = pool[index]
            taken.append(one if number == 0 else Conversation(f"{one.id}@{number + 1}", one.messages))
    return taken
