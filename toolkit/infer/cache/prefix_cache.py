"""Pages of text read before, found again by the tokens they hold.

A drafter's entry at position i depends on tokens up to i + lookahead (EAGLE: 1, since it is read with the token after
it; MTP: one for every layer). So a page is known by its own tokens and the `lookahead` behind them, below the page
before it; with pages of 4 and a lookahead of 1:

    tokens   t0 t1 t2 t3 | t4 t5 t6 t7 | t8 ..
    page 0   t0 t1 t2 t3   t4
    page 1                 t4 t5 t6 t7   t8

A request that nothing is drafted for leaves pages that hold the target's part alone. These are known by their own
tokens and are found by its like only; they may stand on whole pages, never the other way round.

Tokens are compared, not hashes. Least recently used pages go first; a page goes before the one it stands on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.infer.cache.page_pool import PagePool

_Key = tuple[bool, tuple[int, ...]]  # whether the page holds the drafter's part too, and the tokens it is known by


@dataclass(eq=False)
class _Node:
    page: int
    above: dict[_Key, _Node]  # where this node is filed
    key: _Key
    below: dict[_Key, _Node] = field(default_factory=dict)


class PrefixCache:
    """Holds pages of `pool` for texts that may come again."""

    def __init__(self, pool: PagePool, lookahead: int) -> None:
        self._pool, self._lookahead = pool, lookahead
        self._roots: dict[_Key, _Node] = {}
        self._recency: OrderedDict[_Node, None] = OrderedDict()  # the least recent first, always a leaf

    @property
    def pages(self) -> list[int]:
        """All pages it holds."""
        return [node.page for node in self._recency]

    def find(self, tokens: Sequence[int], most: int, drafted: bool = True) -> list[int]:
        """Pages that hold the first positions of `tokens`, `most` pages at most; they become the most recent.

        drafted: the drafter's part is needed too.
        """
        path = self._path(tokens, most, drafted)
        self._touch(path)
        return [node.page for node in path]

    def keep(self, tokens: Sequence[int], row: int, positions: int, drafted: bool = True) -> None:
        """Keep what the row's pages hold of its first `positions` positions, as far as there is room.

        Only whole pages whose successors are known are kept. `tokens`: the row's text. drafted: the drafter's part is
        right too.
        """
        complete = min(positions, len(tokens) - (self._lookahead if drafted else 0)) // self._pool.page_size
        path = self._path(tokens, complete, drafted)
        missing = complete - len(path)
        for node in path:
            del self._recency[node]  # not to be evicted for its own continuation
        if self._pool.contiguous:  # elsewhere sharing takes no page
            self.evict(missing)
        for number, page in enumerate(self._pool.share(row, range(len(path), complete)), start=len(path)):
            key = self._key(tokens, number, drafted)
            above = path[-1].below if path else self._roots
            node = above[key] = _Node(page, above, key)
            path.append(node)
        self._touch(path)

    def evict(self, pages: int) -> bool:
        """Let go of the least recent pages until that many are free in the pool.

        False, and nothing is let go, where all that could go would not suffice.
        """
        missing = pages - self._pool.free
        if missing <= 0:
            return True
        going = self._evictable()[:missing]
        if len(going) < missing:
            return False
        for node in going:
            del self._recency[node]
            del node.above[node.key]
            self._pool.drop(node.page)
        return True

    def _evictable(self) -> list[_Node]:
        """Pages that nobody else holds, nor any of those that stand on them; the least recent first."""
        found: list[_Node] = []
        staying: set[int] = set()  # by the dictionary they are filed in: what these stand on stays too
        for node in self._recency:
            if id(node.below) in staying or self._pool.holders(node.page) > 1:
                staying.add(id(node.above))
            else:
                found.append(node)
        return found

    def _path(self, tokens: Sequence[int], most: int, drafted: bool) -> list[_Node]:
        """The longest one: whole pages, and unless `drafted`, behind as many of them as may be, the target's alone."""
        whole = self._follow([], tokens, most, drafted=True)
        if drafted or len(whole) >= most:
            return whole
        best = whole
        for length in range(len(whole), -1, -1):
            behind = whole[length - 1].below if length else self._roots
            if self._key(tokens, length, drafted=False) in behind:
                found = self._follow(whole[:length], tokens, most, drafted=False)
                best = found if len(found) > len(best) else best  # of equal ones that with more whole pages
        return best

    def _follow(self, path: list[_Node], tokens: Sequence[int], most: int, drafted: bool) -> list[_Node]:
        """`path` and all known pages of that kind behind it."""
        while len(path) < most:
            node = (path[-1].below if path else self._roots).get(self._key(tokens, len(path), drafted))
            if node is None:
                break
            path.append(node)
        return path

    def _key(self, tokens: Sequence[int], number: int, drafted: bool) -> _Key:
        size = self._pool.page_size
        behind = self._lookahead if drafted else 0
        return drafted, tuple(tokens[number * size : (number + 1) * size + behind])

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):  # what a page stands on is always more recent than the page
            self._recency[node] = None
            self._recency.move_to_end(node)
