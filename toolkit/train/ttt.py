"""Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): the head reads its own outputs for K steps.

Every position t of a sequence is a root. The chains of drafts of all roots are unrolled in parallel.

    step k, root t:   hidden   k = 0: fused feature f_t        k > 0: the head's output at (t, k-1)
                      embed    x_{t+1+k} (ground truth)        position t+k
                      attends  step-0 keys of positions 0..t, and its own keys of steps 1..k
                      predicts x_{t+2+k}

A served chain attends to the same keys: committed positions, then its own drafts. The table is that of a head
without MTP layers, or with one. One of S MTP layers predicts step k < S with layer k, which reads the state of layer
k-1 at t, has position t and attends to its own keys of 0..t. From step S on, layer S-1 reads its own outputs, at
positions t+1, ..

A block drafter (`heads/dspark.py`) drafts at once what a chain drafts step by step, in the block of each root, so
supervision, losses and forecasts are those of a chain:

    step k, root t:   query    k = 0: x_{t+1} (ground truth)    k > 0: mask k            position t+1+k
                      attends  keys of the features of positions 0..t, and all keys of its own block (of a causal head:
                               those of steps 0..k)
                      bias     of the token x_{t+1+k} (ground truth)
                      predicts x_{t+2+k}

A block whose first place is no draft (DFlash) drafts step k at place k+1, at position t+2+k, where the masks are.

Shapes: B sequences, L positions, T = B*L, H hidden size, W feature width, hd head dim, kv key/value heads, G query
heads a key/value head. Of blocks: N roots a row, b places of a block, Q = N*b.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from toolkit.heads.decoder_layer import Attend
from toolkit.heads.draft_head import DraftHead
from toolkit.heads.dspark import DSparkHead, Write
from toolkit.train.causal_attention import KeyRange, causal_attention, causal_attention_backward, kernels_for
from toolkit.train.row_split import RowPart


class TTTAttention:
    """The attention of one unroll. A draft layer calls it once a step. The result is exact, in the dtype of the inputs.

    window: positions that a query sees, its own included; at least the number of steps. None: all earlier positions.
    starts [B, L]: the first position of each position's document, the earliest that it sees; None: a row is a document.
    `at_anchors` gives a copy that continues with some of the roots.
    """

    def __init__(self, batch: int, length: int, window: int | None = None, starts: torch.Tensor | None = None) -> None:
        self.batch, self.length, self.window, self.starts = batch, length, window, starts
        self.anchors: torch.Tensor | None = None
        # Tuples, because copies of this object must not share later keys.
        self.keys: tuple[torch.Tensor, ...] = ()
        self.values: tuple[torch.Tensor, ...] = ()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, kv*G, hd], k [T, kv, hd] and v [T, kv, w], w <= hd -> [T, kv*G, w]; with anchors T = B*N."""
        width = v.shape[-1]
        v = F.pad(v, (0, k.shape[-1] - width))  # the kernels know one width (latent attention has narrower values)
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        self.keys += (k,)
        self.values += (v,)
        out = MergedAttention.apply(q, self._reach(q.device), *self.keys, *self.values)
        return out.transpose(1, 2).flatten(0, 1)[..., :width]

    def at_anchors(self, anchors: torch.Tensor) -> TTTAttention:
        """A copy for the roots anchors [B, N] only; to be called after the first step."""
        chosen = copy(self)
        chosen.anchors = anchors
        chosen.starts = None if self.starts is None else self.starts.gather(1, anchors)
        return chosen

    def _reach(self, device: torch.device) -> KeyRange | None:
        """The step-0 keys that the newest step sees. The query of root t has position t + step."""
        step = len(self.keys) - 1
        narrow = self.window is not None and self.length + step > self.window
        if self.starts is None and self.anchors is None and not narrow:
            return None
        roots = torch.arange(self.length, device=device).expand(self.batch, -1)
        roots = roots if self.anchors is None else self.anchors
        first = torch.zeros_like(roots) if self.starts is None else self.starts
        if self.window is not None:
            assert step < self.window, "the window must hold the whole unroll, or a chain does not see its root"
            first = torch.maximum(first, roots + (step + 1 - self.window))
        return KeyRange(first, roots)


