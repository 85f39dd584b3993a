"""A draft head on a CPU, compiled as the target's layers are: a draft step costs what its parameters cost.

`HeadPass` reads tokens (embedding and layers), one program a stage. `HeadFuse` makes its input of the target's
features, `HeadScores` scores the tokens behind a state. What a round drafts, a chain or a tree, takes one call of C++
(layer_runner.cpp):

    features not read yet -> fuse -> pass -> states at the roots -> scores -> level 1 -> pass -> scores -> level 2 -> ..

Attention stays the engine's, one opaque operator (opaque_attention.py), so that a program depends on the number of
tokens alone.

Shapes: B rows, n tokens a row, T = B * n, W feature width, H head hidden size, hd head dim, D ids drafted from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from toolkit.heads.rope import Rope
from toolkit.infer.attention.metadata import FEW, AttentionMetadata, tree_metadata
from toolkit.infer.attention.noted_forward import NotedMetadata
from toolkit.infer.attention.opaque_attention import now
from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.cpu import choices as cpu_choices
from toolkit.infer.cpu.compile_cpp import address_of
from toolkit.infer.cpu.layer_program import (
    TOKEN_RANGES,
    TokenRange,
    allowed_difference,
    compile_layer,
    difference,
    program_for,
    weights_of,
)
from toolkit.infer.cpu.layer_runner import Inputs, RunnableDrafts, RunnableLayers
from toolkit.infer.drafters.draft_inputs import Unread
from toolkit.infer.drafters.drafting_head import DraftingHead, head_scoring
from toolkit.infer.kernels.tree_reference import chain_mask
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.errors import CompileError

PASS_INPUTS = ("tokens", "positions", "cos", "sin")  # beside hidden


class HeadPass(nn.Module):
    """One stage of a head as `compile_layer` takes it: [1, T, ..] in and out, the attention the opaque one."""

    def __init__(self, head: DraftingHead, stage: int, embed: nn.Module) -> None:
        super().__init__()
        self.module, self.embed = head.module, embed
        self._head, self._stage = head, stage
        self._scoring = head_scoring(head)

    def forward(self, hidden: Tensor, *, tokens: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden [1, T, H], tokens and positions [1, T], cos and sin [1, T, 1, hd] -> [1, T, H]."""
        rope, self.module.rope = self.module.rope, cast(Rope, lambda *_: (cos[0], sin[0]))  # no table in a program
        try:
            embeds = self.embed(tokens[0]).to(hidden.dtype)
            return self._head.step(self._stage, embeds, hidden[0], positions[0], self._attend, 0)[None]
        finally:
            self.module.rope = rope

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.ops.toolkit.attend(q, k, v, *self._scoring)[0]


class HeadFuse(nn.Module):
    """What stage 0 reads where the target's features are known: [1, T, W] -> [1, T, H]."""

    def __init__(self, head: DraftingHead) -> None:
        super().__init__()
        self.module, self._head = head.module, head

    def forward(self, features: Tensor) -> Tensor:
        return self._head.first_hidden(features)


class HeadScores(nn.Module):
    """The logits of the drafts behind each state: [1, T, H] -> [1, T, D], of a dtype of cpu_choices.DTYPES."""

    def __init__(self, head: DraftingHead) -> None:
        super().__init__()
        self.module, self.output = head.module, head.output
        self._head = head

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self._head.logits(0, hidden)
        return logits if logits.dtype in cpu_choices.DTYPES else logits.float()


