"""Small problems for every kernel. A program, since Triton's interpreter is switched on before kernels are imported:

    python -m tests.infer.kernels.kernel_cases cpu|cuda [group ..]

runs each kernel, or those of these groups, against its reference (cpu: with TRITON_INTERPRET=1). Prints one JSON
object: by group of cases, how many there were, and what was wrong.

What a kernel must not read (pages of nobody, positions behind a row's end, the page for padding) holds nan, and so does
every new tensor before it is written.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.infer.kernels.row_products import row_products
from tests.pretend_cuda.containers import mapped, tensors_in
from toolkit.infer.attention.metadata import paths_of
from toolkit.infer.kernels.dispatch import REFERENCE, Ops, triton_ops
from toolkit.infer.kernels.paged_reference import Pages, Scoring
from toolkit.infer.kernels.tree_reference import Beams, Candidates, ancestor_mask, root_beams
from toolkit.infer.kernels.triton import paged_attention
from toolkit.infer.kernels.triton.launch import depends
from toolkit.infer.kernels.triton.skinny_product import Tile, skinny_product
from toolkit.infer.request.draft_tree import without_padding
from toolkit.train import triton_attention, triton_loss
from toolkit.train.causal_attention import KeyRange, tiled_backward, tiled_forward
from toolkit.train.loss import ETA, ROW_LOSSES
from toolkit.train.ttt import plain_merge, plain_merge_backward

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
generator = torch.Generator()
empty = torch.empty


def poisoned_empty(*shape: Any, **settings: Any) -> Tensor:
    """torch.empty that holds what nobody would write."""
    return empty(*shape, **settings).fill_(
        float("nan") if settings.get("dtype", torch.float).is_floating_point else -77
    )


def randn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def randint(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator)


def copied(tensor: Tensor, device: str) -> Tensor:
    """A copy of the same strides: a part of another tensor stays one."""
    base = tensor if tensor._base is None else tensor._base
    made = base.to(device, copy=True)
    return made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def exact(value: Any) -> Any:
    """Numbers of fp32, as references take them, without nan."""
    if isinstance(value, Tensor) and value.dtype in (BF16, FP16, FP32):
        return value.float().nan_to_num(0.0, inf, -inf)
    return value


@dataclass(frozen=True)
class Kernels:
    """The kernels on a device, beside references on the host."""

    ops: Ops
    device: str

    def there(self, value: Any) -> Any:
        """Containers with copies of their tensors on the device."""
        return mapped(value, lambda one: copied(one, self.device) if isinstance(one, Tensor) else one)

    def launch(self, kernel: Callable[..., Any], *given: Any) -> Any:
        """What a kernel gives for copies of arguments: what it returns, else its arguments, as it left them."""
        moved = self.there(list(given))
        made = kernel(*moved)
        return mapped(moved if made is None else made, lambda one: one.cpu() if isinstance(one, Tensor) else one)

    def both(self, op: str, *given: Any) -> tuple[Any, Any]:
        """(the kernel's result, the reference's from fp32 numbers)."""
        return self.launched(getattr(self.ops, op), getattr(REFERENCE, op), *given)

    def launched(self, kernel: Callable[..., Any], reference: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
        return self.launch(kernel, *given), reference(*mapped(list(given), exact))

    def same(self, op: str, *given: Any) -> Any:
        """Launch a kernel whose result, or what it writes to its arguments, equals the reference's to the bit."""
        kept = mapped(list(given), lambda one: one.clone() if isinstance(one, Tensor) else one)
        made, got = getattr(REFERENCE, op)(*kept), self.launch(getattr(self.ops, op), *given)
        want = kept if made is None else made
        for number, (mine, theirs) in enumerate(zip(tensors_in(got), tensors_in(want), strict=True)):
            assert torch.equal(mine, theirs), f"result {number} of {op} differs"
        return want

    def close(self, got: Any, want: Any, dtype: torch.dtype = FP32, *, scaled: bool = False) -> None:
        """Results of `dtype` near fp32 numbers; scaled: relative to the largest number. bf16: the interpreter cuts off,
        a GPU rounds the weights too. fp32: products in tf32x3 have the error of fp32, in tf32 about 1000 times that."""
        atol, rtol = (2e-5, 2e-5) if dtype == FP32 else (1e-3, 8e-3) if self.device == "cpu" else (1e-2, 1e-2)
        for mine, theirs in zip(tensors_in(got), tensors_in(want), strict=True):
            assert mine.dtype == dtype and mine.shape == theirs.shape
            assert not mine.isnan().any(), "something was not written, or something was read that nobody wrote"
            scale = theirs.abs().max() if scaled else 1
            off = (mine.float() - theirs).abs() / scale - rtol * theirs.abs() / scale
            assert off.max().item() <= atol, f"off by {off.max().item():.3g}"


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
    counts: tuple[int, ...] = ()  # new positions by row, which stand one after another; empty: `new` in each
    processors: int = 132  # so few that one part is enough

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
                for at in range(held + (self.counts[row] if self.counts else self.nodes or self.new)):
                    store[table[row, at // size], at % size] = randn(self.kv_heads, width)
            stores.append(store.flatten(0, 1))
        return Pages(stores[0], stores[1], table, size, span)

    def queries(self) -> Tensor:
        """As transformers hands them over: a view [B, Hq, N, D] of [B, N, Hq, D]."""
        heads, size = self.kv_heads * self.groups, (len(self.held), self.new)
        size = (1, sum(self.counts)) if self.counts else size
        return (randn(*size, heads, self.width) * 1.5).to(self.dtype).transpose(1, 2)


def random_trees(rows: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Parents [B, N] (-1 at the root) and depths; parents come before their children."""
    parents = torch.stack([torch.tensor([-1] + [int(randint(n, 1)) for n in range(1, nodes)]) for _ in range(rows)])
    depths = torch.zeros_like(parents)
    for node in range(1, nodes):
        depths[:, node] = depths.gather(1, parents[:, node, None])[:, 0] + 1
    return parents, depths


def attention(on: Kernels, *given: Any) -> None:
    case = Attention(*given[:-1], **given[-1])
    pages, q, scoring, held = case.pages(), case.queries(), case.scoring(), torch.tensor(case.held)
    if case.nodes:
        parents, depths = random_trees(len(held), case.nodes)
        mask = ancestor_mask(parents[:, 1:], case.nodes)[:, -case.new :]
        got, want = on.both("attend_tree", q, pages, held, mask, depths, scoring)
    else:
        begins = torch.tensor([0, *accumulate(case.counts)]) if case.counts else None
        with few_processors(case.processors) if case.processors < 132 else nullcontext():
            got, want = on.both("attend_causal", q, pages, held, scoring, begins, case.new)
    on.close(got, want, case.dtype)


@contextmanager
def few_processors(count: int) -> Iterator[None]:
    """Of a GPU so small that no keys are split: nothing may be merged."""
    before = paged_attention._processors, paged_attention.merge_parts
    paged_attention._processors, paged_attention.merge_parts = (lambda _device: count), None
    try:
        yield
    finally:
        paged_attention._processors, paged_attention.merge_parts = before


def attention_in_order(on: Kernels, *given: Any) -> None:
    """Equal to the reference, and each query to the bit to plain decoding of its position: one row, one query, all its
    keys committed, in other pages."""
    case = Attention(*given[:-1], **given[-1])
    pages, q, scoring, rows = case.pages(), case.queries(), case.scoring(), len(case.held)
    held, path = torch.tensor(case.held), torch.arange(case.new).expand(rows, 1, case.new)
    counts = path[:, 0] + 1
    if case.nodes:
        mask = ancestor_mask(random_trees(rows, case.nodes)[0][:, 1:], case.nodes)[:, -case.new :]
        path, counts = paths_of(mask)
    got, want = on.both("attend_paths", q, pages, held, path, counts, scoring)
    on.close(got, want, case.dtype)
    with row_products() if on.device == "cpu" else nullcontext():
        got = on.launch(on.ops.attend_paths, q, pages, held, path, counts, scoring)
        for row, new in ((row, new) for row in range(rows) for new in range(case.new)):
            own = path[row, 0 if len(path[row]) == 1 else new, : counts[row, new]]
            order = torch.cat((torch.arange(int(held[row])), held[row] + own))
            committed, none, one = torch.tensor([len(order) - 1]), torch.zeros(1, 1, 1).long(), torch.ones(1, 1).long()
            query = q[row : row + 1, :, new : new + 1]
            alone = on.launch(on.ops.attend_paths, query, in_pages(pages, row, order), committed, none, one, scoring)
            assert torch.equal(alone[0, 0], got[row, new]), f"row {row}, query {new}: other bits alone"


def in_pages(pages: Pages, row: int, order: Tensor) -> Pages:
    """Pages of one row that has the keys of these positions of `row`, one after another."""
    size = pages.page_size
    places, spare = pages.table[row, order // size] * size + order % size, -len(order) % size
    keys, values = (
        torch.cat((one[places], one.new_full((spare, *one.shape[1:]), float("nan"))))
        for one in (pages.keys, pages.values)
    )
    return Pages(keys, values, torch.arange((len(order) + spare) // size)[None], size, len(order))


def multiplying(on: Kernels, width: int, size: int, dtype: torch.dtype, bias: bool, turned: bool) -> None:
    """Equal to the reference; a row has the same bits in products of 1 to 40 rows, at any place among them."""
    x, weight = randn(70, width, dtype=dtype), randn(size, width, dtype=dtype) / width**0.5
    if turned:
        weight = weight.t().contiguous().t()
    added = randn(size, dtype=dtype) if bias else None
    on.close(*on.both("product", x, weight, added), dtype)
    with row_products() if on.device == "cpu" else nullcontext():
        x, weight, added = on.there((x, weight, added))
        whole = on.ops.product(x, weight, added)
        for count in range(1, 41) if size < 1000 else (1, 33):
            some = on.ops.product(x[count : 2 * count - count // 3].view(1, -1, width), weight, added)[0]
            assert torch.equal(some, whole[count : 2 * count - count // 3][: len(some)]), f"rows from {count} on"
            assert torch.equal(on.ops.product(x[:count], weight, added), whole[:count]), f"{count} rows"


# -- writing, trees, choices -------------------------------------------------------------------------------------------


def writing(on: Kernels, rows: int, new: int, heads: int, width: int, value_width: int, dtype: torch.dtype) -> None:
    size, first, starts = 4, 2, randint(9, rows)
    count = -(-(int(starts.max()) + first + new) // size)
    table = (torch.randperm(rows * count, generator=generator) + 1).view(rows, count)
    table[-1, count // 2 :] = 0  # padding: several to one entry that nobody reads
    keys, values = (randn(rows, heads, new, one, dtype=dtype).transpose(1, 2) for one in (width, value_width))
    stores = [torch.full(((rows * count + 1) * size, heads, one), 77.0, dtype=dtype) for one in (width, value_width)]
    given = (Pages(*stores, table, size, count * size), keys, values, starts, first)
    (mine, *_), _ = on.launch(on.ops.write_kv, *given), REFERENCE.write_kv(*given)
    assert torch.equal(mine.keys[size:], stores[0][size:]) and torch.equal(mine.values[size:], stores[1][size:])


def moving(on: Kernels, rows: int, nodes: int, layers: int, heads: int, width: int, value_width: int) -> None:
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

    before, rest = [one.clone() for one in given], (table, size, lengths, path, accepted)
    found = on.launch(lambda keys, values, *more: on.ops.compact(list(keys), list(values), *more), *given, *rest)
    REFERENCE.compact(list(given[0]), list(given[1]), *rest)
    for mine, wanted, old in zip(found[:2], given, before, strict=True):
        assert torch.equal(mine, wanted) and not torch.equal(mine, old)


def in_a_large_pool(on: Kernels) -> None:
    """At the end of a pool of more than 2^31 elements: written, moved and read as at the beginning of a small one. Both
    keys and values are in it, and on a CPU only what is touched takes memory."""
    kv_heads, groups, width, size, span = 8, 2, 128, 16, 48
    new = on.there(randn(2, span, kv_heads, width, dtype=BF16))
    q = on.there(randn(2, 5, kv_heads * groups, width, dtype=BF16)).transpose(1, 2)
    mask = on.there(ancestor_mask(random_trees(2, 5)[0][:, 1:], 5))
    lengths, path, moved = on.there((torch.tensor([31, 9]), torch.tensor([[0, 1, 3], [0, 4, 0]]), torch.tensor([2, 1])))
    found = []
    for pages in (8, 2**31 // (kv_heads * width * size) + 8):
        store = empty(pages * size, kv_heads, width, dtype=BF16, device=on.device)
        table = on.there(torch.tensor([[5, 3, 1], [2, 6, 4]]) + pages - 8)
        there = Pages(store, store, table, size, span)
        on.ops.write_kv(there, new, new, torch.zeros_like(lengths), 0)
        on.ops.compact([store], [store], table, size, lengths, path, moved)
        found.append(on.ops.attend_tree(q, there, lengths, mask, None, Scoring(0.1)).cpu())
        found.append(on.ops.attend_causal(q, there, lengths, Scoring(0.1)).cpu())
    assert not found[0].isnan().any() and torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def walking(on: Kernels, rows: int, nodes: int) -> None:
    parents, depths = random_trees(rows, nodes)
    same = (parents[:, :, None] == parents[:, None]).tril(diagonal=-1)
    tokens = same.sum(dim=2)  # which child of its parent each node is: siblings differ
    valid = torch.arange(nodes) < torch.tensor([max(1, nodes - 3 * row) for row in range(rows)])[:, None]
    mask = without_padding(ancestor_mask(parents[:, 1:], nodes), valid)
    choices = randint(2, rows, nodes)  # the first child, or the second: long paths
    choices[0] = 99  # nothing was right
    want = on.same("follow_choices", tokens, parents, depths, mask, valid, choices, int(depths.max()) + 1)
    assert nodes < 16 or want.accepted.max() > 1, "the walk went nowhere"
    at = torch.arange(nodes).expand(rows, nodes)
    chain = (tokens, at - 1, at, without_padding(ancestor_mask(at[:, :-1], nodes), valid), valid, choices, nodes)
    want = on.same("follow_choices", *chain)
    assert torch.equal(on.launch(on.ops.follow_choices, *chain, True).numbers, want.numbers)


def turning(on: Kernels, tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    """Queries and keys as parts of one product, cos and sin as parts of one table."""
    product, table = randn(tokens, heads + kv_heads, width, dtype=dtype), randn(tokens, 1, 2 * width, dtype=dtype)
    got, want = on.both("rotate", *product.split((heads, kv_heads), dim=1), *table.chunk(2, dim=-1))
    assert all(one.is_contiguous() for one in got)
    on.close(got, want, dtype)


def gating(on: Kernels, tokens: int, width: int, dtype: torch.dtype) -> None:
    on.close(*on.both("gated", *(3 * randn(tokens, width, dtype=dtype) for _ in range(2))), dtype)


def turning_joined(on: Kernels, rows: int, new: int, heads: tuple[int, int], width: int, how: str) -> None:
    """how: "paged", "normed" (and paged), or "apart": keys and values in tensors of their own. Rows of different
    lengths; every page of another row, and the rest of the pages, stays as it was."""
    joined, cos, sin = (randn(rows, new, wide) for wide in ((heads[0] + 2 * heads[1]) * width, width, width))
    norms = (randn(width), randn(width), 1e-6) if how == "normed" else None
    table = 1 + torch.arange(rows * 4).view(rows, 4).flip(0)
    stores = [torch.zeros(16 * (rows * 4 + 1), heads[1], width) for _ in range(2)]
    pages = None if how == "apart" else Pages(*stores, table, 16, 64)
    on.close(*on.both("rotate_joined", joined, cos, sin, heads, norms, pages, torch.arange(rows) * 5 + 14, 1))


def multiplied(on: Kernels, rows: int, inputs: int, outputs: int, what: str) -> None:
    """`linear` with a bias or a residual, and `gated_linear`, which has the gate's rows first."""
    more = {"bias": (randn(outputs), None), "residual": (None, randn(rows, 1, outputs)), "gated": ()}[what]
    op = "gated_linear" if what == "gated" else "linear"
    on.close(*on.both(op, randn(rows, 1, inputs), randn(outputs, inputs) / inputs**0.5, *more))


def scaled(on: Kernels, rows: int, inputs: int, outputs: int) -> None:
    levels, scales = randn(outputs, inputs).to(torch.float8_e4m3fn), randn(outputs).abs() / inputs**0.5
    on.close(*on.both("scaled_product", randn(rows, inputs, dtype=BF16), levels, scales), BF16)


def skinny(on: Kernels, size: int, width: int, rows: int, tile: tuple[int, ...] | None, what: str) -> None:
    """Rounded as `F.linear` and what follows it; a row has the same bits alone, and again. what: "residual", "gated",
    "fp8", or none of them. tile: outputs, inputs, parts; None: the shape's own."""
    x, weight, scales = randn(rows, width, dtype=BF16), randn(size, width) * width**-0.5, None
    residual = randn(rows, size, dtype=BF16) if what == "residual" else None
    if "fp8" in what:
        scales = weight.abs().amax(1) / 448
        weight = (weight / scales[:, None]).to(torch.float8_e4m3fn)
    else:
        weight = weight.to(BF16)
    x, weight, residual, scales = on.there((x, weight, residual, scales))
    named = {"gated": "gated" in what, "pdl": depends(x), "tile": None if tile is None else Tile(*tile)}

    def own(first: int, end: int) -> Tensor:
        part = None if residual is None else residual[first:end]
        return skinny_product(x[first:end], weight, residual=part, scales=scales, **named)

    to_bf16 = truncated if on.device == "cpu" else Tensor.bfloat16
    wanted = to_bf16(linear(x.float(), weight.float() if scales is None else weight.float() * scales[:, None]))
    if "gated" in what:
        gate, up = wanted.float().chunk(2, -1)
        wanted = to_bf16(to_bf16(gate / (1 + torch.exp(-gate))).float() * up)
    if residual is not None:
        wanted = to_bf16(wanted.float() + residual.float())
    got = own(0, rows)
    # Sums in another order round to another number now and then.
    assert (got.float() - wanted.float()).abs().max() < 0.01 * wanted.float().abs().max()
    assert (got != wanted).float().mean() < 0.03
    assert torch.equal(got, own(0, rows)), "a second launch differs"
    alone = torch.cat([own(row, row + 1) for row in range(min(3, rows))])
    assert rows > 16 or torch.equal(got[:3], alone), "a row has other bits alone"


def truncated(x: Tensor) -> Tensor:
    """fp32 as Triton's interpreter converts it to bfloat16."""
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def norming(on: Kernels, rows: int, width: int, dtype: torch.dtype, offset: float, rounded: bool) -> None:
    x, weight = 2 * randn(rows, 3, width, dtype=dtype), randn(width, dtype=dtype)
    got, want = on.both("rms_norm", x[:, :2], weight, 1e-6, offset, rounded)  # rows apart
    assert got.dtype == dtype and got.shape == want.shape
    allowed = 2.0**-6 if dtype == BF16 else 2e-5  # bf16: rounded twice, and the interpreter cuts off
    assert ((got.float() - want).abs() <= allowed * (want.abs() + 0.1)).all()


def cutting(on: Kernels, vocabulary: int, spread: float) -> None:
    """A row for each way to cut, and rows with ties at the cut and with impossible tokens."""
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
            logits[:, vocabulary // 2 :] = -inf
        floors = on.both("least_kept", logits, *settings)
        mine, wanted = ((logits >= floor) & (logits > -inf) for floor in floors)
        assert torch.equal(mine[settings[1] == 1], wanted[settings[1] == 1])
        # Sums are rounded in another order: tokens with less than that share may be kept or not.
        probs = torch.softmax(logits.double(), dim=-1)
        assert ((probs * mine).sum(dim=1) - (probs * wanted).sum(dim=1)).abs().max() < 1e-6


def drawing(on: Kernels, rows: int, vocabulary: int) -> None:
    """Weights of whole numbers, whose sums are exact in any order; zeros at both ends, and the least and largest
    number."""
    wide = randint(4, rows, vocabulary + 3).float()
    weights = wide[:, :vocabulary]
    weights[:, : vocabulary // 3], weights[:, vocabulary - vocabulary // 5 :] = 0, 0
    weights[0] = 0
    weights[0, vocabulary // 2] = 1
    u = torch.rand(rows, generator=generator, dtype=torch.float64)
    u[1], u[2] = 0, 1 - 2.0**-53
    drawn = on.same("draw", weights, u)
    assert (weights.gather(1, drawn[:, None]) > 0).all()


def numbering(on: Kernels, rows: int, width: int) -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows, 1), generator=generator)
    positions = randint(2**31, rows, width)
    positions[0, 0] = 2**40
    want = on.same("uniform", seeds, positions)
    assert torch.equal(on.launch(on.ops.uniform, seeds[0], positions[0]), want[0])


def growing(on: Kernels, k: int, steps: int, rows: int, own: bool, ties: bool, most: int = 0) -> None:
    """All levels of a tree; own: rows of other shapes than the batch's. most: beams of a level that no head reads."""
    unread, drafted, counts = 5, k * (steps - 1), [1]
    while len(counts) < steps:
        counts.append(min(most or k, k * counts[-1]))
    widths = [torch.tensor([k - (row + level) % (k + 1) for row in range(rows)]) for level in range(steps)]
    levels = []
    for level in range(steps):
        scores = -torch.rand(rows, counts[level], k, generator=generator)
        scores = (scores.mul(2).round() if ties else scores).sort(dim=2, descending=True).values
        scores[0, 0, k // 2 :] = -inf
        levels.append((scores, randint(50, *scores.shape), widths[level] if own else None))
    sees = (torch.arange(unread + drafted) < 1 + randint(unread, rows)[:, None])[:, None]

    def grow(ops: Ops, levels: list[tuple], sees: Tensor, to_target: Tensor) -> list[Beams | Candidates]:
        made = Candidates.empty(rows, k * sum(counts), sees.device)
        every, first = [root_beams(rows, sees.device, None if most else sees)], 0
        for keep, (scores, ids, own_widths) in zip((*counts[1:], 0), levels, strict=True):
            node = unread + k * (len(every) - 1)
            every.append(ops.grow_beams(every[-1], scores, ids, to_target, made, first, own_widths, keep, node))
            first += scores[0].numel()
        return [*every, made]

    given = (levels, sees, randint(900, 50))
    got = on.launch(lambda *moved: grow(on.ops, *moved), *given)
    for number, (mine, wanted) in enumerate(zip(tensors_in(got), tensors_in(grow(REFERENCE, *given)), strict=True)):
        assert torch.equal(mine, wanted), number


def ranking(on: Kernels, k: int, steps: int, nodes: tuple[int, ...], ties: bool) -> None:
    rows, found = len(nodes), k + (steps - 1) * k * k
    parents = torch.full((rows, found), -1)
    scores = -torch.rand(rows, found, generator=generator)
    if ties:
        scores = scores.mul(3).round()
    first, last = 0, k
    for _ in range(2, steps + 1):
        for row in range(rows):
            beams = (torch.randperm(last - first, generator=generator)[:k] + first).repeat_interleave(k)
            parents[row, last : last + k * k] = beams
            scores[row, last : last + k * k] += scores[row, beams]
        first, last = last, last + k * k
    scores[0, -2:] = -inf
    on.same("rank_candidates", randint(900, rows), randint(900, rows, found), parents, scores, nodes, steps)


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """[rows, 2, vocabulary], rows not side by side, with many ties in and between chunks, and rows of -inf."""
    logits = randn(rows, 2, vocabulary + 1, dtype=dtype)[..., :-1]
    logits[:, 0] = logits[:, 0].round()
    logits[0, 1] = -inf
    logits[-1, 1, : vocabulary // 2] = -inf
    return logits


def greedy(on: Kernels, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = logits_of(rows, vocabulary, dtype)
    lowest = torch.stack([row.eq(row.max()).nonzero()[0, 0] for row in logits.flatten(0, 1)]).view(rows, 2)
    assert torch.equal(on.same("argmax", logits), lowest)
    assert on.launch(on.ops.argmax, torch.zeros(0, 3, 5)).shape == (0, 3)


def top(on: Kernels, rows: int, vocabulary: int, k: int, dtype: torch.dtype) -> None:
    logits = logits_of(rows, vocabulary, dtype)
    (got, ids), (want, _) = on.both("top_log_probs", logits, k)
    assert torch.allclose(got, want, atol=2e-5) and (got <= 0).all()
    lowest = logits.float().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(ids, lowest), "not the lowest ids of equals"
    none = on.launch(on.ops.top_log_probs, torch.zeros(0, 3, vocabulary), k)
    assert none[0].shape == none[1].shape == (0, 3, k)


# -- training ----------------------------------------------------------------------------------------------------------


def scoring(on: Kernels, name: str, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """The draft loss; its reference is the row losses of toolkit/train/loss.py."""
    scores = (3 * randn(rows, vocabulary + 3, dtype=dtype) + 20)[:, :vocabulary]
    scores[0, vocabulary // 2 :] = scores[0].max()  # a tie, in and between blocks
    probs = (2 * randn(3, vocabulary)).softmax(-1)
    probs[1, ::2] = 0
    probs[1] /= probs[1].sum()
    offsets, choice, weight = randint(3, rows), randint(vocabulary, rows), torch.rand(rows, generator=generator)
    choice[-1], weight[-1] = -1, 0  # the teacher's token is not in the draft vocabulary

    def kernel(scores: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return (*triton_loss.score_rows(name, scores, *given, ETA), scores)

    losses, best, gradients = on.launch(kernel, scores, probs, offsets, choice, weight)
    z = scores.float()
    lowest = torch.stack([row.eq(row.max()).nonzero()[0, 0] for row in z])
    z = z - z.max(-1, keepdim=True).values
    wanted = ROW_LOSSES[name](z, probs[offsets], choice, weight)  # the gradients overwrite z
    on.close(losses[:-1], wanted[:-1])
    on.close(gradients, z, dtype)
    assert torch.equal(best, lowest)


@dataclass(frozen=True)
class Training:
    """The attention of a later step of training-time test, over the first one's keys."""

    batch: int
    kv_heads: int
    groups: int
    width: int
    length: int
    dtype: torch.dtype = FP32
    window: int | None = None
    starts: tuple[int, ...] = ()  # where documents begin in a row
    anchors: int = 0

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

    def tensors(self, count: int, heads: int, length: int) -> list[Tensor]:
        """Views [B, heads, length, D], as products return them."""
        return [
            (randn(self.batch, length, heads, self.width) * 1.5).to(self.dtype).transpose(1, 2) for _ in range(count)
        ]


def unrolled(on: Kernels, *given: Any) -> None:
    """Attention of training; its reference is `tiled_forward` and `tiled_backward` of the same numbers in fp32."""
    case = Training(*given[:-1], **given[-1])
    reach, heads = case.reach(), case.kv_heads * case.groups
    q, grad = case.tensors(2, heads, case.length if reach is None else reach.last.shape[1])
    k, v = case.tensors(2, case.kv_heads, case.length)
    (out, lse), wanted = on.launched(triton_attention.attend, tiled_forward, q, k, v, reach)
    # As where each query has further keys: a part of the softmax is theirs.
    merged = wanted[1] + torch.rand(wanted[1].shape, generator=generator)
    backward = (triton_attention.attend_backward, tiled_backward)
    (dq, *found), (want_q, *want) = on.launched(*backward, grad, q, k, v, wanted[0].to(case.dtype), merged, reach)
    assert lse.dtype == dq.dtype == FP32  # of products in the case's dtype
    on.close((out, lse.to(case.dtype)), wanted, case.dtype)
    on.close((dq.to(case.dtype), *found), (want_q, *want), case.dtype, scaled=True)


def diagonals(on: Kernels, count: int, *given: Any) -> None:
    """The own keys of each query; the reference is `plain_merge` and `plain_merge_backward` of the same in fp32."""
    case = Training(*given)
    q, out, grad = case.tensors(3, case.kv_heads * case.groups, case.length)
    keys, values = (case.tensors(count, case.kv_heads, case.length) for _ in range(2))
    lse, dq = randn(*q.shape[:3]), randn(*q.shape)
    (found, sums), (want, merged) = on.launched(triton_attention.merge, plain_merge, q, out, lse, keys, values)
    backward = (triton_attention.merge_backward, plain_merge_backward)
    rest = (grad, q, keys, values, want.to(case.dtype), merged, dq)
    (mine_q, *mine), (want_q, *theirs) = on.launched(*backward, *rest)
    on.close((found, mine_q.to(case.dtype)), (want, want_q), case.dtype)
    on.close(sums, merged)
    on.close(mine, theirs, case.dtype, scaled=True)


# -- tables of arguments -----------------------------------------------------------------------------------------------

# Key heads, query heads of each, head dim, positions that rows hold, new ones, dtype, the rest.
CAUSAL = (
    (3, 3, 64, (0, 5, 37), 1, BF16, {}),  # decoding
    (1, 4, 256, (600,), 3, FP32, {"window": 400, "softcap": 2.0, "sinks": True}),
    (2, 4, 128, (1, 70), 40, BF16, {"page_size": 32, "sinks": True}),  # chunks of prompts
    (1, 9, 96, (3, 30), 9, FP32, {"page_size": 8, "window": 5}),
    (2, 2, 24, (17, 0), 4, FP32, {"page_size": 4, "value_width": 12, "sinks": True}),  # latent attention
    (1, 2, 32, (250, 700, 3), 6, FP32, {}),  # one part, three parts and parts without keys
    # Rows of several lengths: in parts, in one part, with a window, and with work for all processors.
    (2, 2, 32, (0, 37, 5), 40, FP32, {"counts": (40, 1, 17)}),
    (2, 2, 16, (0, 2, 1), 9, FP32, {"counts": (9, 3, 1), "sinks": True}),
    (1, 4, 64, (30, 0, 4), 20, BF16, {"counts": (3, 20, 20), "window": 7}),
    (2, 2, 32, (50, 0), 30, FP32, {"counts": (30, 2), "processors": 4}),
)
TREES = (
    (4, 1, 64, (0, 5, 37), 1, FP32, {"nodes": 1, "page_size": 4}),  # decoding; one row begins with nothing
    (1, 2, 256, (23,), 11, FP32, {"nodes": 11, "window": 9, "softcap": 3.0, "sinks": True}),
    (2, 8, 128, (20,), 8, BF16, {"nodes": 8, "window": 2}),  # narrower than the tree is deep
    (1, 2, 64, (5, 9), 6, BF16, {"nodes": 70, "window": 4}),  # the newest of more nodes than a block of keys
    (2, 2, 24, (8, 17), 5, FP32, {"nodes": 9, "value_width": 12, "page_size": 4}),
    (2, 4, 128, (19, 1), 9, FP16, {"nodes": 9}),
    (1, 2, 32, (700, 250, 3), 5, FP32, {"nodes": 7}),  # several parts of the committed keys
    # Trees of sizes around those of a tile and a block, two ragged rows.
    *((1, 2, 16, (5, 18), n, FP32, {"nodes": n, "page_size": 4}) for n in (16, 17, 33)),
)
IN_ORDER = (
    (3, 3, 64, (0, 5, 37), 1, BF16, {}),  # decoding
    (1, 2, 256, (63,), 11, FP32, {"nodes": 11, "window": 9, "softcap": 3.0, "sinks": True}),
    (2, 2, 24, (17, 0), 20, FP32, {"page_size": 4, "value_width": 12, "softcap": 2.0, "sinks": True}),
    (1, 3, 64, (2, 62), 40, BF16, {"nodes": 40}),  # over the end of a block
)
# Batch, key heads, query heads of each, head dim, positions, dtype, the rest.
UNROLLED = (
    (1, 2, 4, 128, 150, BF16, {}),
    (1, 3, 3, 64, 170, BF16, {"window": 20, "starts": (0, 100, 101)}),
    (2, 1, 2, 96, 140, FP32, {"starts": (0, 50), "window": 70, "anchors": 20}),
    (2, 1, 3, 16, 9, FP32, {}),
    (2, 1, 2, 16, 300, FP32, {"starts": (0, 40, 200), "anchors": 170}),  # more queries than a tile has
)
# Of skinny_product: outputs, inputs, rows, tile, what.
SKINNY = (
    (70, 100, 1, (32, 32, 1), "residual"),  # a tail of outputs, and of inputs
    (16, 208, 20, (16, 64, 3), "plain"),  # the last part is shorter
    (44, 100, 16, (32, 32, 2), "gated"),
    (40, 64, 2, (16, 32, 1), "gated fp8"),
    (34, 256, 3, None, "fp8"),
)
# Products of Llama-3.1-8B and its head, on a GPU alone.
LARGE = tuple(
    (*shape, rows, None, what)
    for shape, what in (
        ((28672, 4096), "gated"), ((4096, 14336), "residual"), ((6144, 4096), "plain"), ((32000, 4096), "fp8"),
    )
    for rows in (1, 4, 16, 32)
)  # fmt: skip
# What each group runs, and the arguments.
GROUPS: dict[str, tuple[Callable[..., None], tuple[tuple, ...]]] = {
    "write_kv": (writing, ((2, 3, 2, 24, 12, FP32), (3, 5, 3, 64, 64, BF16))),
    "compact": (moving, ((1, 9, 3, 2, 16, 16), (3, 32, 2, 3, 24, 12), (2, 64, 4, 9, 128, 128))),
    "attend_causal": (attention, CAUSAL),
    "attend_tree": (attention, TREES),
    "attend_paths": (attention_in_order, IN_ORDER),
    "product": (multiplying, (
        (64, 48, FP32, False, False), (96, 80, BF16, True, False), (32, 8320, FP16, False, False),
        (100, 50, BF16, False, True),
    )),
    "follow_choices": (walking, ((9, 64), (2, 1), (3, 70))),
    "rotate": (turning, ((7, 4, 1, 24, FP32), (5, 3, 3, 64, BF16))),
    "gated": (gating, ((5, 100, FP32), (3, 1024, BF16))),
    "rms_norm": (norming, (
        (2, 4096, BF16, 0.0, True), (2, 128, BF16, 1.0, False), (3, 100, FP32, 0.0, True), (1, 64, FP32, 0.0, False),
    )),
    "rotate_joined": (turning_joined, (
        (2, 3, (4, 2), 16, "paged"), (1, 2, (3, 1), 24, "normed"), (2, 1, (2, 2), 64, "apart"),
    )),
    "linear": (multiplied, ((3, 40, 24, "bias"), (3, 40, 24, "residual"))),
    "gated_linear": (multiplied, ((5, 24, 48, "gated"),)),
    "scaled_product": (scaled, ((3, 64, 96), (20, 32, 40))),
    "skinny": (skinny, SKINNY),
    "least_kept": (cutting, ((128256, 2.0), (40, 1.0), (1500, 0.3), (3000, 3.0))),
    "draw": (drawing, ((3, 7), (40, 3000))),
    "uniform": (numbering, ((3, 70), (1, 1))),
    "grow_beams": (growing, (
        (8, 7, 2, False, False), (3, 4, 3, True, False), (10, 3, 2, True, True), (4, 4, 2, True, True, 30),
        (3, 5, 2, False, True, 40),
    )),
    "rank_candidates": (ranking, (
        (8, 4, (32, 20), False), (8, 7, (64, 64), True), (1, 3, (4, 4), False), (2, 4, (14, 1, 9), True),
        (12, 9, (256, 40), True),
    )),
    "argmax": (greedy, ((5, 9001, FP32), (1, 7, FP32), (2, 4097, BF16))),
    "top_log_probs": (top, ((2, 9001, 10, BF16), (2, 4096, 1, FP32), (1, 7, 7, FP32))),
    "large_pool": (in_a_large_pool, ((),)),
    "unrolled": (unrolled, UNROLLED),
    "diagonals": (diagonals, ((6, 1, 2, 4, 128, 70, BF16), (2, 2, 3, 1, 64, 40), (1, 2, 1, 3, 24, 9))),
    "score_rows": (scoring, tuple(
        (name, *case) for case in ((5, 9001, BF16), (4, 7, FP32)) for name in ROW_LOSSES
    )),
}  # fmt: skip


def compare(device: str, groups: list[str]) -> Iterator[tuple[str, int, str | None]]:
    torch.empty, kernels = poisoned_empty, Kernels(triton_ops(), device)
    paged_attention.PART_KEYS = 16  # several parts of few keys
    for group in groups or GROUPS:
        run, cases = GROUPS[group]
        if group == "skinny" and device == "cuda":
            cases = (*cases, *LARGE)
        for number, case in enumerate(cases):
            generator.manual_seed(number)
            try:
                run(kernels, *case)
            except Exception:
                yield group, number, f"{case}\n{traceback.format_exc()}"
                break
        else:
            yield group, len(cases), None


if __name__ == "__main__":
    found = {group: {"count": count, "wrong": wrong} for group, count, wrong in compare(sys.argv[1], sys.argv[2:])}
    print(json.dumps(found))
