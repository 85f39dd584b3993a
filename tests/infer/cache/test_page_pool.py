"""Pages: held by those who hold them, free otherwise."""

from __future__ import annotations

import random

import pytest
import torch

from toolkit.infer.cache import page_pool
from toolkit.infer.cache.page_pool import PagePool


class Recorder:
    """A store that remembers which text each page holds."""

    def __init__(self, pool: PagePool) -> None:
        self.text: dict[int, str] = {}
        pool.attach(self)

    def forget_pages(self, first, count) -> None:
        self.text |= dict.fromkeys(range(first, first + count), "forgotten")

    def copy_pages(self, destination, source) -> None:
        self.text |= dict(zip(destination, [self.text.get(page, "") for page in source], strict=True))


@pytest.mark.parametrize("contiguous", [True, False])
def test_pages_are_taken_up_to_the_capacity_and_come_back(contiguous):
    """Nothing is taken when not all can be."""
    pool = PagePool(2, 40, capacity=7, contiguous=contiguous, page_size=10)
    assert pool.grow(0, 31) and pool.held == 4
    assert pool.grow(0, 5) and pool.held == 4
    assert not pool.grow(1, 40) and not pool.tables[1] and pool.held == 4
    assert pool.grow(1, 30) and pool.free == 0
    pool.release(0)
    assert pool.free == 4
    pool.check_integrity([])


@pytest.mark.parametrize("contiguous", [True, False])
def test_shared_pages_outlive_their_row(contiguous):
    """The prefix cache holds what the row held, after the row has ended and its pages were written again."""
    pool = PagePool(2, 40, capacity=9, contiguous=contiguous, page_size=10)
    store = Recorder(pool)
    pool.grow(0, 30)
    store.text |= dict(zip(pool.tables[0], "abc", strict=True))
    cached = pool.share(0, range(0, 2))
    pool.check_integrity(cached)
    pool.release(0)
    pool.grow(0, 40)
    store.text |= dict.fromkeys(pool.tables[0], "x")
    assert pool.adopt(1, cached) and pool.grow(1, 25)
    assert [store.text[page] for page in pool.tables[1][:2]] == ["a", "b"]
    pool.check_integrity(cached)
    for page in cached:
        pool.drop(page)
    pool.check_integrity([])


def test_sharing_copies_as_much_as_there_is_room_for():
    """At home a shared page is a page more; elsewhere it is the same page."""
    pool = PagePool(1, 40, capacity=5, page_size=10)
    pool.grow(0, 40)
    assert len(pool.share(0, range(0, 4))) == 1 and pool.free == 0
    pool = PagePool(1, 40, capacity=4, contiguous=False, page_size=10)
    pool.grow(0, 40)
    assert pool.share(0, range(0, 4)) == pool.tables[0] and pool.held == 4


def test_scattered_padding_goes_to_the_page_that_is_never_read():
    """Positions beyond a row's pages are written by padding only."""
    pool = PagePool(2, 40, contiguous=False, page_size=10)
    pool.grow(1, 10)
    mine = pool.tables[1][0] * 10
    assert pool.places(0, [7, 8], 3, torch.device("cpu")).tolist() == [[7, 8, 9], [mine + 8, mine + 9, 0]]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("kept", [2, 64])
def test_random_traffic_keeps_every_page(contiguous, kept, monkeypatch):
    """2,000 random operations: integrity after each, the texts where they belong, nothing held in the end. Rows of up
    to 6 pages are longer or shorter than what a released row keeps."""
    monkeypatch.setattr(page_pool, "KEPT_PAGES", kept)
    chance = random.Random(3)
    pool = PagePool(4, 60, capacity=17, contiguous=contiguous, page_size=10)
    store = Recorder(pool)
    cached: list[tuple[int, str]] = []
    held: list[list[str]] = [[], [], [], []]
    for step in range(2000):
        row, other = chance.sample(range(4), 2)
        act = chance.choice(("grow", "grow", "release", "move", "share", "adopt", "drop"))
        if act == "grow" and pool.grow(row, chance.randint(1, 60)):
            for page in pool.tables[row][len(held[row]) :]:
                store.text[page] = f"{step}-{page}"
                held[row].append(store.text[page])
        elif act == "release":
            pool.release(row)
            held[row] = []
        elif act == "move" and not held[row]:
            pool.move(row, other)
            held[row], held[other] = held[other], []
        elif act == "share" and held[row]:
            cached += zip(pool.share(row, range(0, len(held[row]))), held[row], strict=False)
        elif act == "adopt" and not held[row] and cached:
            page, text = chance.choice(cached)
            if pool.adopt(row, [page]):
                held[row] = [text]
        elif act == "drop" and cached:
            pool.drop(cached.pop(chance.randrange(len(cached)))[0])
        pool.check_integrity([page for page, _ in cached])
        assert [[store.text[page] for page in table] for table in pool.tables] == held
        assert all(store.text[page] == text for page, text in cached)
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
