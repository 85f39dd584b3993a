"""The speculative engine: many requests, one target forward per step, exactly the target's own tokens.

Shapes: B running rows, N nodes a row, P padded prompt length, H hidden size, V vocabulary.

A row whose sequence has L tokens holds the target's keys of the first L-1; the last token is the root of its next tree.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from toolkit.infer.attention.attention_plan import TreePlan, prompt_plan
from toolkit.infer.attention.kv_cache import KVCache
from toolkit.infer.attention.page_pool import PAGE_SIZE, PagePool
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.detokenize import Detokenizer
from toolkit.infer.draft_tree import DraftShape, DraftTree, root_only
from toolkit.infer.drafters.adaptive_drafter import AdaptiveDrafter
from toolkit.infer.drafters.choose_drafter import Draft, choose_drafter
from toolkit.infer.drafters.drafter import NoDrafter, unread_tokens
from toolkit.infer.errors import DraftShapeError, EngineError
from toolkit.infer.kv_memory import KVMemory
from toolkit.infer.request import PromptTooLongError, Request, VerifyEvent
from toolkit.infer.sampling.choose_verifier import choose_verifier
from toolkit.infer.sampling.sampler import Choices, Sampler
from toolkit.infer.sampling.sampling_params import SamplingParams
from toolkit.infer.scheduler import Move, Scheduler
from toolkit.infer.verify import Walk, moved_entries, walk
from toolkit.target.load import Target

__all__ = ["Engine", "PromptTooLongError"]

DEFAULT_SHAPE = DraftShape.chain(4)
CHUNK = 1024  # prompt tokens between two rounds of those who already write
ROOM = 1024  # addresses of a row beyond the context, for drafted nodes and padding
MEMORY_SHARE = 0.25  # of the machine's (or GPU's) memory for the target's cache, unless told


class Engine:
    """Owns the target's KV cache and the running requests. Not thread-safe: one thread steps it.

    draft: a head, n-gram lookup, or None to decode plainly. shape defaults to a chain of 4. max_batch: requests running
    at once; more wait. max_context: tokens of prompt and answer together, at most (and by default) what the target was
    made for. verify: how drafts are accepted at a temperature above 0: "follow", and for chains of a head "rejection"
    and "block" (see verifiers.py). All are exact in law; with "follow" a seed writes the tokens of plain decoding, with
    the others its tokens also depend on what was drafted. Greedy answers are the same with each. adaptive: in every
    step draft `shape`, something smaller or nothing, whatever writes most tokens a second now (see adaptive.py); False:
    always `shape`, as measurements of a shape need it.

    max_total_tokens: tokens that running requests and cached prefixes hold together; where they do not suffice,
    prefixes go first, then the youngest requests wait and are read again. None: whole contexts for max_batch requests,
    at most a quarter of the memory. prefix_cache: prompts that begin like earlier texts are not read again there.
    chunked_prefill_size: prompt tokens read between two rounds of running answers. scattered_pages: the layout of
    page_pool.py; None: on a GPU.
    Raises DraftDirError for a head that does not fit, UnsupportedTargetError for a target it cannot reproduce.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        shape: DraftShape | None = None,
        *,
        max_batch: int = 16,
        max_context: int | None = None,
        verify: str = "follow",
        adaptive: bool = False,
        max_total_tokens: int | None = None,
        prefix_cache: bool = True,
        chunked_prefill_size: int = CHUNK,
        scattered_pages: bool | None = None,
    ) -> None:
        if shape is not None and draft is None:
            raise EngineError(
                f"draft shape {shape.name} was given without a draft head; give one, or leave the shape out"
            )
        if max_batch < 1:
            raise EngineError(f"max_batch is {max_batch}; at least 1 request must be able to run")
        self.target = target
        with torch.inference_mode():
            self._forward = TargetForward(target)
            limit = self._forward.max_context
            self.max_context = limit if max_context is None else min(max_context, limit)
            row = self.max_context + max(ROOM, chunked_prefill_size)
            scattered = target.device.type != "cpu" if scattered_pages is None else scattered_pages
            pool = PagePool(max_batch, row, self._pages(max_batch, max_total_tokens), homes=not scattered)
            self._cache = KVCache(self._forward.kv_shape, pool)
            self.shape = None if draft is None else shape or DEFAULT_SHAPE
            self.verifier = choose_verifier(verify, draft, self.shape)
            self.drafter = choose_drafter(target, draft, self.shape, pool, drawn=self.verifier.draws_drafts)
        if adaptive and self.shape is not None:
            self.drafter = AdaptiveDrafter(self.drafter, self.shape)
        self._memory = KVMemory(pool, self.drafter.lookahead, self._slack(self.shape), prefix_cache)
        self.scheduler = Scheduler(max_batch, chunked_prefill_size, self._memory)
        self._sampler: Sampler | None = None  # None: the rows changed
        self._detokenizer = Detokenizer(target.tokenizer)
        self._names, self._arrivals = itertools.count(), itertools.count()

    # -- for callers ---------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculative: bool = True,
        shape: DraftShape | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Queue a prompt. `shape`: what is drafted for it alone, at most what the engine drafts; None: the same.

        Raises PromptTooLongError, DraftShapeError, EngineError if it is empty or has ids outside the vocabulary,
        SamplingError if a stop id or a biased id is outside.
        """
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise EngineError("the prompt has no tokens; at least one is needed")
        if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
            raise EngineError(
                f"the prompt has ids from {min(prompt)} to {max(prompt)}; the target's vocabulary is "
                f"0..{self.target.vocab_size - 1}: tokenise with the target's own tokenizer"
            )
        if len(prompt) >= self.max_context:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens; the context holds {self.max_context}, the answer included: "
                f"shorten the prompt to at most {self.max_context - 1} tokens"
            )
        if shape is not None and (self.shape is None or not shape.fits_in(self.shape)):
            most = "nothing: it has no drafter" if self.shape is None else f"{self.shape.name} ({self.shape.as_text()})"
            raise DraftShapeError(
                f"a request came with draft shape {shape.as_text()}; the engine drafts {most}: ask for no more levels, "
                "branches or nodes than that"
            )
        params.check_ids(self.target.vocab_size)
        request = Request(
            id=request_id if request_id is not None else f"request-{next(self._names)}",
            prompt_ids=prompt,
            params=params,
            speculative=speculative and not isinstance(self.drafter, NoDrafter),
            shape=shape,
            arrival=next(self._arrivals),
            stop_set=frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.target.stop_ids),
            token_limit=min(params.max_tokens, self.max_context - len(prompt)),
            text=self._detokenizer.stream(params.stop, unsearched=params.min_tokens) if params.stop else None,
        )
        self.scheduler.waiting.append(request)
        return request

    @torch.inference_mode()
    def abort(self, request: Request) -> None:
        """End a request now; its finish_reason becomes "abort" and its cache row is free for the next step."""
        if request.finished:
            return
        request.finish_reason, request.finished_at = "abort", time.perf_counter()
        if not self.scheduler.drop_unstarted(request):
            self._finish()

    @property
    def max_batch(self) -> int:
        """Requests running at once."""
        return self.scheduler.max_batch

    @property
    def _running(self) -> list[Request]:
        return self.scheduler.running

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def set_shape(self, shape: DraftShape) -> None:
        """Draft with another shape from the next step on.

        Raises `EngineError` when there is no draft head, DraftShapeError for one that head or verifier cannot do."""
        self.verifier.check_shape(shape)
        slack = self._slack(shape)
        self.drafter.set_shape(shape)
        self.shape, self._memory.slack = shape, slack

    def close(self) -> None:
        """Take the engine's hooks off the target. The engine must not be stepped afterwards."""
        self.drafter.close()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One round. Returns the requests that got tokens or ended in it."""
        admitted = self._schedule()
        touched = self._running + [request for request in admitted if request.finished]
        if self._running:
            started = time.perf_counter()
            tree = self._propose()
            proposed = time.perf_counter()
            found, choices = self._verify(tree)
            self._commit(tree, found, choices, started, proposed, time.perf_counter())
            self._finish()
        return touched

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_finish: Callable[[Request], None] | None = None,
        speculative: bool = True,
    ) -> list[Request]:
        """Run prompts to their ends; the answers come back in the prompts' order. `on_finish` sees each as it ends.

        Raises what add_request raises, before anything has run.
        """
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(settings) != len(prompts):
            raise EngineError(
                f"{len(prompts)} prompts came with {len(settings)} sampling settings; give one, or one for each"
            )
        requests: list[Request] = []
        try:
            for place, (prompt, one) in enumerate(zip(prompts, settings, strict=True)):
                try:
                    requests.append(self.add_request(prompt, one, speculative=speculative))
                except ValueError as error:
                    error.add_note(f"this was prompt {place} of {len(prompts)} (counted from 0)")
                    raise
            mine = set(requests)
            while any(not request.finished for request in mine):
                ended = [request for request in self.step() if request.finished]
                for request in ended:
                    if request in mine and on_finish is not None:
                        on_finish(request)
                mine.difference_update(ended)
        finally:
            for request in requests:
                self.abort(request)
        return requests

    # -- the five verbs ------------------------------------------------------------------------------------------------

    def _schedule(self) -> list[Request]:
        """Pages for the running rows; then prompts are read, and their first tokens sampled, as far as it is due."""
        self._change_rows(self.scheduler.make_room)
        budget = self.scheduler.chunk if self._running else None  # nobody waits for a token: read all
        admitted: list[Request] = []
        while budget is None or budget > 0:
            group, tokens = self._read_some(budget or self.scheduler.chunk)
            if not tokens:
                break
            admitted += group
            if budget is not None:
                budget -= tokens
        if admitted:
            self._finish()
        return admitted

    def _read_some(self, most: int) -> tuple[list[Request], int]:
        """Read the prompts whose turn it is. Returns those that are complete now, and the padded tokens read."""
        scheduler = self.scheduler
        group = scheduler.next_group(most)
        if group:
            tokens = max(request.unread for request in group)
            self._read(len(self._running) - len(group), group, tokens)
            return group, tokens * len(group)
        request = scheduler.reading
        if request is None:
            return [], 0
        tokens = self._chunk_of(request, most)
        row = len(self._running)
        if tokens == request.unread:
            group = [scheduler.reading_is_complete()]
        self._read(row, [request], tokens)
        return group, tokens

    def _chunk_of(self, request: Request, most: int) -> int:
        """How much of its prompt is read now. The last part has the tokens that a drafter has to see together."""
        left = request.unread - most
        if left <= 0:
            return request.unread
        behind = max(left, self.drafter.lookahead)
        return request.unread - behind if request.unread > behind else request.unread

    def _propose(self) -> DraftTree:
        return self.drafter.propose(self._running)

    def _verify(self, tree: DraftTree) -> tuple[Walk, Choices]:
        """One target forward over every node; its laws and the verifier decide how far each tree was right."""
        lengths = self._lengths()
        plan = TreePlan(self._cache, lengths, tree.mask, tree.depths)
        positions = torch.tensor(lengths, device=self.target.device)[:, None] + tree.depths
        # Nodes past the context are never committed; clamping only keeps learned position tables in range.
        hidden = self._forward(tree.tokens, positions.clamp(max=self.max_context - 1), plan)
        choices = self._choose(hidden, positions + 1, tree)
        found = walk(tree, choices.tokens)
        self.drafter.observe(self._running, found)
        if not tree.is_chain:
            self._compact(found, lengths)
        return found, choices

    def _commit(
        self, tree: DraftTree, found: Walk, choices: Choices, started: float, proposed: float, verified: float
    ) -> None:
        """Append what was accepted and the target's own token behind it, cut exactly at stops and limits."""
        batch = len(self._running)
        appended = []
        for request, tokens, accepted in zip(self._running, found.tokens.tolist(), found.accepted, strict=True):
            appended.append(request.append_run(tokens[: accepted + 1], accepted))
        if choices.logprobs is not None:
            choices.logprobs.record(self._running, found)
        times = (proposed - started, verified - proposed, time.perf_counter() - verified)
        for row, (request, count) in enumerate(zip(self._running, appended, strict=True)):
            accepted = found.accepted[row]
            offer = (tree.offered[row], tree.depth_offered[row])
            request.events.append(VerifyEvent(*offer, accepted, count, count < accepted + 1, *times, batch))

    def _finish(self) -> None:
        """Free the rows of ended requests: the last row moves into each hole."""
        self._change_rows(lambda: self.scheduler.retire(self._keep))

    # -- their parts ---------------------------------------------------------------------------------------------------

    def _read(self, first_row: int, group: list[Request], tokens: int) -> None:
        """Read the next `tokens` tokens of the rows from first_row on; those that are complete get their first one."""
        device = self.target.device
        starts = [request.n_read for request in group]
        input_ids = unread_tokens(group, tokens, device)
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(tokens, device=device)
        plan = prompt_plan(self._cache, first_row, starts, tokens)
        hidden = self._forward(input_ids, positions.clamp(max=self.max_context - 1), plan)
        self.drafter.admit(first_row, group, tokens)
        whole = group[0].unread <= tokens
        last = [request.unread - 1 for request in group]
        for request in group:
            request.n_read += min(tokens, request.unread)
        if whole:
            self._sampler = None
            self._first_tokens(group, input_ids, hidden, last)
            for row, request in enumerate(group, start=first_row):
                request.ready = True
                self._keep(row, request)

    def _first_tokens(self, group: list[Request], input_ids: Tensor, hidden: Tensor, last: list[int]) -> None:
        """Sample what follows prompts that end at the places `last` of input_ids [B, N]; hidden [B, N, H].

        Requests that had lost their pages have tokens already."""
        fresh = [row for row, request in enumerate(group) if not request.output_ids]
        if not fresh:
            return
        rows, ends = (torch.tensor(numbers, device=hidden.device) for numbers in (fresh, [last[row] for row in fresh]))
        requests = [group[row] for row in fresh]
        positions = torch.tensor([[len(request.prompt_ids)] for request in requests], device=hidden.device)
        roots = root_only(input_ids[rows, ends])
        logits = self.target.logits(hidden[rows, ends])[:, None]
        first = Sampler(requests, self.target.vocab_size, hidden.device)(logits, positions, roots)
        for request, token in zip(requests, first.tokens[:, 0].tolist(), strict=True):
            request.append_run([token], 0)
        if first.logprobs is not None:
            first.logprobs.record(requests, walk(roots, first.tokens))

    def _keep(self, row: int, request: Request) -> None:
        """Let what a row has read be found again."""
        if request.ready:
            read = min(request.length - 1, self.drafter.positions_read(row, request))
            self._memory.keep(row, request.prompt_ids + request.output_ids, read)

    def _change_rows(self, change: Callable[[], list[Move]]) -> None:
        """Let the scheduler take rows away; the drafter and the sampler follow."""
        before = len(self._running)
        for row, source in change():
            self.drafter.move_row(row, source)
        if len(self._running) < before:
            self._sampler = None

    def _slack(self, shape: DraftShape | None) -> int:
        """Positions that a step may write behind a row's tokens. Raises DraftShapeError when they have no place."""
        slack = 1 if shape is None else max(shape.num_draft_tokens, self.drafter.reach(shape))
        if slack > ROOM or self._cache.pool.capacity < self._cache.pool.pages_of(self.max_context + slack):
            held = self._cache.pool.capacity * self._cache.pool.page_size
            raise (EngineError if shape is None else DraftShapeError)(
                f"one request may need {self.max_context} tokens of context and {slack} for drafted nodes "
                f"({ROOM} at most); the cache holds {held}: draft less, give it more tokens (max_total_tokens), "
                "or lower max_context"
            )
        return slack

    def _pages(self, max_batch: int, max_total_tokens: int | None) -> int:
        """How many pages there are."""
        if max_total_tokens is not None:
            return max_total_tokens // PAGE_SIZE
        whole = max_batch * (self.max_context + ROOM)
        fits = int(_memory_bytes(self.target.device) * MEMORY_SHARE) // self._forward.kv_shape.bytes_per_token
        return max(min(whole, fits), self.max_context + ROOM) // PAGE_SIZE

    def _lengths(self) -> list[int]:
        """Per row: positions whose target keys are cached."""
        return [request.length - 1 for request in self._running]

    def _choose(self, hidden: Tensor, positions: Tensor, tree: DraftTree) -> Choices:
        """The target's token after every node: hidden [B, N, H], positions [B, N] of those tokens."""
        if self._sampler is None or self._sampler.outdated:
            self._sampler = Sampler(self._running, self.target.vocab_size, self.target.device, self.verifier)
        nodes = self.verifier.nodes_at_once(*hidden.shape[:2])
        parts = zip(hidden.split(nodes, dim=1), positions.split(nodes, dim=1), strict=True)
        return Choices.joined(
            [self._sampler(self.target.logits(part), at, tree, i * nodes) for i, (part, at) in enumerate(parts)]
        )

    def _compact(self, found: Walk, lengths: list[int]) -> None:
        """Move the keys of accepted nodes to the places they would have in plain decoding."""
        rows, to, source = moved_entries(found, torch.tensor(lengths, device=self.target.device))
        if len(rows):
            places = self._cache.pool.places
            self._cache.move_entries(places(rows, to), places(rows, source))

    def check_integrity(self) -> None:
        """Assert that queue, rows, pages and caches agree; tests call it after every step."""
        self.scheduler.check_integrity()
        assert max(self._lengths(), default=0) < self.max_context, "a request outgrew the context"


def _memory_bytes(device: torch.device) -> int:
    """Of the GPU, free now; of the machine, all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
