"""Prefixes are found by their tokens and successors; the least recent go first."""

from __future__ import annotations

import pytest

from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cache.prefix_cache import PrefixCache

TEXT = list(range(100, 120))


def filled(lookahead: int = 0):
    """A cache that keeps what row 0 has read of TEXT, in pages of 4."""
    pool = PagePool(2, 40, page_size=4)
    cache = PrefixCache(pool, lookahead)
    assert pool.grow(0, len(TEXT))
    cache.keep(TEXT, 0, len(TEXT))
    return pool, cache


@pytest.mark.parametrize(("lookahead", "same", "pages"), [(0, 12, 3), (0, 11, 2), (1, 12, 2), (1, 13, 3), (3, 14, 2)])
def test_a_page_is_known_by_its_tokens_and_their_successors(lookahead, same, pages):
    """A draft entry was read with the token behind it: the same page before another token is another page."""
    _, cache = filled(lookahead)
    other = TEXT[:same] + [7] * 20
    assert len(cache.find(other, 9)) == pages
    assert len(cache.find(other, 1)) == 1
    assert not cache.find([7, *TEXT], 9)


def test_only_what_was_read_and_has_its_successor_is_kept():
    """20 tokens: 5 pages, 4 when a token behind them must be known, 2 when 9 positions were read."""
    for lookahead, positions, pages in ((0, 20, 5), (1, 20, 4), (0, 9, 2)):
        pool = PagePool(1, 40, page_size=4)
        cache = PrefixCache(pool, lookahead)
        pool.grow(0, 20)
        cache.keep(TEXT, 0, positions)
        assert len(cache.pages) == pages


def test_the_least_recent_leaf_goes_first():
    """A page that others stand on must stay as long as they do."""
    pool, cache = filled()
    pool.release(0)
    branch = TEXT[:8] + [7] * 12
    pool.adopt(1, cache.find(branch, 9))
    pool.grow(1, 20)
    cache.keep(branch, 1, 20)  # shares two pages, adds three
    pool.release(1)
    assert len(cache.pages) == 8
    cache.find(TEXT, 9)
    assert cache.evict(pool.free + 3)
    assert len(cache.find(branch, 9)) == 2 and len(cache.find(TEXT, 9)) == 5
    pool.check_integrity(cache.pages)
    assert not cache.evict(pool.capacity + 1) and len(cache.pages) == 5  # nothing goes where all would not suffice
    assert cache.evict(pool.capacity) and not cache.pages
    pool.check_integrity([])


def test_many_pages_go_some_at_a_time():
    """Every search passes the pages in use, here the older half: it must not come back for each page."""
    pool = PagePool(2, 1040, page_size=4)
    cache = PrefixCache(pool, 0)
    for row in (0, 1):
        pool.grow(row, 1040)
        cache.keep([row] * 1040, row, 1040)
    assert not cache.evict(pool.free + 1), "all pages are in use"
    pool.release(1)
    assert cache.evict(pool.free + 1) and pool.free == 520 // 64
    assert len(cache.find([0] * 1040, 999)) == 260 and len(cache.find([1] * 1040, 999)) == 252
    pool.check_integrity(cache.pages)


def test_a_page_in_use_stays_with_what_it_stands_on():
    """Letting go of it would free nothing; letting go of what it stands on would lose it."""
    pool, cache = filled()
    pool.release(0)
    pool.adopt(1, cache.find(TEXT, 3))
    assert not cache.evict(pool.free + 3) and len(cache.pages) == 5
    assert cache.evict(pool.free + 2) and len(cache.find(TEXT, 9)) == 3
    pool.check_integrity(cache.pages)