class MergedAttention(torch.autograd.Function):
    """One softmax over the step-0 keys (causal) and each query's own keys of later steps (the diagonals).

    Softmaxes over disjoint keys merge exactly by their log-sum-exps: out = sum_i exp(lse_i - lse) out_i with
    lse = log sum_i exp(lse_i). A single key has its score as lse and its value as out. Backward needs only the merged
    out and lse: they give the weights of every part.
    """

    @staticmethod
    def forward(ctx, q, reach, *keys_and_values):
        """q [B, kv*G, L, hd], the reach of the causal part, the keys of steps 0..k, then the values, each
        [B, kv, L, hd] -> like q."""
        keys, values = _halves(keys_and_values)
        out, lse = causal_attention(q, keys[0], values[0], reach)
        ctx.reach = reach
        if len(keys) > 1:
            kernels = kernels_for(q)
            out, lse = (plain_merge if kernels is None else kernels.merge)(q, out, lse, keys[1:], values[1:])
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, lse, *keys_and_values)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, out, lse, *keys_and_values = ctx.saved_tensors
        keys, values = _halves(keys_and_values)
        dq, dk, dv = causal_attention_backward(grad, q, keys[0], values[0], out, lse, ctx.reach)
        dk, dv = dk.to(q.dtype), dv.to(q.dtype)
        if len(keys) == 1:
            return dq.to(q.dtype), None, dk, dv
        kernels = kernels_for(q)
        backward = plain_merge_backward if kernels is None else kernels.merge_backward
        dq, own_keys, own_values = backward(grad, q, keys[1:], values[1:], out, lse, dq)
        return dq.to(q.dtype), None, dk, *own_keys, dv, *own_values


