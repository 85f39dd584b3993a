"""Attention of few nodes on a CPU in one call, against the same in torch's operators."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.infer.conftest import places_of
from toolkit.infer.attention.metadata import FEW, tree_metadata
from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cpu import attention as cpu_attention
from toolkit.infer.cpu import compile_cpp
from toolkit.infer.engine.cpu_door import install_native_ops
from toolkit.infer.kernels.paged_reference import Pages, Scoring, places_in, write_entries

pytestmark = pytest.mark.skipif(
    not compile_cpp.compiler() or not compile_cpp.has_vectors(),
    reason="needs AVX2 and a C++ compiler",
)
SPAN = 336
ALONE = torch.ones(1, 1, 1, dtype=torch.bool)


@pytest.fixture(autouse=True)
def installed() -> None:
    """As by the construction of an engine."""
    install_native_ops(torch.device("cpu"))


def row_of(keys, values) -> Pages:
    """Pages of one row with these keys and values [S, Hkv, D], after page 0, in the reverse order."""
    count = -(-len(keys) // 16)
    stores = (one.new_zeros((count + 2) * 16, *one.shape[1:]) for one in (keys, values))
    pages = Pages(*stores, torch.tensor([[*range(count, 0, -1), 0]]), 16, len(keys))
    places = places_in(pages.table, torch.arange(len(keys))[None], 16)
    for store, numbers in ((pages.keys, keys), (pages.values, values)):
        write_entries(store, numbers[None], places)
    return pages


def forward(case, dtype, lengths, mask, drawn, *, ours: bool):
    """Attention of one layer -> what comes out [B, N, Hq, D], and the cache's keys and values."""
    heads, kv_heads, width = case
    rows, new, nodes = mask.shape
    pool = PagePool(rows, SPAN)
    for length in range(16, SPAN + 1, 16):  # so that the pages of a row lie apart
        assert all(pool.grow(row, length) for row in reversed(range(rows)))
    cache = KVCache(KVShape(1, kv_heads, width, dtype, torch.device("cpu")), pool)
    places = places_of(pool, SPAN, rows=rows)
    for store, values in zip((cache.keys[0], cache.values[0]), drawn, strict=True):
        if ours:
            store.fill_(torch.nan)  # what nobody has written must not be read
        for row, length in enumerate(lengths):
            store[places[row, : length + nodes - new]] = values[row, : length + nodes - new].to(dtype)
    q, k, v = (
        torch.randn(rows, new, count, width, generator=torch.Generator().manual_seed(7)).to(dtype).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads)
    )
    table = pool.table(0, rows, pool.pages_per_row, torch.device("cpu"))
    depths = torch.zeros(rows, nodes, dtype=torch.long)
    metadata = tree_metadata(cache, table, torch.tensor(lengths), max(lengths) + nodes, mask, depths)
    assert metadata._row_attention is not None
    if not ours:
        metadata._row_attention = None
    found = metadata.attend(0, q, k, v, Scoring(0.2))
    return found, *(store[places].nan_to_num() for store in (cache.keys[0], cache.values[0]))


@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", [(4, 4, 16), (9, 3, 64), (5, 1, 80)], ids=str)
def test_it_is_what_torch_computes(case, dtype, allowed):
    """Ragged rows and equal ones, chains, trees, nodes of an earlier pass, one node; keys and values lie where torch
    puts them. A mask, a head, a position or a stride that was mistaken would be off by far more."""
    torch.manual_seed(0)
    rows = [[37], [5, 64, 1], [16, 16], [300, 129, 250]]
    for (new, nodes), lengths in itertools.product([(1, 1), (4, 4), (3, 8), (FEW, FEW)], rows):
        drawn = torch.randn(2, len(lengths), SPAN, case[1], case[2])
        mask = torch.rand(len(lengths), new, nodes) < 0.5
        mask |= torch.eye(nodes, dtype=torch.bool)[nodes - new :]
        found, expected = (forward(case, dtype, lengths, mask, drawn, ours=ours) for ours in (True, False))
        torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=allowed, atol=allowed)
        assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])


