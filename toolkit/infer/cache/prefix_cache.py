"""Prefix cache: a tree of pages of earlier texts, found again by their tokens (compare SGLang's radix cache).

A drafter's entry at position i depends on tokens up to i + lookahead (EAGLE: 1, since position i is read with the next
token; MTP: one per layer). So the key of a page is its own tokens and the next `lookahead` tokens, and its parent is
the page before it. With pages of 4 and a lookahead of 1:

    tokens   t0 t1 t2 t3 | t4 t5 t6 t7 | t8 ..
    page 0   t0 t1 t2 t3   t4
    page 1                 t4 t5 t6 t7   t8

Only rows whose drafter has read them are cached.

The cache compares tokens, not hashes. It evicts the least recently used pages first, and a child before its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.infer.cache.linear_states import STATES_PER_ROW, Snapshot
from toolkit.infer.cache.page_pool import PagePool

_Key = tuple[int, ...]  # tokens
EVICTED_TOGETHER = 64  # an eviction takes at least one of so many cached pages, if these are in no request


@dataclass(eq=False)
class _Node:
    page: int
    above: dict[_Key, _Node]  # the dictionary that contains this node: its parent's `children`, or the roots
    key: _Key
    children: dict[_Key, _Node] = field(default_factory=dict)
    states: Snapshot | None = None  # of a hybrid target: at the end of the page


class PrefixCache:
    """Holds pages of `pool` for reuse by requests with the same prefix."""

    def __init__(self, pool: PagePool, lookahead: int) -> None:
        self._pool, self._lookahead = pool, lookahead
        self._roots: dict[_Key, _Node] = {}
        self._recency: OrderedDict[_Node, None] = OrderedDict()  # the least recent first, which is always a leaf
        self._holding: OrderedDict[_Node, None] = OrderedDict()  # nodes with states, the least recent first

    @property
    def pages(self) -> list[int]:
        """All pages that the cache holds."""
        return [node.page for node in self._recency]

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the pages of the longest cached prefix of `tokens`, at most `most`; mark them as used."""
        path = self._path(tokens, most)
        self._touch(path)
        return [node.page for node in path]

    def find_states(self, tokens: Sequence[int], most: int) -> tuple[list[int], Snapshot | None]:
        """As `find`, for a hybrid target: the longest prefix at whose end states are kept, and these states."""
        path = self._path(tokens, most)
        while path and path[-1].states is None:
            path.pop()
        self._touch(path)
        return [node.page for node in path], path[-1].states if path else None

    def keep(self, tokens: Sequence[int], row: int, positions: int, states: Snapshot | None = None) -> None:
        """Cache the row's pages of its first `positions` positions, and the row's `states`.

        Only full pages are cached whose next `lookahead` tokens are known. tokens: the tokens of the row.
        """
        complete = min(positions, len(tokens) - self._lookahead) // self._pool.page_size
        path = self._path(tokens, complete)
        for number, page in enumerate(self._pool.share(row, range(len(path), complete)), start=len(path)):
            key = self._key(tokens, number)
            above = path[-1].children if path else self._roots
            node = above[key] = _Node(page, above, key)
            path.append(node)
        self._touch(path)
        number = 0 if states is None else states.position // self._pool.page_size
        if 0 < number <= len(path):
            path[number - 1].states = states
            self._holding[path[number - 1]] = None
            self._holding.move_to_end(path[number - 1])
            if len(self._holding) > STATES_PER_ROW * self._pool.rows:
                self._holding.popitem(last=False)[0].states = None

    def clear(self) -> None:
        """Drop all prefixes."""
        for page in self.pages:
            self._pool.drop(page)
        self._roots.clear()
        self._recency.clear()
        self._holding.clear()

    def evict(self, pages: int) -> bool:
        """Evict the least recently used pages until at least `pages` pages are free in the pool.

        False, without an eviction, if all evictable pages do not suffice.
        """
        missing = pages - self._pool.free
        if missing <= 0:
            return True
        if missing > len(self._recency) - self._pool.shared:
            return False
        # Some more at a time, because each search passes all pages of running requests.
        going = self._evictable(max(missing, len(self._recency) // EVICTED_TOGETHER))
        if len(going) < missing:
            return False
        for node in going:
            del self._recency[node]
            self._holding.pop(node, None)
            del node.above[node.key]
            self._pool.drop(node.page)
        return True

    def _evictable(self, most: int) -> list[_Node]:
        """The `most` least recent nodes that only the cache holds, and whose descendants only the cache holds."""
        found: list[_Node] = []
        staying: set[int] = set()  # ids of dictionaries with a node that stays: their parents stay too
        for node in self._recency:
            if id(node.children) in staying or self._pool.holders(node.page) > 1:
                staying.add(id(node.above))
            else:
                found.append(node)
                if len(found) == most:
                    break
        return found

    def _path(self, tokens: Sequence[int], most: int) -> list[_Node]:
        """Return the longest path of matching pages, at most `most`."""
        path: list[_Node] = []
        while len(path) < most:
            node = (path[-1].children if path else self._roots).get(self._key(tokens, len(path)))
            if node is None:
                break
            path.append(node)
        return path

    def _key(self, tokens: Sequence[int], number: int) -> _Key:
        size = self._pool.page_size
        return tuple(tokens[number * size : (number + 1) * size + self._lookahead])

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):  # a parent is always more recent than its children
            self._recency[node] = None
            self._recency.move_to_end(node)
            if node in self._holding:
                self._holding.move_to_end(node)
