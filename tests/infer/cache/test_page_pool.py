"""Pages: held by those who hold them, free otherwise."""

from __future__ import annotations

import random

import pytest

from toolkit.infer.cache.page_pool import PagePool


def test_pages_are_taken_up_to_the_capacity_and_come_back():
    """Nothing is taken when not all can be."""
    pool = PagePool(2, 40, capacity=7, page_size=10)
    assert pool.grow(0, 31) and pool.held == 4
    assert pool.grow(0, 5) and pool.held == 4
    assert not pool.grow(1, 40) and not pool.tables[1] and pool.held == 4
    assert pool.grow(1, 30) and pool.free == 0
    pool.release(0)
    assert pool.free == 4
    pool.check_integrity([])


def test_random_traffic_keeps_every_page():
    """2,000 random operations: integrity after each, the texts where they belong, nothing held in the end. The prefix
    cache holds what a row held, after the row has ended."""
    chance = random.Random(3)
    pool = PagePool(4, 60, capacity=17, page_size=10)
    written: dict[int, str] = {}  # text of each page
    cached: list[tuple[int, str]] = []
    held: list[list[str]] = [[], [], [], []]
    for step in range(2000):
        row, other = chance.sample(range(4), 2)
        act = chance.choice(("grow", "grow", "release", "move", "share", "adopt", "drop"))
        if act == "grow" and pool.grow(row, chance.randint(1, 60)):
            for page in pool.tables[row][len(held[row]) :]:
                written[page] = f"{step}-{page}"
                held[row].append(written[page])
        elif act == "release":
            pool.release(row)
            held[row] = []
        elif act == "move" and not held[row]:
            pool.move(row, other)
            held[row], held[other] = held[other], []
        elif act == "share" and held[row]:
            cached += zip(pool.share(row, range(0, len(held[row]))), held[row], strict=True)
        elif act == "adopt" and not held[row] and cached:
            page, text = chance.choice(cached)
            pool.adopt(row, [page])
            held[row] = [text]
        elif act == "drop" and cached:
            pool.drop(cached.pop(chance.randrange(len(cached)))[0])
        pool.check_integrity([page for page, _ in cached])
        assert [[written[page] for page in table] for table in pool.tables] == held
        assert all(written[page] == text for page, text in cached)
    for row in range(4):
        pool.release(row)
    for page, _ in cached:
        pool.drop(page)
    assert pool.held == 0
    pool.check_integrity([])


def test_a_lost_page_is_noticed():
    """The check is only worth something if it fails."""
    pool = PagePool(2, 40, page_size=10)
    pool.grow(0, 20)
    pool.tables[0].pop()
    with pytest.raises(AssertionError, match="holder counts"):
        pool.check_integrity([])