@pytest.mark.parametrize(("length", "width"), [(1, 64), (32, 96), (61, 80), (90, 32)])
def test_a_nodes_result_does_not_depend_on_its_company_or_the_threads(length, width):
    """Bit for bit: a chain verified together is the chain decoded node by node, in one row and beside others."""
    torch.manual_seed(0)
    case, threads = (9, 3, width), torch.get_num_threads()
    drawn = torch.randn(2, 12, SPAN, 3, width)
    chain = torch.ones(12, 5, 5, dtype=torch.bool).tril()
    try:
        torch.set_num_threads(3)
        together = forward(case, torch.bfloat16, [length] * 12, chain, drawn, ours=True)[0]
        torch.set_num_threads(1)
        assert torch.equal(forward(case, torch.bfloat16, [length] * 12, chain, drawn, ours=True)[0], together)
    finally:
        torch.set_num_threads(threads)
    for node in range(5):
        kept = drawn[:, 3:4].clone()
        q, k, v = (
            torch.randn(12, 5, count, width, generator=torch.Generator().manual_seed(7))[3:4, : node + 1].bfloat16()
            for count in (9, 3, 3)
        )
        kept[0, :, length : length + node], kept[1, :, length : length + node] = (
            k[:, :node].float(),
            v[:, :node].float(),
        )
        pages = row_of(*kept[:, 0].bfloat16())
        attention = cpu_attention.row_attention(pages, torch.tensor([length + node]), ALONE)
        asked = (x[:, node:].transpose(1, 2) for x in (q, k, v))
        alone = attention(*asked, pages.keys, pages.values, 0.2)
        assert torch.equal(alone[0, 0], together[3, node])


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 64)])
def test_shares_of_far_apart_scores(dtype, width):
    """One key far ahead takes everything, and one far behind nothing: no overflow, exact zeros. A nan is not hidden."""
    pages = row_of(*torch.zeros(2, 16, 1, width, dtype=dtype))
    attention, (keys, values) = cpu_attention.row_attention(pages, torch.tensor([3]), ALONE), (pages.keys, pages.values)
    keys[16:19, 0, 0], values[16:19, 0, 0] = torch.tensor([[-1e30, 3e11, 3e9], [1e30, 2.0, 1e30]], dtype=dtype)
    one = torch.zeros(1, 1, 1, width, dtype=dtype)
    one[..., 0] = 1.0
    assert attention(one, -one, one, keys, values, 0.3)[0, 0, 0, 0] == 2.0
    keys[17, 0, 0] = torch.nan
    assert attention(one, -one, one, keys, values, 0.3)[0, 0, 0, 0].isnan()
    with pytest.raises(ValueError, match=r"2 rows of 1 nodes; \(1, 1\) is needed"):
        attention(one.repeat(2, 1, 1, 1), one, one, keys, values, 0.3)


def test_no_such_attention_for_other_heads_and_pages():
    """DeepSeek's values are narrower than its keys."""

    def known(dtype, widths, page_size=16) -> bool:
        keys, values = (torch.zeros(32, 1, width, dtype=dtype) for width in widths)
        pages = Pages(keys, values, torch.ones(1, 1, dtype=torch.long), page_size, 16)
        return cpu_attention.row_attention(pages, torch.tensor([3]), ALONE) is not None

    assert known(torch.float32, (64, 64)) and not known(torch.float32, (64, 64), page_size=8)
    assert not any((known(torch.float32, (64, 32)), known(torch.float32, (20, 20)), known(torch.float16, (64, 64))))


def test_padding_is_not_written():
    """Its positions are on page 0, which every row reads after its end and multiplies by 0: 0 * nan is nan."""
    pages = row_of(*torch.randn(2, 16, 2, 64))
    three = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    attention = cpu_attention.row_attention(pages, torch.tensor([15]), three)
    q, k, v = torch.randn(1, 4, 3, 64), *torch.randn(2, 1, 2, 3, 64)
    k[:, :, 1:] = v[:, :, 1:] = torch.nan
    out = attention(q, k, v, pages.keys, pages.values, 0.2)
    assert not pages.keys[:16].any() and not pages.values[:16].any()
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_order_a_tree_is_plain_decoding_to_the_bit(dtype):
    """A node's path has gaps in the cache, where its cousins are. In lanes by position its shares would be added in
    another order than those of the same tokens one after another."""
    generator, length, nodes = torch.Generator().manual_seed(5), 37, 24
    heads, kv_heads, width = 6, 2, 32
    parents = [-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, nodes))]
    paths = [[0]]
    for node in range(1, nodes):
        paths.append([*paths[parents[node]], node])
    mask = torch.zeros(1, nodes, nodes, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    q, k, v = (
        torch.randn(1, count, nodes, width, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)
    )
    prefix = torch.randn(2, length, kv_heads, width, generator=generator).to(dtype)

    def attend(pages, first, mask, at):
        own = cpu_attention.row_attention(pages, torch.tensor([first]), mask, in_order=True)
        return own(q[:, :, at], k[:, :, at], v[:, :, at], pages.keys, pages.values, 0.2)

    def cache() -> Pages:
        return row_of(*torch.cat((prefix, torch.zeros(2, nodes, kv_heads, width, dtype=dtype)), dim=1))

    whole = attend(cache(), length, mask, list(range(nodes)))
    for node, path in enumerate(paths):
        pages = cache()
        for place, one in enumerate(path):
            alone = attend(pages, length + place, ALONE, [one])
        assert torch.equal(alone[0, 0], whole[0, node])