def plain_merge(
    q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the causal part, out [B, kv*G, L, hd] and lse [B, kv*G, L], with the keys and values of the later
    steps, each [B, kv, L, hd]."""
    grouped = q.unflatten(1, (keys[0].shape[1], -1))
    own = _own_scores(grouped, keys)
    merged = torch.logsumexp(torch.stack((lse, *own)), dim=0)
    total = out * (lse - merged).exp_().unsqueeze(-1)
    total = total.view(grouped.shape)
    for score, value in zip(own, values, strict=True):
        weight = (score - merged).exp_().view(grouped.shape[:-1])
        total.addcmul_(weight.unsqueeze(-1), value.unsqueeze(2))
    return total.flatten(1, 2), merged


def plain_merge_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of q, keys and values. dq: of the causal part, to which that of the later steps is added. out, lse: of
    all keys together."""
    grad_keys, grad_values = [], []
    grouped, upstream, total = (x.unflatten(1, (keys[0].shape[1], -1)) for x in (q, grad, dq))
    upstream, total = upstream.to(lse.dtype), total.to(lse.dtype)
    delta = (upstream * out.view(upstream.shape)).sum(-1)
    for score, key, value in zip(_own_scores(grouped, keys), keys, values, strict=True):
        weight = (score - lse).exp_().view(delta.shape)
        change = (upstream * value.unsqueeze(2)).sum(-1).sub_(delta).mul_(weight).mul_(q.shape[-1] ** -0.5)
        total.addcmul_(change.unsqueeze(-1), key.unsqueeze(2))
        grad_keys.append((change.unsqueeze(-1) * grouped).sum(2).to(key.dtype))
        grad_values.append((weight.unsqueeze(-1) * upstream).sum(2).to(value.dtype))
    return total.flatten(1, 2), grad_keys, grad_values


def _halves(keys_and_values: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    count = len(keys_and_values) // 2
    return keys_and_values[:count], keys_and_values[count:]


def _own_scores(q: torch.Tensor, keys: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each root's score with its own key of every later step, [B, kv*G, L] in fp32 or fp64; q [B, kv, G, L, hd]."""
    dtype, scale = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5
    return [(q * key.unsqueeze(2)).sum(-1, dtype=dtype).mul_(scale).flatten(1, 2) for key in keys]


def unroll(
    head: DraftHead,
    features: torch.Tensor,
    embeds: torch.Tensor,
    steps: int,
    starts: torch.Tensor | None = None,
    anchors: torch.Tensor | None = None,
    *,
    checkpointing: bool = False,
    part: RowPart | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the states [B, L, H] of steps 0..steps-1, from which `DraftHead.logits` computes each step's logits.

    features [B, L, W]: the target's hidden states. embeds [B, L, H]: the target's embeddings of the same tokens. A root
    whose token t+1+k lies past the end of its row reads zeros as the embedding; past the end of its document (starts
    [B, L], see `Batch`) it reads the next document's. Neither is supervised.
    anchors [B, N]: after the last MTP layer has read all positions, only these roots are unrolled further, and the
    states are [B, N, H]. checkpointing: backward recomputes each step instead of storing its activations (arXiv
    1604.06174). part: of rows that are split, without starts; then L is C, and embeds are [B, W, H].
    """
    batch, length, width = *features.shape[:2], embeds.shape[2]
    config, first, whole = head.config, 0, length
    if part is not None:
        first, whole = part.begin, part.length
    attention = TTTAttention(batch, whole, config.sliding_window, starts)
    attentions = [[attention] * config.layers for _ in range(config.mtp_layers)]
    roots = torch.arange(length, device=embeds.device).expand(batch, -1)
    positions = roots + first if starts is None else roots - starts
    hidden = head.first_hidden(features.flatten(0, 1))
    for step in range(steps):
        mtp_layer = min(step, config.mtp_layers - 1)
        if anchors is not None and step == config.mtp_layers:
            seen = anchors if part is None else part.of_all(anchors)
            attentions[mtp_layer] = [layer.at_anchors(seen) for layer in attentions[mtp_layer]]
            hidden = (
                hidden.view(batch, length, width).gather(1, anchors[:, :, None].expand(-1, -1, width)).flatten(0, 1)
            )
            roots, positions = anchors, positions.gather(1, anchors)
        at, following = (positions + step - mtp_layer).flatten(), roots + 1 + step
        run = partial(_one_pass, head, mtp_layer, attentions[mtp_layer], embeds, following, at, whole + steps, part)
        if checkpointing and torch.is_grad_enabled():
            hidden, attentions[mtp_layer] = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden, attentions[mtp_layer] = run(hidden)
        yield hidden.view(batch, -1, width)


def _one_pass(
    head: DraftHead,
    mtp_layer: int,
    before: Sequence[TTTAttention],
    embeds: torch.Tensor,
    following: torch.Tensor,
    positions: torch.Tensor,
    reach: int,
    part: RowPart | None,
    hidden: torch.Tensor,
) -> tuple[torch.Tensor, list[TTTAttention]]:
    """Run one step by an MTP layer; returns its states and its attentions after the step. `before` is not changed.

    following [B, N]: positions of the tokens that the step reads; past the end of a row it reads zeros.
    """
    layers = [copy(attention) for attention in before]
    length, width = embeds.shape[1:]
    read = embeds.gather(1, following.clamp(max=length - 1)[:, :, None].expand(-1, -1, width))
    read = read.masked_fill((following >= length)[:, :, None], 0.0)
    in_turn = iter(layers)
    attend: Attend = lambda q, k, v: next(in_turn)(q, k, v)  # noqa: E731
    if part is not None:
        attend = part.attending(attend, len(embeds))
    return head(read.flatten(0, 1), hidden, positions, attend, reach, mtp_layer), layers


class BlockAttention:
    """The attention of one layer: first `write`, then one call. reach: the context that each query [B, Q] sees, or, if
    causal, that each root [B, N] sees. causal: a place sees its block up to itself, else the whole block."""

    def __init__(self, batch: int, size: int, reach: KeyRange, *, causal: bool) -> None:
        self.batch, self.size, self.reach, self.causal = batch, size, reach, causal
        self.context: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [B*L, kv, hd] of the context."""
        self.context = self._by_head(k), self._by_head(v)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B*Q, kv*G, hd], k and v [B*Q, kv, hd] -> like q."""
        assert self.context is not None, "the context is written first"
        if self.causal:
            return self._causal(q, k, v)
        keys, values = ([one, *self._own(new)] for one, new in zip(self.context, (k, v), strict=True))
        out = MergedAttention.apply(self._by_head(q), self.reach, *keys, *values)
        return out.transpose(1, 2).flatten(0, 1)

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Place after place, since their queries see unlike numbers of keys: each b times [B, .., N, hd]."""
        assert self.context is not None, "the context is written first"
        queries, keys, values = (self._by_head(x).unflatten(2, (-1, self.size)).unbind(3) for x in (q, k, v))
        known_keys, known_values = self.context
        out = [
            MergedAttention.apply(one, self.reach, known_keys, *keys[: at + 1], known_values, *values[: at + 1])
            for at, one in enumerate(queries)
        ]
        return torch.stack(out, dim=3).flatten(2, 3).transpose(1, 2).flatten(0, 1)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (self.batch, -1)).transpose(1, 2)

    def _own(self, x: torch.Tensor) -> list[torch.Tensor]:
        """For each place of a block, what stands there in the block of each query: b times [B, kv, Q, hd]."""
        blocks = self._by_head(x).unflatten(2, (-1, self.size))
        return [one.repeat_interleave(self.size, dim=2) for one in blocks.unbind(3)]


def unroll_blocks(
    head: DSparkHead,
    features: torch.Tensor,
    embeds: torch.Tensor,
    steps: int,
    starts: torch.Tensor | None = None,
    anchors: torch.Tensor | None = None,
    *,
    checkpointing: bool = False,
    part: RowPart | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the states [B, N, H] of steps 0..steps-1, at most as many as the head drafts, as `ttt.unroll` does.
    Arguments: of `ttt.unroll`.

    A root whose x_{t+1} lies past the end of its row reads the row's last token; it is not supervised.
    """
    (batch, length), width, size, device = features.shape[:2], embeds.shape[2], head.config.block_size, embeds.device
    first_draft = size - head.config.drafts_at_once
    assert steps <= size - first_draft, f"a block of {size} has no step {steps}"
    every = torch.arange(length, device=device).expand(batch, -1)
    begin, reads = (0, length) if part is None else (part.begin, part.length)
    starts = torch.full_like(every, -begin) if starts is None else starts
    roots = every if anchors is None else anchors

    def whole(at: torch.Tensor) -> torch.Tensor:
        """Values at roots [B, N, ..] repeated for the places of their blocks: [B, Q, ..]."""
        return at.repeat_interleave(size, dim=1)

    first = starts.gather(1, roots)
    places = torch.arange(size, device=device).repeat(roots.shape[1])
    positions = (whole(roots - first) + 1 + places).flatten()
    following = (roots + 1).clamp(max=embeds.shape[1] - 1)[:, :, None].expand(-1, -1, width)
    causal, seen = head.config.causal, (first, roots) if part is None else (part.of_all(first), part.of_all(roots))
    reach = KeyRange(*seen) if causal else KeyRange(*map(whole, seen))

    def run(features: torch.Tensor) -> torch.Tensor:
        layers = [BlockAttention(batch, size, reach, causal=causal) for _ in head.layers]
        hidden = head.first_hidden(features.flatten(0, 1))
        written, attending = iter(layers), iter(layers)
        by_heads = (lambda x: x) if part is None else partial(part.by_heads, batch=batch)
        write: Write = lambda k, v: next(written).write(by_heads(k), by_heads(v))  # noqa: E731
        attend: Attend = lambda q, k, v: next(attending)(q, k, v)  # noqa: E731
        attend = attend if part is None else part.attending(attend, batch)
        head.write_context(hidden, (every - starts).flatten(), reads + size, write)
        return head(whole(embeds.gather(1, following)).flatten(0, 1), hidden, positions, attend, reads + size)

    if checkpointing and torch.is_grad_enabled():
        states = checkpoint(run, features, use_reentrant=False, preserve_rng_state=False)
    else:
        states = run(features)
    yield from states.view(batch, -1, size, width).unbind(2)[first_draft : first_draft + steps]