class CompiledHead:
    """Programs for all stages of a head on the CPU, which computes in `dtype`; the head itself is not changed.

    embed: the target's token embedding. to_target [D]: the target's ids of what the head scores. Every program is
    compared with the head's own code, on each range of numbers of tokens. Raises CompileError.
    """

    def __init__(self, head: DraftingHead, embed: nn.Module, to_target: Tensor, dtype: torch.dtype) -> None:
        self._head = head
        self._passes = [self._compiled_pass(HeadPass(head, stage, embed), dtype) for stage in range(head.stages)]
        self._drafts: RunnableDrafts | None = None
        choices = cpu_choices.library()
        if head.stages == 1 and choices is not None:  # another stage first reads what the first has read
            features = torch.zeros(1, 1, head.width, dtype=dtype)
            fused = head.first_hidden(features) is not features
            fuse = self._compiled_alone(HeadFuse(head), head.width, dtype) if fused else {}
            layer = HeadScores(head)
            scores = self._compiled_alone(layer, head.config.hidden_size, dtype)
            of_logits = layer(torch.zeros(1, 1, head.config.hidden_size, dtype=dtype)).dtype
            top = address_of(choices, cpu_choices.name_for("toolkit_top_log_probs", of_logits))
            first, every, last = ([*programs.values()] for programs in (fuse, self._passes[0], scores))
            self._drafts = RunnableDrafts(first, every, last, to_target, top)

    def read(
        self, stage: int, tokens: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionMetadata, reach: int
    ) -> Tensor:
        """One pass of a stage over tokens [B, n], hidden [B, n, H], positions [B, n] < reach -> [B, n, H]."""
        rows, new = tokens.shape
        now.start(plan, rows)
        try:
            run = program_for(rows * new, self._passes[stage])
            inputs = (tokens.reshape(1, -1), *self._inputs(positions.reshape(1, -1), hidden, reach))
            return run(0, hidden.reshape(1, rows * new, -1).contiguous(), [inputs]).view(rows, new, -1)
        finally:
            now.stop()

    def drafts(
        self,
        unread: Unread,
        cache: KVCache,
        shape: DraftShape,
        kept: Sequence[DraftShape | None] | None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Read what was not read yet, and draft from there: all candidates of `shape`, as `draft_beams` has them,
        tokens, parents and scores [B, C]; a chain's are its drafts. kept: the part that each row keeps; None: all.

        None, and nothing is read, where it takes more than one call: more stages, or attention that is not C++'s.
        """
        tokens, features, before, counts = unread
        (rows, pending), steps, beams = tokens.shape, shape.num_steps, shape.top_k
        farthest = max(before) + pending + steps * beams  # no key lies further out
        window = self._head.config.sliding_window
        if self._drafts is None or max(pending, beams) > FEW or (window is not None and window < farthest):
            return None
        assert min(counts) >= 1, "the state at a row's last token is what its drafts begin with"
        span = max(before) + pending
        table = cache.pool.table(0, rows, cache.pool.pages_of(span), tokens.device)
        seen = chain_mask(pending, tokens.device).expand(rows, pending, pending)
        plan = tree_metadata(cache, table, torch.tensor(before), span, seen)
        now.start(plan, rows)
        try:
            if now.call.attend is None:
                return None
            flat = (one.reshape(1, rows * pending, *one.shape[2:]).contiguous() for one in (features, tokens))
            given = (*flat, *self._head.module.rope.tables(features, farthest))
            return self._drafts(given, before, counts, shape, kept)
        finally:
            now.stop()

    def _inputs(self, positions: Tensor, like: Tensor, reach: int) -> Inputs:
        """A pass's further inputs: positions [L, T] < reach, cos and sin [L, T, 1, hd]."""
        cos, sin = self._head.module.rope(positions.flatten(), like, reach)
        return positions.contiguous(), *(x.view(*positions.shape, *x.shape[1:]) for x in (cos, sin))

    def _compiled_pass(self, layer: HeadPass, dtype: torch.dtype) -> dict[TokenRange, RunnableLayers]:
        made = {}
        for tokens in TOKEN_RANGES:
            # Tokens of their own: what is one tensor to the tracer is one input of the program.
            at = torch.arange(1, tokens.example + 1)[None]
            hidden = _some(tokens, self._head.config.hidden_size, dtype)
            keywords = dict(zip(PASS_INPUTS, (at + 1, *self._inputs(at, hidden, tokens.example + 1)), strict=True))
            made[tokens] = run = _runnable(layer, hidden, keywords, tokens)
            with _noting() as wanted:
                own = layer(hidden, **keywords)
            with _noting() as asked:
                found = difference(run(0, hidden, [tuple(keywords.values())]), own)
            _check(layer, found if asked == wanted else torch.inf, dtype)
        return made

    def _compiled_alone(self, layer: nn.Module, width: int, dtype: torch.dtype) -> dict[TokenRange, RunnableLayers]:
        """Of a layer that is called with [1, T, width] alone."""
        made = {}
        for tokens in TOKEN_RANGES:
            given = _some(tokens, width, dtype)
            made[tokens] = run = _runnable(layer, given, {}, tokens)
            _check(layer, difference(run(0, given, [()]), layer(given)), dtype)
        return made


def _some(tokens: TokenRange, width: int, dtype: torch.dtype) -> Tensor:
    """[1, T, width]; which numbers hardly matters."""
    return torch.randn((1, tokens.example, width), generator=torch.Generator().manual_seed(0)).to(dtype)


def _runnable(layer: nn.Module, hidden: Tensor, keywords: dict[str, Any], tokens: TokenRange) -> RunnableLayers:
    return RunnableLayers([compile_layer(layer, hidden, keywords, tokens)], [list(weights_of(layer).values())])


@contextmanager
def _noting() -> Iterator[list[tuple[Any, ...]]]:
    """Each token sees those before it; notes the attention that is asked for."""
    plan = NotedMetadata()
    now.start(plan)
    now.call.layer = 0
    try:
        yield plan.asked
    finally:
        now.stop()


def _check(layer: nn.Module, found: float, dtype: torch.dtype) -> None:
    allowed = allowed_difference(dtype)
    if not found <= allowed:
        raise CompileError(
            f"torch_compile: {type(layer).__name__} of the draft head, compiled, gives another result: off by "
            f"{found:.2g} of its size (allowed: {allowed:g}); leave --torch-compile out"
        )
