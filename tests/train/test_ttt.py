"""The unroll sees exactly what a served chain sees, and nothing of the future."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from toolkit.train import causal_attention, ttt
from toolkit.train.ttt import TTTAttention, unroll

LENGTH, STEPS = 9, 4


def _served_chain(head, aux, embeds, root, steps):
    """One root drafted the way an engine does it: committed positions first, then one draft after the other."""
    keys, values = [], []

    def attend(q, k, v):
        keys.append(k)
        values.append(v)
        all_k, all_v = torch.cat(keys), torch.cat(values)
        group = q.shape[1] // k.shape[1]
        query = q.transpose(0, 1)
        all_k, all_v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (all_k, all_v))
        scores = query @ all_k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if len(keys) == 1:
            scores = scores.masked_fill(torch.ones(len(k), len(k), dtype=torch.bool).triu(1), float("-inf"))
        return (scores.softmax(-1) @ all_v).transpose(0, 1)

    committed = root + 1
    fused = head.first_hidden(aux[:committed])
    hidden = head(embeds[1 : committed + 1], fused, torch.arange(committed), attend, 64)[-1:]
    states = [hidden]
    for step in range(1, steps):
        hidden = head(embeds[root + 1 + step][None], hidden, torch.tensor([root + step]), attend, 64)
        states.append(hidden)
    return torch.cat(states)


def test_unroll_equals_a_served_chain(tiny_draft):
    """Train/serve parity: a wrong shift, position or key set in the unroll changes these states."""
    head = tiny_draft.head
    torch.manual_seed(0)
    aux, embeds = torch.randn(2, LENGTH, 192), torch.randn(2, LENGTH, 64)
    unrolled = list(unroll(head, aux, embeds, STEPS))
    for row in range(2):
        for root in range(LENGTH - STEPS):
            served = _served_chain(head, aux[row], embeds[row], root, STEPS)
            trained = torch.stack([unrolled[step][row, root] for step in range(STEPS)])
            torch.testing.assert_close(trained, served, atol=2e-5, rtol=1e-4)


def test_no_root_sees_the_future(tiny_draft):
    """Changing token 6 must leave every root untouched whose chain only reads tokens up to 5."""
    head = tiny_draft.head
    torch.manual_seed(1)
    aux, embeds = torch.randn(1, LENGTH, 192), torch.randn(1, LENGTH, 64)
    before = list(unroll(head, aux, embeds, 3))
    aux[0, 6:], embeds[0, 6:] = 5.0, -5.0
    after = list(unroll(head, aux, embeds, 3))
    for step in range(3):
        last_unaffected = 5 - 1 - step  # root t reads token t+1+step
        assert torch.equal(before[step][0, : last_unaffected + 1], after[step][0, : last_unaffected + 1])
        assert not torch.equal(before[step][0, last_unaffected + 1], after[step][0, last_unaffected + 1])


def _dense_reference(steps, window=None, starts=None):
    """All keys of all steps in one masked softmax; q, k, v a step: [B, heads or kv, L, hd]."""
    q, _, _ = steps[-1]
    batch, heads, length, width = q.shape
    group = heads // steps[0][1].shape[1]
    keys = torch.cat([k for _, k, _ in steps], 2).repeat_interleave(group, 1)
    values = torch.cat([v for _, _, v in steps], 2).repeat_interleave(group, 1)
    at = torch.arange(length)
    causal = (at <= at[:, None]).expand(batch, -1, -1)
    if window is not None:
        causal = causal & (at[:, None] + len(steps) - 1 - at < window)
    if starts is not None:
        causal = causal & (at >= starts[:, :, None])
    own = torch.eye(length, dtype=torch.bool).expand(batch, -1, -1)
    mask = torch.cat([causal] + [own] * (len(steps) - 1), -1)[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def _steps(kv_heads: int, dtype: torch.dtype = torch.float64, batch: int = 2, length: int = LENGTH):
    """q, k and v of three steps as the draft layer hands them over; 3 query heads of width 8."""
    torch.manual_seed(2)
    shapes = [(batch * length, heads, 8) for heads in (3, kv_heads, kv_heads)]
    return [[torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes] for _ in range(3)]


@pytest.fixture(params=["operator", "tiles"])
def causal(request, monkeypatch) -> None:
    """Both ways to the causal part: the CPU's operator, and plain torch in tiles (one of them not whole)."""
    if request.param == "tiles":
        monkeypatch.setattr(ttt, "causal_attention", causal_attention.tiled_forward)
        monkeypatch.setattr(ttt, "causal_attention_backward", causal_attention.tiled_backward)
        monkeypatch.setattr(causal_attention, "TILE", 4)


