"""The unroll sees exactly what a served chain sees, and nothing of the future."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
    hidden = head(embeds[1 : committed + 1], head.fuse(aux[:committed]), torch.arange(committed), attend, 64)[-1:]
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


def _dense_reference(steps):
    """All keys of all steps in one masked softmax; q, k, v a step: [B, heads or kv, L, hd]."""
    q, _, _ = steps[-1]
    batch, heads, length, width = q.shape
    group = heads // steps[0][1].shape[1]
    keys = torch.cat([k for _, k, _ in steps], 2).repeat_interleave(group, 1)
    values = torch.cat([v for _, _, v in steps], 2).repeat_interleave(group, 1)
    mask = torch.cat([torch.ones(length, length).tril()] + [torch.eye(length)] * (len(steps) - 1), 1).bool()
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_attention_and_its_gradient_equal_the_dense_form(kv_heads):
    """The diagonal terms share one softmax with the causal ones; a separate softmax would pass no gradient check."""
    torch.manual_seed(2)
    batch, heads, width = 2, 3, 8
    flat = [
        [
            torch.randn(batch * LENGTH, h, width, dtype=torch.float64, requires_grad=True)
            for h in (heads, kv_heads, kv_heads)
        ]
        for _ in range(3)
    ]
    attend = TTTAttention(batch, LENGTH)
    for parts in flat:
        out = attend(*parts)
    reference = _dense_reference(
        [tuple(x.view(batch, LENGTH, -1, width).transpose(1, 2) for x in parts) for parts in flat]
    )
    torch.testing.assert_close(out, reference.transpose(1, 2).flatten(0, 1), atol=1e-6, rtol=1e-5)
    leaves = [x for parts in flat for x in parts]
    weights = torch.randn_like(out)
    mine = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, retain_graph=True)
    theirs = torch.autograd.grad((reference.transpose(1, 2).flatten(0, 1) * weights).sum(), leaves, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
