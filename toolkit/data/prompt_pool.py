"""Prompts for fresh rollouts: an endless sequence over a pool in which none comes twice before all have come once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from toolkit.data.conversations import Conversation, Conversations, conversation_from_row, user_turns
from toolkit.jsonl import DataError, StoredRows


def read_pool(rollouts: str | Path) -> Conversations:
    """What was asked in the training split of a rollouts file, in the order of the ids; held-out prompts stay unseen.

    Memory: the id and some 30 bytes for each; messages are read when they are asked for.
    Raises `DataError` for rows without messages, and when there is none.
    """
    rows = StoredRows(rollouts)
    pool: list[tuple[str, int]] = []  # id, place among the rows
    for at, row in enumerate(rows):
        if row.get("split") != "train":
            continue
        if not row.get("messages"):
            raise DataError(
                f"{rows.where(at)}: the rollout holds no messages, so its prompt cannot be answered afresh; rollouts "
                "that `toolkit rollouts` wrote are needed (or train.on_policy.every=null)"
            )
        pool.append((conversation_from_row(row, rows.where(at), str(row["id"])).id, at))
    if not pool:
        raise DataError(f"{rollouts} has no rollouts of the training split, so there are no prompts to answer afresh")
    pool.sort(key=itemgetter(0))
    rows.keep([at for _, at in pool])
    return Conversations(
        [name for name, _ in pool], lambda at: user_turns(conversation_from_row(rows[at], rows.where(at), ""))
    )


def take_prompts(pool: Sequence[Conversation], seed: int, start: int, count: int) -> list[Conversation]:
    """Numbers start .. start+count-1 of the sequence: the pool in one random order, then in another, and so on.

    From the second pass on an id has the pass behind it (`id@2`), so that ids stay unique, and draws seeded by them
    differ. A pure function of its arguments.
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
