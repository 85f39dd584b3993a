"""Small problems for every kernel. A program, since Triton's interpreter is switched on before kernels are imported:

    python kernel_cases.py compare cpu|cuda            each kernel against its reference (cpu: TRITON_INTERPRET=1)
    python kernel_cases.py compile 90                  what `compare` would launch, compiled for sm_90; needs no GPU

Prints one JSON object: by group of cases, how many there were, and what was wrong.

What a kernel must not read (pages of nobody, positions behind a row's end, the page for padding) holds nan, and so does
every new tensor before it is written.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from row_products import row_products

from toolkit.infer.attention.metadata import paths_of
from toolkit.infer.kernels.dispatch import REFERENCE, Ops, triton_ops
from toolkit.infer.kernels.paged_reference import Pages, Scoring
from toolkit.infer.kernels.tree_reference import Candidates, ancestor_mask, root_beams
from toolkit.infer.request.draft_tree import without_padding
from toolkit.train.causal_attention import KeyRange, tiled_backward, tiled_forward
from toolkit.train.loss import ETA, ROW_LOSSES
from toolkit.train.ttt import plain_merge, plain_merge_backward

# Bytes that a block can have, on the smallest GPUs that run what is compiled for these (sm_86 and sm_89 for sm_80).
SHARED_MEMORY = {80: 101376, 90: 232448, 100: 232448}
generator = torch.Generator()
empty = torch.empty


def poisoned_empty(*shape: Any, **settings: Any) -> torch.Tensor:
    """torch.empty that holds what nobody would write."""
    return empty(*shape, **settings).fill_(
        float("nan") if settings.get("dtype", torch.float).is_floating_point else -77
    )


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def randint(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=generator)


def close(got: torch.Tensor, want: torch.Tensor, on_cpu: bool) -> None:
    """Both from the same numbers, `want` in fp32. bf16: the interpreter cuts off, a GPU rounds the weights too. fp32:
    products in tf32x3 have the error of fp32, those in tf32 about 1000 times as much."""
    assert not got.isnan().any(), "something was not written, or something was read that nobody wrote"
    exact = got.dtype == torch.float32
    atol, rtol = (2e-5, 2e-5) if exact else (1e-3, 8e-3) if on_cpu else (1e-2, 1e-2)
    worst = ((got.float() - want).abs() - rtol * want.abs()).max().item()
    assert worst <= atol, f"off by {worst:.3g}"


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """One problem: row b has held[b] positions before its new ones."""

    kv_heads: int
    groups: int
    width: int
    held: tuple[int, ...]
    new: int
    dtype: torch.dtype = torch.float32
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_width: int | None = None
    nodes: int = 0  # of the tree, of which `new` are the newest; 0: causal
    compiled: bool = False

    def scoring(self) -> Scoring:
        sinks = randn(self.kv_heads * self.groups) * 2 if self.sinks else None
        return Scoring(self.width**-0.5 * 2, self.window, self.softcap, sinks)

    def pages(self) -> Pages:
        """Pages in a random order, nan wherever no row has written."""
        size, span = self.page_size, max(self.held) + (self.nodes or self.new)
        count = -(-span // size)
        taken = torch.randperm(len(self.held) * count + 2, generator=generator) + 1
        table = taken[: len(self.held) * count].view(-1, count)
        stores = []
        for width in (self.width, self.value_width or self.width):
            store = torch.full((len(taken) + 1, size, self.kv_heads, width), float("nan"), dtype=self.dtype)
            for row, held in enumerate(self.held):
                for at in range(held + (self.nodes or self.new)):
                    store[table[row, at // size], at % size] = randn(self.kv_heads, width)
            stores.append(store.flatten(0, 1))
        return Pages(stores[0], stores[1], table, size, span)

    def queries(self) -> torch.Tensor:
        """As transformers hands them over: a view [B, Hq, N, D] of [B, N, Hq, D]."""
        heads = self.kv_heads * self.groups
        return (randn(len(self.held), self.new, heads, self.width) * 1.5).to(self.dtype).transpose(1, 2)


BF16, FP16 = torch.bfloat16, torch.float16
CAUSAL = [
    Attention(4, 1, 64, (0, 0), 7, page_size=4),  # prompts; every head its own keys
    Attention(3, 3, 64, (0, 5, 37), 1, BF16, compiled=True),  # decoding
    Attention(2, 8, 128, (0, 19), 6, BF16),  # chunks of prompts
    Attention(1, 9, 96, (3, 30), 9, page_size=8, window=5),
    Attention(1, 6, 256, (21, 40), 5, BF16, page_size=8, window=30, compiled=True),
    Attention(1, 4, 256, (600,), 3, window=400, softcap=2.0, sinks=True, compiled=True),
    Attention(2, 2, 24, (17, 0), 4, page_size=4, value_width=12, sinks=True),  # latent attention
    Attention(2, 4, 128, (1, 70), 40, BF16, page_size=32, sinks=True, compiled=True),
    Attention(1, 1, 64, (50, 0), 1, window=1, page_size=2),  # sees itself only
    Attention(1, 2, 32, (250, 700, 3), 6),  # one part, three parts and parts without keys
]
TREES = [
    Attention(4, 1, 64, (0, 5, 37), 1, nodes=1, page_size=4, compiled=True),  # decoding; one row begins with nothing
    Attention(2, 8, 128, (20,), 8, BF16, nodes=8, window=2),  # narrower than the tree is deep
    Attention(1, 9, 96, (6, 41), 16, nodes=16, softcap=2.0, page_size=8),
    Attention(1, 6, 256, (20, 3), 32, BF16, nodes=32, softcap=2.0, compiled=True),
    Attention(1, 2, 256, (23,), 11, nodes=11, window=9, softcap=3.0, sinks=True, compiled=True),
    Attention(2, 4, 128, (19,), 64, BF16, nodes=64, compiled=True),
    Attention(1, 2, 64, (5, 9), 6, BF16, nodes=70, window=4),  # the newest of more nodes than a block of keys
    Attention(2, 2, 24, (8, 17), 5, nodes=9, value_width=12, page_size=4),
    Attention(1, 3, 64, (2, 30), 128, nodes=130),
    Attention(2, 4, 128, (19, 1), 9, FP16, nodes=9),
    Attention(1, 2, 32, (700, 250, 3), 5, nodes=7),  # several parts of the committed keys
    # Trees of every size around a tile's and a block's, two ragged rows.
    *(Attention(1, 2, 16, (5, 18), n, nodes=n, page_size=4) for n in (1, 3, 16, 17, 32, 33)),
]


def random_trees(rows: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents [B, N] (-1 at the root) and depths; parents come before their children."""
    parents = torch.stack([torch.tensor([-1] + [int(randint(n, 1)) for n in range(1, nodes)]) for _ in range(rows)])
    depths = torch.zeros_like(parents)
    for node in range(1, nodes):
        depths[:, node] = depths.gather(1, parents[:, node, None])[:, 0] + 1
    return parents, depths


