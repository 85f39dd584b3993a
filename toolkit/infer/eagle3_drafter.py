"""Drafting with an EAGLE-3 head: chains, and EAGLE-2's dynamic trees.

Shapes: B rows, A pending positions, H head hidden size, k beams, D draft vocabulary, hd head dim.

At position i the head reads (feature of i, embedding of token i+1) and predicts token i+2. With L tokens committed and
the last one, x_{L-1}, as the tree's root:

    position      ..  L-3      L-2        L-1        L        ..
    token next    ..  x_{L-2}  x_{L-1}    level 1    level 2
    predicts      ..  x_{L-1}  level 1    level 2    level 3
    feature       ..  target's target's   the head's own hidden state of the parent

Positions up to L-2 are computed from the target's features as soon as those are known ("pending" until the next
propose); what drafted nodes left behind L-2 is overwritten. A drafted node sees the committed positions and its true
ancestors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint, check_draft_matches
from toolkit.infer.attention_plan import AttentionPlan, PromptPlan, TreePlan
from toolkit.infer.draft_tree import DraftShape, DraftTree, chain_tree, rerank, root_only
from toolkit.infer.drafter import root_tokens
from toolkit.infer.errors import DraftShapeError
from toolkit.infer.kv_cache import KVCache, KVShape
from toolkit.infer.request import Request
from toolkit.infer.verify import Walk
from toolkit.target.features import AuxCapture
from toolkit.target.load import Target


class Eagle3Drafter:
    """Owns the head's cache, the target features it still has to read, and the hooks that bring them."""

    def __init__(self, target: Target, draft: DraftCheckpoint, shape: DraftShape) -> None:
        check_draft_matches(draft, target)
        self._head = draft.head
        self._embed = target.embed_tokens
        self._device = target.device
        config = draft.head.config
        self._dtype = draft.head.fc.weight.dtype
        self._to_target = draft.token_map.ids.to(self._device)
        self._scaling = config.head_dim**-0.5
        self._capture = AuxCapture(target, config.aux_layer_ids)
        # A drafter that is dropped without close() must not leave its hooks on a model others go on using.
        self._unhook = weakref.finalize(self, self._capture.remove)
        self.cache = KVCache(KVShape(1, config.num_key_value_heads, config.head_dim, self._dtype, self._device))
        self._width = len(config.aux_layer_ids) * config.target_hidden_size
        # Per row: the committed positions the head has not read, their target features and the tokens that follow them.
        self._features = torch.zeros(0, 1, self._width, dtype=self._dtype, device=self._device)
        self._tokens = torch.zeros(0, 1, dtype=torch.long, device=self._device)
        self._counts: list[int] = []
        self.set_shape(shape)

    def set_shape(self, shape: DraftShape) -> None:
        if shape.top_k > len(self._to_target):
            raise DraftShapeError(
                f"draft shape {shape.name}: top_k exceeds the draft vocabulary of {len(self._to_target)} tokens; "
                "draft with fewer branches"
            )
        self.shape = shape
        sizes = [shape.top_k] + [shape.top_k**2] * (shape.num_steps - 1)  # candidates of each level
        levels = [level for level, size in enumerate(sizes, start=1) for _ in range(size)]
        self._levels = torch.tensor(levels, device=self._device)

    def close(self) -> None:
        self._unhook()

    # -- following the target ------------------------------------------------------------------------------------------

    def admit(self, first_row: int, requests: Sequence[Request], input_ids: Tensor) -> None:
        """Read the prompts but for their last positions, whose next tokens are the first ones sampled."""
        rows, tokens = input_ids.shape
        self._hold(first_row + rows, 1)
        self._counts[first_row:] = [1] * rows
        last = torch.tensor([len(request.prompt_ids) - 1 for request in requests], device=self._device)
        if not any(request.speculative for request in requests):
            return
        features = self._capture.take().to(self._dtype)
        here = slice(first_row, first_row + rows)
        self._features[here, 0] = features[torch.arange(rows, device=self._device), last]
        if tokens > 1:
            plan = PromptPlan(self.cache, first_row, rows, tokens - 1)
            positions = torch.arange(tokens - 1, device=self._device).expand(rows, -1)
            self._run(input_ids[:, 1:], self._head.fuse(features[:, :-1]), positions, plan, tokens - 1)

    def observe(self, requests: Sequence[Request], found: Walk) -> None:
        """Keep the features of the accepted path; the tokens after them are those that were just chosen."""
        if not any(request.speculative for request in requests):
            return
        features = self._capture.take().to(self._dtype)
        rows, longest = found.path.shape
        self._hold(rows, longest)
        self._features[:rows, :longest] = features.gather(1, found.path[:, :, None].expand(-1, -1, self._width))
        self._tokens[:rows, :longest] = found.tokens
        self._counts = [accepted + 1 for accepted in found.accepted]

    def move_row(self, destination: int, source: int) -> None:
        if source < self.cache.rows:
            self.cache.move_row(destination, source, self.cache.span)
        self._features[destination] = self._features[source]
        self._tokens[destination] = self._tokens[source]
        self._counts[destination] = self._counts[source]

    def _hold(self, rows: int, positions: int) -> None:
        """Make room for `positions` pending positions in `rows` rows."""
        old_rows, old_positions = self._tokens.shape
        if rows <= old_rows and positions <= old_positions:
            return
        size = (max(rows, old_rows), max(positions, old_positions))
        features, tokens = self._features, self._tokens
        self._features = features.new_zeros(*size, self._width)
        self._tokens = tokens.new_zeros(size)
        self._features[:old_rows, :old_positions] = features
        self._tokens[:old_rows, :old_positions] = tokens

    # -- drafting ------------------------------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request]) -> DraftTree:
        roots = root_tokens(requests, self._device)
        drafted = [request.speculative for request in requests]
        if not any(drafted):
            return root_only(roots)
        committed = [request.length - 1 for request in requests]
        hidden = self._extend(roots, committed)
        if self.shape.is_chain:
            return chain_tree(roots, self._draft_chain(hidden, committed), drafted)
        return rerank(roots, *self._draft_beams(hidden, committed), self.shape.num_draft_tokens, drafted)

    def _extend(self, roots: Tensor, committed: list[int]) -> Tensor:
        """Read the pending positions; the head's hidden state at each row's last one, [B, H]."""
        rows, counts = len(committed), self._counts[: len(committed)]
        longest = max(counts)
        last = torch.tensor(counts, device=self._device) - 1
        every = torch.arange(rows, device=self._device)
        # The last pending position is followed by the root; a prompt's first token was not known when it was admitted.
        self._tokens[every, last] = roots
        before = [total - count for total, count in zip(committed, counts, strict=True)]
        causal = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril().expand(rows, -1, -1)
        positions = torch.tensor(before, device=self._device)[:, None] + torch.arange(longest, device=self._device)
        hidden = self._run(
            self._tokens[:rows, :longest],
            self._head.fuse(self._features[:rows, :longest]),
            positions,
            TreePlan(self.cache, before, causal),
            max(before) + longest,
        )
        return hidden[every, last]

    def _draft_chain(self, hidden: Tensor, committed: list[int]) -> Tensor:
        """Greedy drafts [B, num_steps], target ids."""
        rows, steps = len(committed), self.shape.num_steps
        start = torch.tensor(committed, device=self._device)[:, None]
        drafts = [self._best(hidden)]
        for level in range(1, steps):
            seen = torch.ones(rows, 1, level, dtype=torch.bool, device=self._device)
            plan = TreePlan(self.cache, committed, seen)
            hidden = self._run(drafts[-1], hidden[:, None], start + (level - 1), plan, max(committed) + level)[:, 0]
            drafts.append(self._best(hidden))
        return torch.cat(drafts, dim=1)

    def _best(self, hidden: Tensor) -> Tensor:
        """[B, H] -> the most probable token, [B, 1] target ids."""
        return self._to_target[self._head.logits(hidden).max(dim=-1, keepdim=True).indices]

    def _draft_beams(self, hidden: Tensor, committed: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """EAGLE-2's first phase: expand the k best nodes of each level by their k best children.

        Returns the candidates in level order: tokens, parents (candidate numbers, -1 the root), levels [C], scores.
        """
        k, steps, rows = self.shape.top_k, self.shape.num_steps, len(committed)
        start = torch.tensor(committed, device=self._device)[:, None]
        scores, tokens = self._children(hidden[:, None])  # [B, 1, k]
        scores, tokens = scores[:, 0], tokens[:, 0]
        parents = torch.full_like(tokens, -1)
        found = [(tokens, parents, scores)]
        beams = torch.arange(k, device=self._device).expand(rows, k)  # the beams' candidate numbers
        hidden = hidden[:, None].expand(-1, k, -1)
        own = torch.eye(k, dtype=torch.bool, device=self._device).expand(rows, k, k)
        seen, total = own, k
        for level in range(1, steps):
            plan = TreePlan(self.cache, committed, seen)
            positions = (start + (level - 1)).expand(rows, k)
            hidden = self._run(tokens, hidden, positions, plan, max(committed) + level)
            child_scores, child_tokens = self._children(hidden)  # [B, k, k]
            child_scores = (child_scores + scores[:, :, None]).flatten(1)
            child_tokens = child_tokens.flatten(1)
            found.append((child_tokens, beams.repeat_interleave(k, dim=1), child_scores))
            if level == steps - 1:
                break
            scores, chosen = child_scores.topk(k, dim=1)
            tokens = child_tokens.gather(1, chosen)
            parent = chosen // k  # which beam each new beam grew from: it inherits hidden state and ancestors
            hidden = hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[2]))
            seen = torch.cat((seen.gather(1, parent[:, :, None].expand(-1, -1, seen.shape[2])), own), dim=2)
            beams = total + chosen
            total += k * k
        tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return tokens, parents, self._levels, scores

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n, H] -> log-probabilities (<= 0, fp32) and target ids of the k best children, [B, n, k] each."""
        logits = self._head.logits(hidden).float()
        top, ids = logits.topk(self.shape.top_k, dim=-1)
        # A child's score must never exceed its parent's (rerank relies on it), nor be unordered.
        scores = (top - logits.logsumexp(dim=-1, keepdim=True)).clamp(max=0.0)
        return torch.nan_to_num(scores, nan=-torch.inf, neginf=-torch.inf), self._to_target[ids]

    def _run(self, tokens: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan, reach: int) -> Tensor:
        """One pass of the head over tokens [B, n], hidden [B, n, H], positions [B, n] < reach -> [B, n, H]."""
        rows, count = tokens.shape

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(rows, count, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            return plan.attend(0, q, k, v, self._scaling, None, None).flatten(0, 1)

        embeds = self._embed(tokens).to(self._dtype).flatten(0, 1)
        out = self._head(embeds, hidden.flatten(0, 1), positions.flatten(), attend, reach)
        return out.view(rows, count, -1)
