"""Prompts for fresh rollouts: an endless sequence over a pool in which none comes twice before all have come once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from toolkit.data.conversations import Conversation, conversation_from_row, user_turns
from toolkit.jsonl import DataError, read_rows


def read_pool(rollouts: str | Path) -> list[Conversation]:
    """What was asked in the training split of a rollouts file, in the order of the ids; held-out prompts stay unseen.

    Raises `DataError` for rows without messages, and when there is none.
    """
    pool = []
    for number, row in read_rows(rollouts):
        if row.get("split") != "train":
            continue
        where = f"{rollouts}:{number}"
        if not row.get("messages"):
            raise DataError(
                f"{where}: the rollout holds no messages, so its prompt cannot be answered afresh; rollouts that "
                "`toolkit rollouts` wrote are needed (or train.rollout_every=null)"
            )
        pool.append(user_turns(conversation_from_row(row, where, str(row["id"]))))
    if not pool:
        raise DataError(f"{rollouts} has no rollouts of the training split, so there are no prompts to answer afresh")
    return sorted(pool, key=lambda one: one.id)


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