def attention(case: Attention) -> Callable[[Ops, Ops, str], None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        pages, q, scoring = case.pages(), case.queries(), case.scoring()
        held = torch.tensor(case.held)
        more: tuple[Any, ...] = ()
        if case.nodes:
            parents, depths = random_trees(len(case.held), case.nodes)
            mask = ancestor_mask(parents[:, 1:], case.nodes)
            more = (mask[:, -case.new :], depths)
        op = "attend_tree" if case.nodes else "attend_causal"
        clean = replace(pages, keys=pages.keys.nan_to_num().float(), values=pages.values.nan_to_num().float())
        want = getattr(reference, op)(q.float(), clean, held, *more, scoring)
        there = [x.to(device) if isinstance(x, torch.Tensor) else x for x in more]
        sinks = None if scoring.sinks is None else scoring.sinks.to(device)
        tensors = {name: getattr(pages, name).to(device) for name in ("keys", "values", "table")}
        moved = getattr(kernels, op)(
            q.to(device), replace(pages, **tensors), held.to(device), *there, scoring._replace(sinks=sinks)
        )
        assert moved.dtype == case.dtype and moved.shape == want.shape
        close(moved.cpu(), want, device == "cpu")

    return compare


IN_ORDER = [
    Attention(3, 3, 64, (0, 5, 37), 1, BF16, compiled=True),  # decoding
    Attention(1, 9, 96, (3, 30), 9, page_size=8, window=5),  # chunks of prompts
    Attention(2, 2, 24, (17, 0), 20, page_size=4, value_width=12, softcap=2.0, sinks=True),
    Attention(2, 4, 128, (70, 1), 30, BF16, page_size=32, compiled=True),
    Attention(1, 6, 256, (20, 3), 32, BF16, nodes=32, softcap=2.0, compiled=True),
    Attention(1, 2, 256, (63,), 11, nodes=11, window=9, softcap=3.0, sinks=True, compiled=True),
    Attention(1, 3, 64, (2, 62), 40, nodes=40),  # over the end of a block
]


def attention_in_order(case: Attention) -> Callable[[Ops, Ops, str], None]:
    """Equal to the reference, and each query to the bit to plain decoding of its position: one row, one query, all its
    keys committed, in other pages."""

    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        pages, q, scoring, rows = case.pages(), case.queries(), case.scoring(), len(case.held)
        held, path = torch.tensor(case.held), torch.arange(case.new).expand(rows, 1, case.new)
        counts = path[:, 0] + 1
        if case.nodes:
            mask = ancestor_mask(random_trees(rows, case.nodes)[0][:, 1:], case.nodes)[:, -case.new :]
            path, counts = paths_of(mask)
        clean = replace(pages, keys=pages.keys.nan_to_num().float(), values=pages.values.nan_to_num().float())
        want = reference.attend_paths(q.float(), clean, held, path, counts, scoring)
        sinks = None if scoring.sinks is None else scoring.sinks.to(device)

        def run(q: torch.Tensor, pages: Pages, *where: torch.Tensor) -> torch.Tensor:
            there = replace(pages, **{name: getattr(pages, name).to(device) for name in ("keys", "values", "table")})
            moved = (one.to(device) for one in where)
            return kernels.attend_paths(q.to(device), there, *moved, scoring._replace(sinks=sinks)).cpu()

        got = run(q, pages, held, path, counts)
        assert got.dtype == case.dtype and got.shape == want.shape
        close(got, want, device == "cpu")
        with row_products() if device == "cpu" else nullcontext():
            one_by_one(run, pages, q, held, path, counts)

    def one_by_one(run: Callable[..., torch.Tensor], pages: Pages, q: torch.Tensor, *where: torch.Tensor) -> None:
        (held, path, counts), got = where, run(q, pages, *where)
        size = pages.page_size
        for row, new in ((row, new) for row in range(len(held)) for new in range(case.new)):
            own = path[row, 0 if len(path[row]) == 1 else new, : counts[row, new]]
            order = torch.cat((torch.arange(int(held[row])), held[row] + own))
            places = pages.table[row, order // size] * size + order % size
            spare = -len(order) % size
            stores = [
                torch.cat((one[places], one.new_full((spare, *one.shape[1:]), float("nan"))))
                for one in (pages.keys, pages.values)
            ]
            table = torch.arange((len(order) + spare) // size)[None]
            length, none, one = torch.tensor([len(order) - 1]), torch.zeros(1, 1, 1).long(), torch.ones(1, 1).long()
            alone = run(q[row : row + 1, :, new : new + 1], Pages(*stores, table, size, len(order)), length, none, one)
            assert torch.equal(alone[0, 0], got[row, new]), f"row {row}, query {new}: other bits alone"

    return compare


def multiplying(width: int, size: int, dtype: torch.dtype, bias: bool, turned: bool) -> Callable[..., None]:
    """Equal to the reference; a row has the same bits in products of 1 to 40 rows, at any place among them."""

    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        x, weight = randn(70, width, dtype=dtype).to(device), randn(size, width, dtype=dtype).to(device) / width**0.5
        if turned:
            weight = weight.t().contiguous().t()
        added = randn(size, dtype=dtype).to(device) if bias else None
        whole = kernels.product(x, weight, added)
        want = reference.product(x.cpu().float(), weight.cpu().float(), None if added is None else added.cpu().float())
        assert whole.dtype == dtype and whole.shape == want.shape
        close(whole.cpu(), want, device == "cpu")
        with row_products() if device == "cpu" else nullcontext():
            counted(kernels, x, weight, added)

    def counted(kernels: Ops, x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None) -> None:
        whole = kernels.product(x, weight, added)
        for count in range(1, 41) if size < 1000 else (1, 33):
            some = kernels.product(x[count : 2 * count - count // 3].view(1, -1, width), weight, added)[0]
            assert torch.equal(some, whole[count : 2 * count - count // 3][: len(some)]), f"rows from {count} on"
            assert torch.equal(kernels.product(x[:count], weight, added), whole[:count]), f"{count} rows"

    return compare


# -- writing, trees, choices -------------------------------------------------------------------------------------------


def writing(rows: int, new: int, heads: int, width: int, value_width: int, dtype: torch.dtype) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        size, first = 4, 2
        starts = randint(9, rows)
        count = -(-(int(starts.max()) + first + new) // size)
        table = (torch.randperm(rows * count, generator=generator) + 1).view(rows, count)
        table[-1, count // 2 :] = 0  # padding: several to one entry that nobody reads
        keys, values = (randn(rows, heads, new, one, dtype=dtype).transpose(1, 2) for one in (width, value_width))
        found = []
        for ops, where in ((kernels, device), (reference, "cpu")):
            stores = [
                torch.full(((rows * count + 1) * size, heads, one), float("nan"), dtype=dtype, device=where)
                for one in (width, value_width)
            ]
            pages = Pages(*stores, table.to(where), size, count * size)
            ops.write_kv(pages, keys.to(where), values.to(where), starts.to(where), first)
            found.append([store.cpu() for store in stores])
        for mine, wanted in zip(*found, strict=True):
            assert torch.equal(mine[size:].nan_to_num(nan=99.0), wanted[size:].nan_to_num(nan=99.0))

    return compare


def moving(rows: int, nodes: int, layers: int, heads: int, width: int, value_width: int) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        size, lengths = 4, randint(9, rows)
        count = -(-(8 + nodes) // size)
        table = (torch.randperm(rows * count, generator=generator) + 1).view(rows, count)
        longest = min(5, nodes)
        accepted = randint(longest, rows)
        accepted[0] = longest - 1
        path = torch.zeros(rows, longest, dtype=torch.long)
        for row in range(rows):
            kept = torch.randperm(nodes - 1, generator=generator)[: accepted[row]].sort().values + 1
            path[row, 1 : 1 + len(kept)] = kept
        given = [randn(layers, (rows * count + 1) * size, heads, one) for one in (width, value_width)]
        found = []
        for ops, where in ((kernels, device), (reference, "cpu")):
            stores = [list(one.clone().to(where)) for one in given]
            ops.compact(*stores, table.to(where), size, *(one.to(where) for one in (lengths, path, accepted)))
            found.append([torch.stack(store).cpu() for store in stores])
        for mine, wanted, before in zip(*found, given, strict=True):
            assert torch.equal(mine, wanted) and not torch.equal(mine, before)

    return compare


def in_a_large_pool(kernels: Ops, _reference: Ops, device: str) -> None:
    """At the end of a pool of more than 2^31 elements: written, moved and read as at the beginning of a small one. Both
    keys and values are in it, and on a CPU only what is touched takes memory."""
    kv_heads, groups, width, size, span = 8, 2, 128, 16, 48
    new = randn(2, span, kv_heads, width, dtype=BF16).to(device)
    q = randn(2, 5, kv_heads * groups, width, dtype=BF16).transpose(1, 2).to(device)
    mask = ancestor_mask(random_trees(2, 5)[0][:, 1:], 5).to(device)
    lengths, path = torch.tensor([31, 9]).to(device), torch.tensor([[0, 1, 3], [0, 4, 0]]).to(device)
    found = []
    for pages in (8, 2**31 // (kv_heads * width * size) + 8):
        store = empty(pages * size, kv_heads, width, dtype=BF16, device=device)
        table = (torch.tensor([[5, 3, 1], [2, 6, 4]]) + pages - 8).to(device)
        there = Pages(store, store, table, size, span)
        kernels.write_kv(there, new, new, torch.zeros_like(lengths), 0)
        kernels.compact([store], [store], table, size, lengths, path, torch.tensor([2, 1]).to(device))
        found.append(kernels.attend_tree(q, there, lengths, mask, None, Scoring(0.1)).cpu())
        found.append(kernels.attend_causal(q, there, lengths, Scoring(0.1)).cpu())
    assert not found[0].isnan().any() and torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def walking(rows: int, nodes: int) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        parents, depths = random_trees(rows, nodes)
        tokens = torch.stack([sibling_numbers(one) for one in parents])
        valid = torch.arange(nodes) < torch.tensor([max(1, nodes - 3 * row) for row in range(rows)])[:, None]
        mask = without_padding(ancestor_mask(parents[:, 1:], nodes), valid)
        choices = randint(2, rows, nodes)  # the first child, or the second: long paths
        choices[0] = 99  # nothing was right
        longest = int(depths.max()) + 1
        given = (tokens, parents, depths, mask, valid, choices)
        want = reference.follow_choices(*given, longest)
        got = kernels.follow_choices(*(one.to(device) for one in given), longest)
        assert nodes < 16 or want.accepted.max() > 1, "the walk went nowhere"
        assert torch.equal(got.numbers.cpu(), want.numbers)
        at = torch.arange(nodes).expand(rows, nodes)
        chain = (tokens, at - 1, at, without_padding(ancestor_mask(at[:, :-1], nodes), valid), valid, choices)
        want = reference.follow_choices(*chain, nodes)
        for is_chain in (True, False):
            got = kernels.follow_choices(*(one.to(device) for one in chain), nodes, is_chain)
            assert torch.equal(got.numbers.cpu(), want.numbers)

    return compare


def sibling_numbers(parents: torch.Tensor) -> torch.Tensor:
    """Which child of its parent each node is: siblings differ."""
    same = (parents[:, None] == parents).tril(diagonal=-1)
    return same.sum(dim=1)


def turning(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> Callable[..., None]:
    """Queries and keys as parts of one product, cos and sin as parts of one table."""

    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        product = randn(tokens, heads + kv_heads, width, dtype=dtype)
        table = randn(tokens, 1, 2 * width, dtype=dtype)
        given = (*product.split((heads, kv_heads), dim=1), *table.chunk(2, dim=-1))
        want = reference.rotate(*(one.float() for one in given))
        moved_product, moved_table = product.to(device), table.to(device)
        got = kernels.rotate(*moved_product.split((heads, kv_heads), dim=1), *moved_table.chunk(2, dim=-1))
        for mine, wanted in zip(got, want, strict=True):
            assert mine.dtype == dtype and mine.is_contiguous()
            close(mine.cpu(), wanted, device == "cpu")

    return compare


def gating(tokens: int, width: int, dtype: torch.dtype) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        gate, up = (3 * randn(tokens, width, dtype=dtype) for _ in range(2))
        got = kernels.gated(gate.to(device), up.to(device))
        assert got.dtype == dtype
        close(got.cpu(), reference.gated(gate.float(), up.float()), device == "cpu")

    return compare


def turning_joined(rows: int, new: int, heads: tuple[int, int], width: int, how: str) -> Callable[..., None]:
    """how: "paged", "normed" (and paged), or "apart": keys and values in tensors of their own. Rows of different
    lengths; every page of another row, and the rest of the pages, stays as it was."""
    q_heads, kv_heads = heads

    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        joined, weights = randn(rows, new, (q_heads + 2 * kv_heads) * width), randn(2, width)
        cos, sin = randn(rows, new, width), randn(rows, new, width)
        norms = (*weights, 1e-6) if how == "normed" else None
        starts, found = torch.arange(rows) * 5 + 14, []
        for ops, where in ((reference, "cpu"), (kernels, device)):
            table = 1 + torch.arange(rows * 4).view(rows, 4).flip(0)
            stores = [torch.zeros(16 * (rows * 4 + 1), kv_heads, width, device=where) for _ in range(2)]
            pages = None if how == "apart" else Pages(*stores, table.to(where), 16, 64)
            given = (one.to(where) for one in (joined, cos, sin))
            on_device = None if norms is None else (*(one.to(where) for one in weights), 1e-6)
            out = ops.rotate_joined(*given, heads, on_device, pages, starts.to(where), 1)
            found.append([one.cpu() for one in out])
        for wanted, got in zip(*found, strict=True):
            close(got, wanted, device == "cpu")

    return compare


def multiplied(rows: int, inputs: int, outputs: int, what: str) -> Callable[..., None]:
    """`linear` with a bias or a residual, and `gated_linear`, which has the gate's rows first."""

    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        x, weight = randn(rows, 1, inputs), randn(outputs, inputs) / inputs**0.5
        more = {"bias": (randn(outputs), None), "residual": (None, randn(rows, 1, outputs)), "gated": ()}[what]
        name = "gated_linear" if what == "gated" else "linear"
        want = getattr(reference, name)(x, weight, *more)
        moved = [None if one is None else one.to(device) for one in (x, weight, *more)]
        close(getattr(kernels, name)(*moved).cpu(), want, device == "cpu")

    return compare


def scaled(rows: int, inputs: int, outputs: int) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        x, scales = randn(rows, inputs, dtype=BF16), randn(outputs).abs() / inputs**0.5
        levels = randn(outputs, inputs).to(torch.float8_e4m3fn)
        want = reference.scaled_product(x.float(), levels, scales)
        close(kernels.scaled_product(x.to(device), levels.to(device), scales.to(device)).cpu(), want, device == "cpu")

    return compare


def norming(rows: int, width: int, dtype: torch.dtype, offset: float, rounded: bool) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        x, weight = 2 * randn(rows, 3, width, dtype=dtype), randn(width, dtype=dtype)
        x = x[:, :2]  # rows apart
        want = reference.rms_norm(x.float(), weight.float(), 1e-6, offset, rounded)
        got = kernels.rms_norm(x.to(device), weight.to(device), 1e-6, offset, rounded)
        assert got.dtype == dtype and got.shape == x.shape
        allowed = 2.0**-6 if dtype == BF16 else 2e-5  # bf16: rounded twice, and the interpreter cuts off
        assert ((got.cpu().float() - want).abs() <= allowed * (want.abs() + 0.1)).all()

    return compare


def cutting(vocabulary: int, spread: float) -> Callable[..., None]:
    """A row for each way to cut, and rows with ties at the cut and with impossible tokens."""

    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        ways = ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (9, 0.6, 0.0), (0, 0.9999, 0.0), (0, 1.0, 0.2))
        ways += ((vocabulary, 1.0, 0.0), (vocabulary + 9, 0.5, 0.0), (3, 0.9, 0.4), (0, 0.999, 1.0), (1, 1.0, 0.0))
        if large := vocabulary > 10000:  # of many parts: ties in all of them, and the cut in another than the largest
            ways = ways[3:4]
        top_k, top_p, min_p = zip(*ways, strict=True)
        settings = torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p)
        for number in range(2 if large else 3):
            logits = randn(len(ways), vocabulary) * spread
            if number == 1:
                logits = logits.round()
            if number == 2:
                logits[:, vocabulary // 2 :] = -torch.inf
            want = reference.least_kept(logits, *settings, (vocabulary,))
            got = kernels.least_kept(logits.to(device), *(one.to(device) for one in settings), (vocabulary,)).cpu()
            mine, wanted = ((logits >= floor) & (logits > -torch.inf) for floor in (got, want))
            assert torch.equal(mine[settings[1] == 1], wanted[settings[1] == 1])
            # Sums are rounded in another order: tokens with less than that share may be kept or not.
            probs = torch.softmax(logits.double(), dim=-1)
            assert ((probs * mine).sum(dim=1) - (probs * wanted).sum(dim=1)).abs().max() < 1e-6

    return compare


def drawing(rows: int, vocabulary: int) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        """Weights of whole numbers, whose sums are exact in any order; zeros at both ends, and the least and largest
        number."""
        weights = randint(4, rows, vocabulary).float()
        weights[:, : vocabulary // 3], weights[:, vocabulary - vocabulary // 5 :] = 0, 0
        weights[0] = 0
        weights[0, vocabulary // 2] = 1
        u = torch.rand(rows, generator=generator, dtype=torch.float64)
        u[1], u[2] = 0, 1 - 2.0**-53
        wide = torch.nn.functional.pad(weights, (0, 3)).to(device)[:, :vocabulary]
        got = kernels.draw(wide, u.to(device)).cpu()
        assert torch.equal(got, reference.draw(weights, u))
        assert (weights.gather(1, got[:, None]) > 0).all()

    return compare


def numbering(rows: int, width: int) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        seeds = torch.randint(-(2**63), 2**63 - 1, (rows, 1), generator=generator)
        positions = randint(2**31, rows, width)
        positions[0, 0] = 2**40
        want = reference.uniform(seeds, positions)
        assert torch.equal(kernels.uniform(seeds.to(device), positions.to(device)).cpu(), want)
        alone = kernels.uniform(seeds[0].to(device), positions[0].to(device))
        assert torch.equal(alone.cpu(), want[0])

    return compare


def growing(k: int, steps: int, rows: int, own: bool, ties: bool) -> Callable[..., None]:
    """All levels of a tree; own: rows of other shapes than the batch's."""

    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        unread, drafted = 5, k * (steps - 1)
        to_target = randint(900, 50)
        widths = [torch.tensor([k - (row + level) % (k + 1) for row in range(rows)]) for level in range(steps)]
        steps_of = []
        for level in range(steps):
            scores = -torch.rand(rows, k if level else 1, k, generator=generator)
            scores = (scores.mul(2).round() if ties else scores).sort(dim=2, descending=True).values
            scores[0, 0, k // 2 :] = -torch.inf
            steps_of.append((scores, randint(50, *scores.shape)))
        sees = (torch.arange(unread + drafted) < 1 + randint(unread, rows)[:, None])[:, None]
        found = []
        for ops, where in ((kernels, device), (reference, "cpu")):
            made = Candidates.empty(rows, k + (steps - 1) * k * k, torch.device(where))
            beams, first, every = root_beams(sees.to(where)), 0, []
            for level, step in enumerate(steps_of):
                node = None if level + 1 == steps else unread + k * level
                given = (*(one.to(where) for one in step), to_target.to(where), made, first)
                beams = ops.grow_beams(beams, *given, widths[level].to(where) if own else None, node)
                every += [one.cpu() for one in beams]
                first += step[0][0].numel()
            found.append([*every, *(one.cpu() for one in made)])
        for number, (mine, wanted) in enumerate(zip(*found, strict=True)):
            assert torch.equal(mine, wanted), number

    return compare


def ranking(k: int, steps: int, nodes: tuple[int, ...], ties: bool) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        rows, found = len(nodes), k + (steps - 1) * k * k
        parents, levels = torch.full((rows, found), -1), torch.ones(found, dtype=torch.long)
        scores = -torch.rand(rows, found, generator=generator)
        if ties:
            scores = scores.mul(3).round()
        first, last = 0, k
        for level in range(2, steps + 1):
            for row in range(rows):
                beams = (torch.randperm(last - first, generator=generator)[:k] + first).repeat_interleave(k)
                parents[row, last : last + k * k] = beams
                scores[row, last : last + k * k] += scores[row, beams]
            levels[last : last + k * k] = level
            first, last = last, last + k * k
        scores[0, -2:] = -torch.inf
        given = (randint(900, rows), randint(900, rows, found), parents, levels, scores)
        want = reference.rank_candidates(*given, nodes, steps)
        got = kernels.rank_candidates(*(one.to(device) for one in given), nodes, steps)
        for name, mine, wanted in zip(want._fields, got, want, strict=True):
            assert torch.equal(mine.cpu(), wanted), name

    return compare


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, 2, vocabulary], rows not side by side, with many ties in and between chunks, and rows of -inf."""
    logits = randn(rows, 2, vocabulary + 1, dtype=dtype)[..., :-1]
    logits[:, 0] = logits[:, 0].round()
    logits[0, 1] = float("-inf")
    logits[-1, 1, : vocabulary // 2] = float("-inf")
    return logits


def greedy(rows: int, vocabulary: int, dtype: torch.dtype) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        logits = logits_of(rows, vocabulary, dtype)
        got = kernels.argmax(logits.to(device)).cpu()
        lowest = torch.stack([row.eq(row.max()).nonzero()[0, 0] for row in logits.flatten(0, 1)]).view(rows, 2)
        assert torch.equal(reference.argmax(logits), lowest) and torch.equal(got, lowest)
        assert kernels.argmax(torch.zeros(0, 3, 5, device=device)).shape == (0, 3)

    return compare


def top(rows: int, vocabulary: int, k: int, dtype: torch.dtype) -> Callable[..., None]:
    def compare(kernels: Ops, reference: Ops, device: str) -> None:
        logits = logits_of(rows, vocabulary, dtype)
        got, ids = (one.cpu() for one in kernels.top_log_probs(logits.to(device), k))
        want, _ = reference.top_log_probs(logits, k)
        assert torch.allclose(got, want, atol=2e-5) and (got <= 0).all()
        lowest = logits.float().sort(dim=-1, descending=True, stable=True).indices[..., :k]
        assert torch.equal(ids, lowest), "not the lowest ids of equals"
        none = kernels.top_log_probs(torch.zeros(0, 3, vocabulary, device=device), k)
        assert none[0].shape == none[1].shape == (0, 3, k)

    return compare


def scoring(name: str, rows: int, vocabulary: int, dtype: torch.dtype) -> Callable[..., None]:
    """The draft loss of training; its reference is the row losses of toolkit/train/loss.py."""

    def compare(_kernels: Ops, _reference: Ops, device: str) -> None:
        scores = (3 * randn(rows, vocabulary + 3, dtype=dtype) + 20)[:, :vocabulary]
        scores[0, vocabulary // 2 :] = scores[0].max()  # a tie, in and between blocks
        probs = (2 * randn(3, vocabulary)).softmax(-1)
        probs[1, ::2] = 0
        probs[1] /= probs[1].sum()
        offsets, choice, weight = randint(3, rows), randint(vocabulary, rows), torch.rand(rows, generator=generator)
        choice[-1], weight[-1] = -1, 0  # the teacher's token is not in the draft vocabulary
        z = scores.float()
        best = torch.stack([row.eq(row.max()).nonzero()[0, 0] for row in z])
        z = z - z.max(-1, keepdim=True).values
        losses = ROW_LOSSES[name](z, probs[offsets], choice, weight)
        from toolkit.train.triton_loss import score_rows

        on_device = [x.to(device) for x in (scores, probs, offsets, choice, weight)]
        got_losses, got_best = score_rows(name, *on_device, ETA)
        close(got_losses[:-1].cpu(), losses[:-1], device == "cpu")
        close(on_device[0].cpu(), z, device == "cpu")
        assert torch.equal(got_best.cpu(), best)

    return compare


@dataclass(frozen=True)
class Training:
    """The attention of a later step of training-time test, over the first one's keys."""

    batch: int
    kv_heads: int
    groups: int
    width: int
    length: int
    dtype: torch.dtype = torch.float32
    window: int | None = None
    starts: tuple[int, ...] = ()  # where documents begin in a row
    anchors: int = 0
    compiled: bool = False

    def reach(self) -> KeyRange | None:
        if self.window is None and not self.starts and not self.anchors:
            return None
        last = torch.arange(self.length).expand(self.batch, -1)
        if self.anchors:
            drawn = [torch.randperm(self.length, generator=generator)[: self.anchors] for _ in range(self.batch)]
            last = torch.stack(drawn).sort(dim=1).values
        begins = torch.zeros(self.batch, self.length, dtype=torch.long)
        for row in range(self.batch):
            moved = [(start + 3 * row) % self.length for start in self.starts]  # rows have borders of their own
            begins[row, moved] = torch.tensor(moved, dtype=torch.long)
        first = begins.cummax(1).values.gather(1, last)
        return KeyRange(first if self.window is None else first.maximum(last + 2 - self.window), last)


def unrolled(case: Training) -> Callable[[Ops, Ops, str], None]:
    """Attention of training; its reference is `tiled_forward` and `tiled_backward` of the same numbers in fp32."""

    def compare(_kernels: Ops, _reference: Ops, device: str) -> None:
        reach, heads = case.reach(), case.kv_heads * case.groups
        queries = case.length if reach is None else reach.last.shape[1]

        def tensor(count: int, length: int) -> torch.Tensor:
            return (randn(case.batch, length, count, case.width) * 1.5).to(case.dtype).transpose(1, 2)

        q, grad = tensor(heads, queries), tensor(heads, queries)
        k, v = tensor(case.kv_heads, case.length), tensor(case.kv_heads, case.length)
        exact = [x.float() for x in (q, k, v)]
        out, lse = tiled_forward(*exact, reach)
        # As where each query has further keys: a part of the softmax is theirs.
        merged = lse + torch.rand(lse.shape, generator=generator)
        given = out.to(case.dtype)
        wanted = tiled_backward(grad.float(), *exact, given.float(), merged, reach)
        from toolkit.train.triton_attention import attend, attend_backward

        there = None if reach is None else KeyRange(reach.first.to(device), reach.last.to(device))
        moved = [x.to(device) for x in (q, k, v)]
        got = attend(*moved, there)
        found = attend_backward(grad.to(device), *moved, given.to(device), merged.to(device), there)
        assert got[0].dtype == case.dtype and got[1].dtype == torch.float32
        assert [x.dtype for x in found] == [torch.float32, case.dtype, case.dtype]
        # lse and the queries' gradient are fp32 of products in the case's dtype.
        close(got[0].cpu(), out, device == "cpu")
        close(got[1].to(case.dtype).cpu(), lse, device == "cpu")
        for mine, theirs in zip(found, wanted, strict=True):
            close((mine.cpu() / theirs.abs().max()).to(case.dtype), theirs / theirs.abs().max(), device == "cpu")

    return compare


def diagonals(case: Training, count: int) -> Callable[[Ops, Ops, str], None]:
    """The own keys of each query; the reference is `plain_merge` and `plain_merge_backward` of the same in fp32."""

    def compare(_kernels: Ops, _reference: Ops, device: str) -> None:
        def tensor(heads: int) -> torch.Tensor:
            return (randn(case.batch, case.length, heads, case.width) * 1.5).to(case.dtype).transpose(1, 2)

        q, out, grad = (tensor(case.kv_heads * case.groups) for _ in range(3))
        keys, values = ([tensor(case.kv_heads) for _ in range(count)] for _ in range(2))
        lse, dq = randn(*q.shape[:3]), randn(*q.shape)
        exact = [[one.float() for one in each] for each in (keys, values)]
        wanted = plain_merge(q.float(), out.float(), lse, *exact)
        given = wanted[0].to(case.dtype)
        grads = plain_merge_backward(grad.float(), q.float(), *exact, given.float(), wanted[1], dq.clone())
        from toolkit.train.triton_attention import merge, merge_backward

        own = [[one.to(device) for one in each] for each in (keys, values)]
        q, out, grad, lse, dq = (one.to(device) for one in (q, out, grad, lse, dq))
        found = merge(q, out, lse, *own)
        behind = merge_backward(grad, q, *own, given.to(device), wanted[1].to(device), dq)
        close(behind[0].to(case.dtype).cpu(), grads[0], device == "cpu")
        for mine, theirs in zip((*behind[1], *behind[2]), (*grads[1], *grads[2]), strict=True):
            assert mine.dtype == case.dtype and mine.shape == theirs.shape
            close((mine.cpu() / theirs.abs().max()).to(case.dtype), theirs / theirs.abs().max(), device == "cpu")
        close(found[0].cpu(), wanted[0], device == "cpu")
        close(found[1].cpu(), wanted[1], device == "cpu")

    return compare


FP32 = torch.float32
DIAGONALS = (
    (Training(2, 1, 3, 24, 9), 1),
    (Training(1, 2, 4, 128, 70, BF16, compiled=True), 6),
    (Training(2, 3, 1, 64, 40, compiled=True), 2),
)
UNROLLED = (
    Training(2, 1, 3, 16, 9),
    Training(1, 2, 4, 128, 150, BF16, compiled=True),
    Training(1, 3, 1, 64, 200, compiled=True),
    Training(2, 1, 2, 24, 40, starts=(0, 7, 33)),
    Training(1, 3, 3, 64, 170, BF16, window=20, starts=(0, 100, 101), compiled=True),
    Training(2, 2, 2, 64, 150, BF16, anchors=33),
    Training(2, 1, 2, 16, 300, starts=(0, 40, 200), anchors=170),  # more queries than a tile has
    Training(2, 1, 2, 96, 140, starts=(0, 50), window=70, anchors=20, compiled=True),
    Training(1, 1, 4, 256, 70, BF16, starts=(0, 64), compiled=True),
)
WRITES = (
    (2, 3, 2, 24, 12, FP32), (3, 5, 3, 64, 64, BF16), (1, 1, 9, 128, 256, FP32), (2, 64, 1, 64, 64, FP32),
)  # fmt: skip
MOVES = ((1, 9, 3, 2, 16, 16), (3, 32, 2, 3, 24, 12), (2, 64, 4, 9, 128, 128))
WALKS = ((2, 1), (3, 2), (6, 16), (9, 64), (3, 70))
TURNS = ((1, 32, 8, 128, BF16), (5, 3, 3, 64, FP32), (7, 4, 1, 24, FP32), (2, 6, 2, 96, BF16))
GATES = ((1, 14336, BF16), (5, 100, FP32), (3, 1024, BF16))
NORMS = (
    (2, 4096, BF16, 0.0, True), (3, 100, FP32, 0.0, True), (2, 128, BF16, 1.0, False), (1, 64, FP32, 0.0, False),
)  # fmt: skip
JOINED_TURNS = ((2, 3, (4, 2), 16, "paged"), (1, 2, (3, 1), 24, "normed"), (2, 1, (2, 2), 64, "apart"))
LINEARS = ((3, 40, 24, "bias"), (3, 40, 24, "residual"), (5, 24, 48, "gated"))
CUTS = ((40, 1.0), (1500, 0.3), (3000, 3.0), (128256, 2.0))
DRAWN = ((3, 7), (40, 3000), (5, 1024), (4, 128256))
NUMBERS = ((1, 1), (3, 70), (200, 2))
PRODUCTS = (
    (100, 50, BF16, False, True), (64, 48, FP32, False, False), (96, 80, BF16, True, False),
    (32, 8320, FP16, False, False),
)  # fmt: skip
GROWN = ((8, 7, 2, False, False), (3, 4, 3, True, False), (2, 2, 1, False, True), (10, 3, 2, True, True))
RANKINGS = (
    (1, 3, (4, 4), False), (2, 4, (14, 1, 9), True), (8, 4, (32, 20), False), (4, 5, (63, 63), True),
    (8, 7, (64, 64), True), (8, 3, (64, 2), False),
)  # fmt: skip
ROWS_OF_LOGITS = ((1, 7, FP32), (3, 4096, BF16), (5, 9001, FP32), (2, 4097, BF16), (1, 128256, BF16))
TOPS = ((1, 7, 7, FP32), (3, 4097, 4, BF16), (2, 9001, 10, BF16), (2, 4096, 1, FP32), (1, 128256, 8, BF16))
GROUPS: dict[str, list[tuple[str, Callable[[Ops, Ops, str], None], bool]]] = {
    "write_kv": [(str(case), writing(*case), case[2] == 3) for case in WRITES],
    "compact": [(str(case), moving(*case), case[1] in (9, 32)) for case in MOVES],
    "attend_causal": [(str(case), attention(case), case.compiled) for case in CAUSAL],
    "attend_tree": [(str(case), attention(case), case.compiled) for case in TREES],
    "attend_paths": [(str(case), attention_in_order(case), case.compiled) for case in IN_ORDER],
    "product": [(str(case), multiplying(*case), case[0] < 100) for case in PRODUCTS],
    "follow_choices": [(str(case), walking(*case), case[1] == 64) for case in WALKS],
    "rotate": [(str(case), turning(*case), case[3] in (128, 24)) for case in TURNS],
    "gated": [(str(case), gating(*case), case[1] == 14336) for case in GATES],
    "rms_norm": [(str(case), norming(*case), case[1] in (4096, 128)) for case in NORMS],
    "rotate_joined": [(str(case), turning_joined(*case), True) for case in JOINED_TURNS],
    "linear": [(str(case), multiplied(*case), False) for case in LINEARS if case[3] != "gated"],
    "gated_linear": [(str(case), multiplied(*case), False) for case in LINEARS if case[3] == "gated"],
    "scaled_product": [(str(case), scaled(*case), case[0] == 3) for case in ((3, 64, 96), (20, 32, 40))],
    "least_kept": [(str(case), cutting(*case), case[0] == 128256) for case in CUTS],
    "draw": [(str(case), drawing(*case), case[1] == 128256) for case in DRAWN],
    "uniform": [(str(case), numbering(*case), case[0] == 3) for case in NUMBERS],
    "grow_beams": [(str(case), growing(*case), case[0] in (8, 3)) for case in GROWN],
    "rank_candidates": [(str(case), ranking(*case), case[0] == 8) for case in RANKINGS],
    "argmax": [(str(case), greedy(*case), case[1] in (9001, 128256)) for case in ROWS_OF_LOGITS],
    "top_log_probs": [(str(case), top(*case), case[1] in (4096, 9001, 128256)) for case in TOPS],
    "large_pool": [("more than 2^31 elements", in_a_large_pool, False)],
    "unrolled": [(str(case), unrolled(case), case.compiled) for case in UNROLLED],
    "diagonals": [(str(case), diagonals(case, count), case.compiled) for case, count in DIAGONALS],
    "score_rows": [
        (f"{name} {case}", scoring(name, *case), case[1] == 9001)
        for name in ROW_LOSSES
        for case in ((4, 7, FP32), (5, 9001, BF16), (3, 4096, FP32))
    ],
}


def compare(device: str, kernels: Ops) -> Iterator[tuple[str, int, str | None]]:
    torch.empty = poisoned_empty
    for group, cases in GROUPS.items():
        for number, (name, case, _) in enumerate(cases):
            generator.manual_seed(number)
            try:
                case(kernels, REFERENCE, device)
            except Exception:
                yield group, number, f"{name}\n{traceback.format_exc()}"
                break
        else:
            yield group, len(cases), None


def multiply_as_a_gpu() -> None:
    """Triton's interpreter multiplies fp32 in fp32, whatever `input_precision` is. From now on it does as tensor cores:
    factors rounded to tf32, or with tf32x3 each factor as the sum of two such numbers."""
    from triton.runtime.interpreter import InterpreterBuilder

    plainly = InterpreterBuilder.create_dot

    def rounded(x: Any) -> Any:
        return ((x.view("int32") + 0x1000) & ~0x1FFF).view("float32")

    def create_dot(builder: Any, a: Any, b: Any, sums: Any, precision: Any, most_imprecise: int) -> Any:
        def product(left: Any, right: Any, onto: Any) -> Any:
            return plainly(builder, replace_data(a, left), replace_data(b, right), onto, precision, most_imprecise)

        name = str(precision).rsplit(".", 1)[-1].upper()
        if name == "IEEE" or a.data.dtype != "float32":
            return plainly(builder, a, b, sums, precision, most_imprecise)
        left, right = rounded(a.data), rounded(b.data)
        if name == "TF32X3":
            sums = product(rounded(a.data - left), right, product(left, rounded(b.data - right), sums))
        return product(left, right, sums)

    InterpreterBuilder.create_dot = create_dot


def replace_data(handle: Any, data: Any) -> Any:
    return type(handle)(data, handle.dtype)


def compile_for(capability: int) -> Iterator[tuple[str, int, str | None]]:
    """Launches are caught with their arguments, and compiled as the launch would have them."""
    from compiled import Launch, catch_launches, compile_variant, variant

    launches: list[Launch] = []
    catch_launches(launches)
    kernels = triton_ops()
    for group, cases in GROUPS.items():
        launches.clear()
        for name, case, compiled in cases:
            if compiled:
                try:
                    case(kernels, REFERENCE, "cpu")
                except Exception:  # its numbers are wrong: nothing ran
                    assert launches, f"{name}\n{traceback.format_exc()}"
        variants = {one.key(): one for one in (variant(launch, capability) for launch in launches)}
        for number, (key, one) in enumerate(variants.items()):
            try:
                made = compile_variant(one, capability)
                assert made.shared <= SHARED_MEMORY[capability], f"{made.shared} bytes of shared memory"
            except Exception:
                yield group, number, f"{key}\n{traceback.format_exc()}"
                break
        else:
            yield group, len(variants), None


if __name__ == "__main__":
    what, where = sys.argv[1:]
    if what == "compile":
        outcomes = compile_for(int(where))
    else:
        from toolkit.infer.kernels.triton import paged_attention as triton_paged_attention

        triton_paged_attention.PART_KEYS = 16  # several parts of few keys
        if where == "cpu":
            multiply_as_a_gpu()
        outcomes = compare(where, triton_ops())
    print(json.dumps({group: {"count": count, "wrong": wrong} for group, count, wrong in outcomes}))
