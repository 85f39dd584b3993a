"""The speculative engine: continuous batching, one target forward per step, and the target's own tokens.

In float32 they are those of plain decoding. In bfloat16 they are equal, or first part at a near-tie: two tokens whose
logits differ by less than the rounding of a verify step.

The KV cache of a row with L tokens holds the first L-1. The last token is the root of the row's next draft tree.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.attention.target_forward import TargetForward, out_of_memory
from toolkit.infer.cache.cache_manager import ROOM, CacheNeed, KVMemory
from toolkit.infer.cache.kv_cache import KVCache, KVShape
from toolkit.infer.cache.linear_states import LinearStates, check_chains
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cache.round_state import RoundState
from toolkit.infer.drafters.choose_drafter import (
    Draft,
    Lookup,
    cached_token_bytes,
    choose_drafter,
    default_shape,
    shape_for,
    with_choices,
)
from toolkit.infer.drafters.drafting_head import cache_shape
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.drafters.lookup import SuffixAutomaton
from toolkit.infer.engine.config import ConfigError, EngineConfig
from toolkit.infer.engine.cpu_door import install_native_ops
from toolkit.infer.engine.prefill import PromptReader
from toolkit.infer.engine.round import RoundContext, Rounds, commit, round_parts
from toolkit.infer.engine.scheduler import Move, Scheduler
from toolkit.infer.engine.warm_up import warm_up
from toolkit.infer.graphs.graph_rounds import GraphRounds
from toolkit.infer.graphs.recordings import Capture
from toolkit.infer.kernels.dispatch import use_device
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.grammar import Grammars
from toolkit.infer.request.params import EngineError, SamplingParams
from toolkit.infer.request.request import Request, checked_prompt, one_for_each
from toolkit.infer.verify.verifiers import ForcedAcceptance, choose_verifier
from toolkit.log import get_logger
from toolkit.targets.target import Target
from toolkit.thread_limit import thread_limit

logger = get_logger(__name__)

DEFAULTS = EngineConfig(verify="target")


class Engine:
    """Owns the target's KV cache and the running requests. Not thread-safe: one thread calls step().

    draft: a head, n-gram lookup, or None for plain decoding.
    shape: the draft shape, in place of the option `shape`; a chain of 4 by default.
    by_rows: shapes within `shape` for rounds of up to so many rows, of an engine that records its rounds.
    config, options: the options of EngineConfig, by its names; those that load the models are not read. Where one is
        left to the engine, drafts are verified by the target's choices and always have `shape`; `build_engine` chooses
        by what was measured. `deterministic` changes the target's modules in place (batch_invariant.py).
    corpus: texts that `lookup` searches too.
    capture: how rounds are recorded; None: as CUDA graphs.
    short_lived: on a GPU record a round, or compile a kernel, at its first use and not here.
    forced: accept drafts by chance, not by the target's choices, so answers mean nothing (benchmarks of hardware).

    Raises ConfigError for options that cannot be combined, DraftDirError or UnsupportedTargetError for an unusable head
    or target, CompileError if compilation fails.
    """

    _one_process = True  # whether this process alone decides what is read

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        shape: DraftShape | None = None,
        config: EngineConfig = DEFAULTS,
        *,
        by_rows: Mapping[int, DraftShape] | None = None,
        corpus: SuffixAutomaton | None = None,
        capture: Capture | None = None,
        short_lived: bool = False,
        forced: ForcedAcceptance | None = None,
        **options: Any,
    ) -> None:
        config = self.config = config.with_options(**options)
        device, recordable = target.device, "cuda" if capture is not None else target.device.type
        config.check_engine(recordable)
        if draft is None and shape is not None:
            raise EngineError(f"`shape` is {shape.as_text()}, but nothing is drafted; give `draft`, or leave it out")
        self.target = target
        use_device(device)
        install_native_ops(device)
        with torch.inference_mode():
            self._forward = forward = TargetForward(target, deterministic=config.deterministic)
            recorded = self._records(recordable, draft, forward.kv_shape)
            rows, chunk, states = config.max_running_requests, config.chunked_prefill_size, forward.state_shapes
            beside = sum(one.bytes for one in states), cached_token_bytes(draft)
            need = CacheNeed(forward.kv_shape, rows, config.max_total_tokens, config.mem_fraction_static, *beside)
            asked, longest = config.context_length, forward.max_context
            self.context_length = self._agreed(need.context(longest) if asked is None else min(asked, longest))
            pages = self._agreed(need.pages(self.context_length))
            pool = PagePool(rows, self.context_length + ROOM, pages)
            self._cache = KVCache(forward.kv_shape, pool, in_order=config.deterministic)
            self._states = LinearStates.of_pool(states, pool, device)
            self._shape_for = partial(shape_for, draft)
            shape = None if draft is None else shape or config.draft_shape() or default_shape(draft)
            self.shape = None if shape is None else self._shape_for(shape)
            check_chains(self._states, self.shape)
            verify = "target" if config.deterministic else config.verify
            has_head = isinstance(draft, DraftCheckpoint)
            self.verifier = choose_verifier(verify, self.shape, head=has_head, recorded=recorded)
            draws = self.verifier.draws_for if self.verifier.draws_drafts else None
            self.drafter = choose_drafter(target, draft, self.shape, pool, draws=draws)
            state = RoundState(rows, pool, device)
        head = self.drafter if isinstance(self.drafter, HeadDrafter) else None
        # Graphs, scans of linear attention and layers of equal bits are for rows of one length.
        packed = device.type == "cpu" and not recorded and self._states is None and not config.deterministic
        if self.shape is not None:
            lookup = Lookup(corpus) if config.asks_for_lookup else None
            self.drafter = with_choices(
                self.drafter, self.shape, lookup, device, adaptive=bool(config.adaptive), packed=packed
            )
        limits = (self.context_length, self.drafter.lookahead, self._slack(self.shape))
        self._memory = KVMemory(pool, *limits, reuse=config.prefix_cache, states=self._states)
        self.scheduler = Scheduler(rows, chunk, self._memory, together=self._states is None)
        context = RoundContext(forward, self._cache, self._states, head, self.context_length, packed, forced)
        if by_rows and head is not None:
            head.set_shapes({rows: self._shape_for(one) for rows, one in by_rows.items()})
        graphs = self._graphs(context, state, capture, short_lived) if recorded else None
        self._prompts = PromptReader(target, forward, self._cache, self.scheduler, self._states, graphs)
        overlap = not config.disable_overlap_schedule
        self._rounds = Rounds(context, state, self.verifier, self.scheduler, graphs, overlap=overlap)
        self._detokenizer = Detokenizer(target.tokenizer)
        self.grammars = Grammars(target.tokenizer, target.vocab_size, target.stop_ids)
        self._arrivals = itertools.count()
        self._limited = thread_limit(device, changing=not forward.fixes_threads)
        self._warm_up = partial(warm_up, context, state, chunk=chunk)

    def _agreed(self, number: int) -> int:
        """The number that all processes of the engine take."""
        return number

    def _records(self, device_type: str, draft: Draft | None, kv_shape: KVShape) -> bool:
        """Whether rounds run as CUDA graphs. Raises ConfigError if they are asked for and cannot; else the log says
        why not."""
        config, width = self.config, max(kv_shape.head_dim, kv_shape.value_dim or 0)
        if isinstance(draft, DraftCheckpoint):
            of_head = cache_shape(draft.head, self.target.device)
            width = max(width, of_head.head_dim, of_head.value_dim or 0)
        why = config.why_eager(device_type, self.target, draft, width)
        if why is not None and config.cuda_graph_max_bs is not None:
            raise ConfigError(
                f"`cuda_graph_max_bs` is {config.cuda_graph_max_bs}, but no round can be a CUDA graph: {why}; leave it "
                "out"
            )
        if why is not None and device_type == "cuda":
            logger.info("rounds run eagerly, not as CUDA graphs: %s", why)
        return why is None

    def _graphs(
        self, context: RoundContext, state: RoundState, capture: Capture | None, short_lived: bool
    ) -> GraphRounds:
        config = self.config.with_graph_sizes()
        assert config.cuda_graph_max_bs is not None
        return GraphRounds(
            *round_parts(context),
            state,
            context.forward,
            self.drafter,
            context.head,
            self.verifier,
            rows=config.max_running_requests,
            chunk=config.chunked_prefill_size,
            cuda_graph_max_bs=config.cuda_graph_max_bs,
            torch_compile_max_bs=config.torch_compile_max_bs,
            capture=capture,
            short_lived=short_lived,
            agreed=None if self._one_process else self._agreed,
        )

    def warm_up(self) -> None:
        """Launch the kernels that rounds and prompts need, so that no request waits for their compilation (GPU)."""
        self._warm_up(self.drafter, self.shape)

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculative: bool = True,
        shape: DraftShape | None = None,
        verify: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue a prompt. Its own draft shape is at most the engine's, its `verify` one of `Verifier.of_request`; None:
        the engine's. A request of a lower priority number is read earlier, and loses its pages later.

        Raises PromptTooLongError, DraftShapeError, VerifyError, EngineError for an empty prompt or an id outside the
        vocabulary, SamplingError for a stop id or a biased id outside the vocabulary or an unsupported grammar.
        """
        prompt = checked_prompt(prompt_ids, self.target.vocab_size, self.context_length)
        if shape is not None:
            shape = shape.asked_of(self.shape, speculative)
        params.check_ids(self.target.vocab_size)
        request = Request(
            prompt_ids=prompt,
            params=params.seeded(),
            states_seed=params.seed is not None,
            speculative=speculative and self.shape is not None,
            shape=shape,
            verify=self.verifier.of_request(verify),
            priority=priority,
            grammar=self.grammars.start(params),
            arrival=next(self._arrivals),  # after all that may refuse the request: ranks count alike
            stop_set=frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.target.stop_ids),
            token_limit=min(params.max_tokens, self.context_length - len(prompt)),
            text=self._detokenizer.stream(params.stop, unsearched=params.min_tokens) if params.stop else None,
        )
        self.scheduler.enqueue(request)
        return request

    @torch.inference_mode()
    def abort(self, request: Request) -> None:
        """End a request now with finish_reason "abort". Its cache row is free in the next step."""
        if request.finished:
            return
        request.finish_reason, request.finished_at = "abort", time.perf_counter()
        if not self.scheduler.drop_unstarted(request):
            self._finish()

    @torch.inference_mode()
    def drop_all(self) -> None:
        """End all requests with finish_reason "abort" and free their rows; keep none of their text. For an engine whose
        `abort` fails."""
        self._rounds.drop()
        for request in self.scheduler.drop_all():
            request.finish_reason = request.finish_reason or "abort"
        self._rounds.rows_changed()

    @property
    def max_running_requests(self) -> int:
        """The largest batch."""
        return self.scheduler.max_running_requests

    @property
    def _running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def has_graphs(self) -> bool:
        """Whether rounds run as CUDA graphs. A replay runs no host code, so module hooks do not fire."""
        return self._rounds.graphs is not None

    def keep_pace(self, gap_s: float) -> None:
        """Read prompts in chunks of at most about so many seconds while requests run, by the measured speed (CPU)."""
        if self.target.device.type == "cpu":
            self._prompts.gap_s = gap_s

    @property
    def eager_rounds(self) -> int:
        """Rounds that ran without a graph, of an engine that has some."""
        return self._rounds.eager_rounds

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def set_shape(self, shape: DraftShape) -> None:
        """Draft with another shape from the next step on.

        Raises EngineError without a draft head, DraftShapeError if the head or the verifier does not support it."""
        shape = self._shape_for(shape)
        self.verifier.check_shape(shape)
        check_chains(self._states, shape)
        slack = self._slack(shape)
        self._memory.check_slack(slack)
        self.drafter.set_shape(shape)
        # The unread features of the old shape may need more slots than the new shape does.
        self.shape, self._memory.slack = shape, max(slack, self._memory.slack) if self.has_work() else slack
        self._shape_changed()

    def _shape_changed(self) -> None:
        self._rounds.shape_changed()

    def close(self) -> None:
        """Remove the engine's hooks from the target, and its graphs. Do not step the engine afterwards."""
        self.drafter.close()
        if self._rounds.graphs is not None:
            self._rounds.graphs.drop()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one round. Returns the requests that got tokens or ended.

        With overlap a round returns its requests one step later (see round.py)."""
        use_device(self.target.device)
        with self._limited():
            touched = self._land()
            if not self._rounds.in_flight:
                touched += self._schedule()
                if self._running:
                    touched += self._round()
        return list(dict.fromkeys(touched))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        speculative: bool = True,
        shape: DraftShape | None | Sequence[DraftShape | None] = None,
    ) -> list[Request]:
        """Run all prompts to completion. Returns the requests in the order of the prompts.

        params, shape: one for all prompts, or one for each. Raises the errors of add_request before the first step.
        """
        settings = one_for_each(params, SamplingParams, len(prompts), "sampling settings")
        shapes = one_for_each(shape, DraftShape | None, len(prompts), "draft shapes")
        requests: list[Request] = []
        try:
            for place, (prompt, one, asked) in enumerate(zip(prompts, settings, shapes, strict=True)):
                try:
                    requests.append(self.add_request(prompt, one, speculative=speculative, shape=asked))
                except ValueError as error:
                    error.add_note(f"this was prompt {place} of {len(prompts)} (counted from 0)")
                    raise
            while any(not request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        return requests

    def _schedule(self) -> list[Request]:
        """Allocate pages for every row, prefill the prompts that are due, and sample their first tokens."""
        self._change_rows(self.scheduler.make_room)
        before = len(self._running)
        try:
            begun = self._prompts.read_due(self.drafter, self._keep)
        except BaseException as error:
            being_read = self.scheduler.put_back()
            self._rounds.rows_changed()  # prompts prefilled before the failure hold rows now
            if self._one_process and out_of_memory(error):
                begun = self._running[before:]  # by the passes before the failure; they may have ended
                ended = self.scheduler.read_less(being_read, str(error))
                self._finish()
                return [*begun, *ended]
            raise
        if len(self._running) > before:
            self._rounds.rows_changed()
            self._finish()
        return begun

    def _finish(self) -> None:
        """Free the rows of ended requests. The last row moves into each free row."""
        if self._rounds.may_take_rows():
            self._change_rows(lambda: self.scheduler.retire(self._keep))

    def _round(self) -> list[Request]:
        """Launch a round and land it. A graph with overlap lands in the next step."""
        return [] if self._rounds.launch(self.drafter) else self._land()

    def _land(self) -> list[Request]:
        """Commit the result of the round in flight, if there is one."""
        if (landed := self._rounds.land(self.drafter)) is None:
            return []
        launched, result = landed
        began, proposed = launched.began, launched.proposed
        touched = commit(self._running, result, launched.logprobs, began, began if proposed is None else proposed)
        self._finish()
        self._rounds.choose()
        return touched

    def _keep(self, row: int, request: Request) -> None:
        """Insert the positions that a row has read into the prefix cache; wipe those of a request that failed."""
        if request.failed:
            self._memory.pool.clear(row)
        elif request.ready:
            read = min(request.length - 1, self.drafter.positions_read(row, request))
            self._memory.keep(row, request.prompt_ids + request.output_ids, read)

    def _change_rows(self, change: Callable[[], list[Move]]) -> None:
        """Apply a change of rows of the scheduler to the drafter and the sampler."""
        before = len(self._running)
        for row, source in change():
            self.drafter.move_row(row, source)
        if len(self._running) < before:
            self._rounds.rows_changed()

    def _slack(self, shape: DraftShape | None) -> int:
        """Number of positions that a step may write after a row's tokens."""
        return 1 if shape is None else max(shape.num_draft_tokens, self.drafter.reach(shape))

    def check_integrity(self) -> None:
        """Assert that queue, rows, pages and caches agree; tests call it after every step."""
        self.scheduler.check_integrity(self._rounds.in_flight)
        assert all(one.length <= self.context_length for one in self._running), "a request outgrew the context"


@dataclass(frozen=True)
class EngineLoad:
    """running: requests in the batch, and the one whose prompt is read. waiting: requests in the queue.

    In tokens, whole pages: request_tokens that the running requests hold, cached_tokens of these and of kept prefixes,
    capacity_tokens at most. Since the start: refused_rows, times that the next request found no room; eager_rounds, of
    an engine with CUDA graphs.
    """

    running: int
    waiting: int
    request_tokens: int
    cached_tokens: int
    capacity_tokens: int
    refused_rows: int = 0
    eager_rounds: int = 0


def load_of(engine: Engine) -> EngineLoad:
    """Read the load. Any thread may call it: it changes nothing, and reads each number at about the same time."""
    scheduler: Scheduler = engine.scheduler
    pool = scheduler.memory.pool
    pages = {page for table in list(pool.tables) for page in list(table)}
    return EngineLoad(
        running=len(scheduler.running) + (scheduler.reading is not None),
        waiting=len(scheduler.waiting),
        request_tokens=len(pages) * pool.page_size,
        cached_tokens=pool.held * pool.page_size,
        capacity_tokens=pool.capacity * pool.page_size,
        refused_rows=scheduler.refused_rows,
        eager_rounds=engine.eager_rounds,
    )