STARTS = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 5], [0, 0, 0, 0, 0, 0, 6, 6, 8]])


@pytest.mark.parametrize("sees", [{}, {"window": 4}, {"window": 3, "starts": STARTS}])
@pytest.mark.parametrize(("kv_heads", "dtype"), [(1, torch.float64), (3, torch.float32)])
def test_attention_and_its_gradient_equal_the_dense_form(causal, kv_heads, dtype, sees):
    """All steps' outputs and the gradients of all steps' q, k and v: 1e-12 in float64, 2e-6 in fp32, of values near 1.

    The diagonal terms share one softmax with the causal ones; a separate one, or a backward that forgets that the
    log-sum-exp and the output hold the other part too, is off in the first digit. So is a window that does not move
    with the step, or a key of another document.
    """
    flat = _steps(kv_heads, dtype)
    attend = TTTAttention(2, LENGTH, **sees)
    shaped = [tuple(x.view(2, LENGTH, -1, 8).transpose(1, 2) for x in parts) for parts in flat]
    out = torch.stack([attend(*parts) for parts in flat])
    reference = torch.stack([_dense_reference(shaped[: k + 1], **sees).transpose(1, 2).flatten(0, 1) for k in range(3)])
    close = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-6}
    torch.testing.assert_close(out, reference, **close)
    leaves = [x for parts in flat for x in parts]
    weights = torch.randn_like(out)
    mine = torch.autograd.grad((out * weights).sum(), leaves)
    theirs = torch.autograd.grad((reference * weights).sum(), leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **{**close, "atol": 3 * close["atol"]})


@pytest.mark.parametrize("narrow", [False, True])
def test_attention_in_bf16(monkeypatch, narrow):
    """Against the dense form in float64 of the same numbers: outputs within 2^-7 and gradients within 2^-5. narrow: the
    CPU's operator in bfloat16, as with AMX."""
    monkeypatch.setattr(causal_attention, "_has_tiles", lambda: narrow)
    monkeypatch.setattr(causal_attention, "LONG", 1)
    flat = _steps(1, torch.bfloat16)
    exact = [[x.detach().double().requires_grad_(True) for x in parts] for parts in flat]
    attend = TTTAttention(2, LENGTH)
    out = [attend(*parts) for parts in flat][-1]
    assert out.dtype == torch.bfloat16
    shaped = [tuple(x.view(2, LENGTH, -1, 8).transpose(1, 2) for x in parts) for parts in exact]
    reference = _dense_reference(shaped).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(out.double(), reference, rtol=2**-7, atol=2**-7)
    mine, theirs = (
        torch.autograd.grad(one.sum(), (steps[0][1], steps[1][1], steps[2][0], steps[2][2]))
        for one, steps in ((out, flat), (reference, exact))
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-5, atol=2**-5)


def test_nothing_of_the_square_of_the_length_is_kept(causal):
    """What autograd keeps for backward grows with L: a tensor of L x L would be 24 times the queries' size here."""
    sizes: list[int] = []
    flat = _steps(1, torch.float32, batch=1, length=200)
    attend = TTTAttention(1, 200)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        for parts in flat:
            attend(*parts)
    assert sizes and max(sizes) <= flat[0][0].numel()
