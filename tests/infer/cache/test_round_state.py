"""The device's copy of rows and page tables is that of the host, and no more is uploaded than has changed."""

from __future__ import annotations

import random

import pytest
import torch

from toolkit.infer.cache import round_state
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cache.round_state import RoundState


@pytest.fixture
def uploaded(monkeypatch) -> list[int]:
    """Numbers of each upload."""
    sizes: list[int] = []
    inner = round_state.upload

    def counted(numbers, device):
        sizes.append(sum(map(len, numbers)))
        return inner(numbers, device)

    monkeypatch.setattr(round_state, "upload", counted)
    return sizes


def check(state: RoundState, pool: PagePool, requests: int, count: int) -> None:
    """The rows of requests have the pool's tables, with page 0 after their end; the other rows have page 0 alone."""
    state.set_tables(requests, count)
    for row in range(count):
        table = pool.tables[row] if row < requests else []
        assert state.table[row].tolist() == table + [0] * (pool.pages_per_row - len(table)), row


def test_tables_follow_the_pool():
    """Rows that grow, end, move and begin with shared pages; a page of before would be another request's now."""
    chance, pool = random.Random(5), PagePool(4, 64, page_size=4)
    state = RoundState(4, pool, torch.device("cpu"))
    for _ in range(200):
        row = chance.randrange(4)
        what = chance.choice(["grow", "grow", "grow", "release", "move", "adopt"])
        other = (row + 1) % 4
        if what == "grow":
            pool.grow(row, min(64, 4 * len(pool.tables[row]) + chance.randrange(1, 20)))
        elif what == "release":
            pool.release(row)
        elif what == "move" and not pool.tables[other]:
            pool.move(other, row)
        elif what == "adopt" and not pool.tables[other]:
            pool.adopt(other, pool.tables[row][:2])
        requests = chance.randrange(1, 5)
        check(state, pool, requests, chance.randrange(requests, 5))


def test_only_new_pages_are_uploaded(uploaded):
    """With tables of thousands of pages, whole ones would take longer than the round."""
    pool = PagePool(2, 4096, page_size=4)
    state = RoundState(2, pool, torch.device("cpu"))
    pool.grow(0, 4000), pool.grow(1, 400)
    check(state, pool, 2, 2)
    check(state, pool, 2, 2)
    pool.grow(0, 4001)
    check(state, pool, 2, 2)
    assert uploaded == [2 * 1100, 2]  # a page and its place
