"""Drafts with an autoregressive head (EAGLE-3, EAGLE-1/2, MTP): chains, and EAGLE-2's dynamic trees.

Shapes: B rows, H head hidden size, k beams, D size of the draft vocabulary.

At position i the head reads (feature of i, embedding of token i+1) and predicts token i+2. With L tokens committed and
the last one, x_{L-1}, as the tree's root:

    position      ..  L-3      L-2        L-1        L        ..
    next token    ..  x_{L-2}  x_{L-1}    level 1    level 2
    predicts      ..  x_{L-1}  level 1    level 2    level 3
    feature       ..  target's target's   the head's own hidden state of the parent

Positions up to L-2 use the target's features. They are "unread" until the next draft reads them, or until CATCH_UP of
them wait and `skip` reads them. Later reads overwrite the cache entries of drafted nodes after L-2. A drafted node
attends to the committed positions and its ancestors. `draft_rollout.py` describes heads with several MTP layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from toolkit.checkpoint.draft_dir import DraftCheckpoint, check_draft_fits
from toolkit.infer.attention.metadata import FEW, AttentionMetadata, prompts_metadata
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.draft_rollout import (
    DraftMasks,
    DraftRollout,
    DraftSampling,
    Draws,
    draft_beams,
    draft_sampling_for,
    probed_positions,
    rerank,
)
from toolkit.infer.drafters.drafter import Drafter, DraftRanks, unread_tokens
from toolkit.infer.drafters.drafting_head import DraftingHead, DraftInputs, HeadReader
from toolkit.infer.kernels.tree_reference import AcceptedPath, Candidates
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, candidate_count, chain_tree, root_only, upload
from toolkit.infer.request.params import DraftShapeError
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult
from toolkit.targets.target import Target

CATCH_UP = 160  # unread positions of a row at which `skip` reads them; an answer that ends sooner saves the read


@dataclass(frozen=True)
class Pending:
    """What a draft leaves for the end of its round. starts: where `inputs` stores the accepted positions of each row;
    None: nowhere. carry: the next carry of `inputs`; None: the head has not read the unread positions."""

    starts: list[int] | None
    carry: Tensor | None


class HeadDrafter(Drafter):
    """Owns the head's caches, its unread inputs and its hooks on the target. module: the head."""

    reader_class = HeadReader

    def __init__(
        self, target: Target, draft: DraftCheckpoint, shape: DraftShape, pool: PagePool, *, draws: Draws | None = None
    ) -> None:
        """Arguments: see `choose_drafter`."""
        check_draft_fits(draft, target)
        self.module = draft.head
        self._head = DraftingHead(draft, target)
        # Remove the hooks also if the drafter is dropped without close(): the target may stay in use.
        self._unhook = weakref.finalize(self, self._head.remove)
        self._device = target.device
        self.to_target = self._head.to_target
        self.reader = self.reader_class(self._head, target, pool)
        width, hidden_size = self._head.width, self._head.config.hidden_size
        self.inputs = DraftInputs(width, self._head.stages, hidden_size, self.reader.dtype, self._device)
        self._read: list[int] = []  # by row: positions that every stage has read
        self.pending = Pending(None, None)
        # Replays the recorded draft of a shape; returns None if there is none. graphs/graph_rounds.py puts it here.
        self.recorded_draft: Callable[[DraftShape], DraftTree | None] = lambda _shape: None
        self._draws = draws
        self.set_shape(shape)

    def set_shape(self, shape: DraftShape) -> None:
        if shape.top_k > len(self.to_target):
            raise DraftShapeError(
                f"draft shape {shape.name}: top_k exceeds the draft vocabulary of {len(self.to_target)} tokens; "
                "draft with fewer branches"
            )
        most = 1 + candidate_count(shape.num_steps, shape.top_k)
        if not self._head.config.drafts_at_once and shape.num_draft_tokens > most:
            raise DraftShapeError(
                f"draft shape {shape.as_text()}: num_draft_tokens counts the root and must be at most {most} for this "
                "head, the nodes that num_steps levels of top_k beams can offer"
            )
        self.shape: DraftShape = shape
        self._by_rows: list[tuple[int, DraftShape]] = []

    def set_shapes(self, by_rows: Mapping[int, DraftShape]) -> None:
        """Drafts the shape of the smallest number of rows that a round does not exceed, else that of the largest."""
        self._by_rows = sorted(by_rows.items())

    def take_rows(self, count: int) -> None:
        """Takes the shape of rounds of `count` rows."""
        if self._by_rows:
            self.shape = next((shape for rows, shape in self._by_rows if count <= rows), self._by_rows[-1][1])

    def weights_changed(self) -> None:
        self._head.weights_changed()

    def close(self) -> None:
        self._unhook()

    @property
    def lookahead(self) -> int:
        return self._head.stages

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        # After the longest unread row: the drafted nodes of every level but the last.
        return (CATCH_UP if skips else 0) + shape.num_steps + 1 + shape.top_k * (shape.num_steps - 1)

    def _drafts(self, request: Request) -> bool:
        """Returns whether the request gets drafts. The prompt must have at least `stages` tokens for it.

        Stage k reads its first position k tokens later than stage 0.
        """
        return request.speculative and len(request.prompt_ids) >= self._head.stages

    # -- following the target ------------------------------------------------------------------------------------------

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        """Reads the positions that the target has read, except the last of a text: its next token is not known yet."""
        inputs, rows, stages = self.inputs, len(requests), self._head.stages
        here, whole = slice(first_row, first_row + rows), requests[0].unread <= tokens
        if whole:
            inputs.hold(first_row + rows, 1)
            inputs.counts[first_row:] = [1] * rows
            # A row without drafts may use pages that the head has never written.
            read = [max(0, len(one.context_ids) - stages) if self._drafts(one) else 0 for one in requests]
            self._read[first_row:] = read
        if not any(map(self._drafts, requests)):
            return
        features = self.features()
        counts, starts = [min(tokens, one.unread) for one in requests], [one.n_read for one in requests]
        ends = list(accumulate(counts))
        if whole:
            inputs.features[here, 0] = features[0, upload(ends, self._device) - 1]
            preempted = {row: one.output_ids[-1] for row, one in enumerate(requests, start=first_row) if one.output_ids}
            inputs.set_first_tokens(preempted)  # they lost their pages
        at = upload([[start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]], self._device)
        reach, hidden = max(map(sum, zip(starts, counts, strict=True))), self._head.first_hidden(features)
        for stage, cache in enumerate(self.reader.caches):
            # The token after position i of stage k is i + 1 + k. At the end of a text it is not known: what is written
            # there is overwritten.
            after = unread_tokens(requests, counts, self._device, ahead=1 + stage)
            metadata = prompts_metadata(cache, first_row, starts, counts)
            if self.reader.writes_alone:
                self.reader.write(after, hidden, at, metadata, reach)
                break
            hidden = self.reader.read(stage, after, hidden, at, metadata, reach)
            if whole and stage + 1 < stages:
                last = [max(end - 2 - stage, end - n) for end, n in zip(ends, counts, strict=True)]
                inputs.carry[here, stage] = hidden[0, upload(last, self._device)]

    def positions_read(self, row: int, request: Request) -> int:
        return self._read[row]

    @property
    def unread(self) -> list[int]:
        """Number of unread positions of each row."""
        return self.inputs.counts

    def first_tokens(self, requests: Sequence[Request]) -> None:
        """Stores the first sampled token as the one after a prompt's last position; `admit` did not know it."""
        first = {row: one.output_ids[0] for row, one in enumerate(requests) if len(one.output_ids) == 1}
        self.inputs.set_first_tokens(first)

    def features(self) -> Tensor:
        """Takes the features of the target's last forward, [B, N, W], in the dtype of the head."""
        return self._head.features().to(self.reader.dtype)

    def keep_features(
        self, rows: RoundRows, tree: DraftTree, followed: AcceptedPath, committed: Tensor, features: Tensor
    ) -> None:
        """Appends the features [B, N, W] of the accepted path, and the tokens chosen after them, to the unread
        positions.

        committed [B]: number of tokens each row committed; 0 for padding rows.
        """
        starts, carry = self.pending.starts, self.pending.carry
        if starts is None:
            return
        if carry is None:
            rows.unread.add_(committed)
        else:
            torch.clamp(committed, min=1, out=rows.unread)  # a padding row keeps its one position
            if carry.shape[1]:
                self.inputs.carry[: len(carry)] = carry
        if not tree.is_chain:  # the accepted nodes of a chain are the first ones
            features = features.gather(1, followed.path[:, :, None].expand(-1, -1, features.shape[2]))
        self.inputs.append(features, followed.tokens, starts)

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        """Updates the counts of unread positions; the host knows the accepted lengths only now."""
        if (starts := self.pending.starts) is not None:
            counts = [start + accepted + 1 for start, accepted in zip(starts, result.accepted, strict=True)]
            self.inputs.counts[: len(requests)] = counts

    def observe_recorded(self, requests: Sequence[Request], result: VerifyResult) -> None:
        """Replaces propose and observe after a recorded round, in which the head has read all unread positions."""
        self.pending = Pending([0] * len(requests), None)
        self._note_read(requests)
        self.observe(requests, result)

    def move_row(self, destination: int, source: int) -> None:
        self.inputs.move_row(destination, source)
        self._read[destination] = self._read[source]

    # -- drafting ------------------------------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        own = [self.shape_of(request) for request in requests]
        drafted = [shape for shape in own if shape is not None]
        if not drafted:
            self.pending = Pending(None, None)
            return root_only(rows.roots)
        shape = DraftShape.covering(drafted)  # one rollout for the batch; each row keeps its part
        # Requests choose shapes of their own; a graph of each would take memory without a limit.
        tree = None if shape != self.shape or self.why_eager(requests, own) else self.recorded_draft(shape)
        if tree is None:
            sampling = draft_sampling_for(requests, self.to_target, self._draws)
            within = DraftMasks.of(requests, self.to_target)
            tree = self.draft(rows, shape, own, sampling, max(self.unread[: len(requests)]), within)
        self._note_read(requests)
        return tree

    def why_eager(self, requests: Sequence[Request], own: Sequence[DraftShape | None]) -> str | None:
        """Returns why no graph can draft for these requests, whose shapes are `own`; None: one can."""
        if own[0] is None or any(one != own[0] for one in own):
            return "requests have different draft shapes, or no drafts"
        if self.ends_chains:
            return "`draft_confidence` is set, and the host ends the chains"
        if any(one.grammar is not None for one in requests):
            return "a request has a grammar, which the host reads at every node"
        if self._draws is not None and any(map(self._draws, requests)):
            return "drafts are drawn (`verify`)"
        if max(self.unread[: len(requests)]) > own[0].num_steps + 1:
            return "the head has more unread positions than one round leaves"
        return None

    def draft(
        self,
        rows: RoundRows,
        shape: DraftShape,
        own: Sequence[DraftShape | None],
        sampling: DraftSampling,
        unread: int,
        within: DraftMasks | None = None,
    ) -> DraftTree:
        """Reads the unread positions, at most `unread` a row, and builds a tree on each root.

        own: the part of `shape` that each row keeps; None keeps the root only. within: the rows' grammars. Without them
        the method can be recorded: no decision on the host depends on device values.
        """
        nodes = self._read_unread(rows, unread, shape)
        nodes.within = within
        if shape.is_chain:
            drafts = self._draft_chain(nodes, shape, sampling)
            kept = [0 if one is None else one.num_steps for one in own]
            tree = self._ended(nodes, chain_tree(rows.roots, drafts, kept, sampling.proposal()))
        else:
            limits = None if all(one in (None, shape) for one in own) else own  # None: every row keeps all of `shape`
            found = draft_beams(nodes, shape, limits, self.to_target)
            kept = [1 if one is None else one.num_draft_tokens for one in own]
            tree = rerank(rows.roots, found, kept, shape.num_steps)
        self._finish(nodes)
        return tree

    def candidates(self, requests: Sequence[Request], rows: RoundRows) -> Candidates:
        """Returns all candidates of the drafter's shape below each root, before the best of them become a tree.

        Those of a chain have falling scores. The head reads as in propose. Rows without drafts have candidates without
        a meaning.
        """
        nodes = self._read_unread(rows, max(self.unread[: len(requests)]), self.shape)
        if self.shape.is_chain:
            tokens = self._draft_chain(nodes, self.shape, DraftSampling())
            number = torch.arange(self.shape.num_steps, device=self._device).expand_as(tokens)
            found = Candidates(tokens, number - 1, -number.float())
        else:
            found = draft_beams(nodes, self.shape, None, self.to_target)
        self._finish(nodes)
        self._note_read(requests)
        return found

    def skip(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        """Returns roots only. The head reads the unread positions when a row has CATCH_UP of them."""
        drafts = [self._drafts(request) for request in requests]
        counts = self.unread[: len(requests)]
        if any(drafts) and max(counts) >= CATCH_UP:
            self._finish(self._read_unread(rows, max(counts)))
            self._note_read(requests)
        else:
            # A row without drafts keeps its newest position only; the head never reads it.
            starts = [count if one else 0 for count, one in zip(counts, drafts, strict=True)]
            self.pending = Pending(starts if any(drafts) else None, None)
        return root_only(rows.roots)

    def probe(self, requests: Sequence[Request], rows: RoundRows, width: int) -> tuple[DraftTree, DraftRanks]:
        """Reads the unread positions. Drafts at each of them whose next token is unread too, and so known."""
        if not any(map(self._drafts, requests)):
            self.pending = Pending(None, None)
            return root_only(rows.roots), [[] for _ in requests]
        counts = self.unread[: len(requests)]
        nodes = self._read_unread(rows, max(counts), keep=1 + probed_positions(len(counts)))
        ranks = nodes.shadow_ranks([min(count, nodes.nodes) for count in counts], self.to_target, width)
        self._finish(nodes)
        self._note_read(requests)
        return root_only(rows.roots), ranks

    def shape_of(self, request: Request) -> DraftShape | None:
        """Returns the request's own shape within the drafter's, or the drafter's; None for a root only."""
        if not self._drafts(request):
            return None
        return self.shape if request.shape is None else request.shape.within(self.shape)

    def _read_unread(
        self, rows: RoundRows, unread: int, shape: DraftShape | None = None, keep: int = 1
    ) -> DraftRollout:
        """Starts a rollout of `shape` with the unread positions of every row, at most `unread`. None: no drafts.

        Of many positions only the last `keep` of each row get states, if the keys and values of the others need none.
        """
        held = (slice(len(rows.roots)), slice(unread))
        levels = {} if shape is None else {"levels": shape.num_steps - 1, "width": shape.top_k}
        # Without contiguous(), torch runs one matmul per row and copies the weights for each.
        hidden = self._head.first_hidden(self.inputs.features[held].contiguous())
        tokens = self.inputs.tokens[held]
        if self.reader.writes_alone and unread > max(FEW, keep):
            rows, tokens, hidden = self._write_unread(rows, tokens, hidden, keep)
        return DraftRollout(self.reader, rows, tokens, hidden, self.inputs.carry[held[0]], **levels)

    def _write_unread(
        self, rows: RoundRows, tokens: Tensor, hidden: Tensor, keep: int
    ) -> tuple[RoundRows, Tensor, Tensor]:
        """Writes the keys and values of the unread positions, tokens [B, P] and hidden [B, P, H]. Returns the three as
        if only the last `keep` of each row were unread."""
        unread, begin = tokens.shape[1], rows.lengths - rows.unread
        at, reach = torch.arange(unread, device=self._device), rows.span(unread)
        metadata = AttentionMetadata(self.reader.caches[0], rows.table, begin, reach, unread, None, None)
        self.reader.write(tokens, hidden, begin[:, None] + at, metadata, reach)
        left = rows.unread.clamp(max=keep)
        places = ((rows.unread - left)[:, None] + at[:keep]).clamp(max=unread - 1)  # the clamp is for padding
        hidden = hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[2]))
        return replace(rows, unread=left), tokens.gather(1, places), hidden

    def _finish(self, nodes: DraftRollout) -> None:
        """Lets all stages read the unread positions. Does not change `inputs`, so that a failed round can run again."""
        carry = nodes.finish()
        self.pending = Pending([0] * len(carry), carry)

    def _note_read(self, requests: Sequence[Request]) -> None:
        for row, request in enumerate(requests):
            if self._drafts(request):
                self._read[row] = request.length - self._head.stages

    def _ended(self, nodes: DraftRollout, chain: DraftTree) -> DraftTree:
        """Returns what is kept of a chain: all of it."""
        return chain

    def _draft_chain(self, nodes: DraftRollout, shape: DraftShape, sampling: DraftSampling) -> Tensor:
        """Returns the drafts as target ids, [B, num_steps]."""
        hidden = nodes.at_roots()
        drafts = [self.to_target[sampling(nodes.logits(hidden))]]
        for _ in range(1, shape.num_steps):
            hidden = nodes.grow(hidden, drafts[-1])
            drafts.append(self.to_target[sampling(nodes.logits(hidden))])
        return torch.cat(drafts, dim=1)
