"""An engine that writes what a test tells it, in runs of the lengths that a test chooses."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.infer.running_server import running
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.dspark import DSparkConfig, DSparkHead
from toolkit.heads.eagle2 import Eagle2Config, Eagle2Head
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.mtp import MtpConfig, MtpHead
from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.drafter import Drafter
from toolkit.infer.drafters.lookup import NgramLookup
from toolkit.infer.engine.engine import Engine
from toolkit.infer.kernels.paged_reference import places_in
from toolkit.infer.kernels.tree_reference import ancestor_mask
from toolkit.infer.request.draft_tree import DraftShape, DraftTree
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import PromptTooLongError, Request, VerifyEvent
from toolkit.infer.verify.verifiers import VerifyResult
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap


class ScriptedEngine:
    """The engine's interface without a model: `script(prompt_ids)` gives the output, `run` tokens a step."""

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]], run: int = 1, stop_id: int = 2) -> None:
        self.script = script
        self.run = run
        self.stop_id = stop_id
        self.context_length = 512
        self.max_running_requests = 4
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.aborted: list[Request] = []
        self.eager_rounds = 0
        self.fail_next_step: Exception | None = None
        self.step_seconds = 0.0
        self.allow = threading.Event()
        self.allow.set()
        self._pool = PagePool(self.max_running_requests, self.context_length)

    @property
    def scheduler(self) -> SimpleNamespace:
        """What load_of reads of an engine's own."""
        memory = SimpleNamespace(pool=self._pool)
        return SimpleNamespace(running=self.running, waiting=self.waiting, reading=None, memory=memory, refused_rows=0)

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
        if len(prompt_ids) >= self.context_length:
            raise PromptTooLongError(f"{len(prompt_ids)} tokens, {self.context_length} fit")
        request = Request(list(prompt_ids), params, speculative, shape=shape, verify=verify, priority=priority)
        request.stop_set = frozenset([self.stop_id])
        request.token_limit = min(params.max_tokens, self.context_length - len(prompt_ids))
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self.aborted.append(request)
        self.waiting = [r for r in self.waiting if r is not request]
        self.running = [r for r in self.running if r is not request]

    def drop_all(self) -> None:
        self.waiting, self.running = [], []

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Request]:
        self.allow.wait(10)
        time.sleep(self.step_seconds)
        if self.fail_next_step is not None:
            error, self.fail_next_step = self.fail_next_step, None
            raise error
        while self.waiting and len(self.running) < self.max_running_requests:
            self.running.append(self.waiting.pop(0))
            self.running[-1].admitted_at = time.perf_counter()
        touched = list(self.running)
        for request in touched:
            self._write(request)
        self.running = [request for request in self.running if request.finish_reason is None]
        return touched

    def _write(self, request: Request) -> None:
        done = len(request.output_ids)
        length = self.run if done else 1  # the first token is the prefill's
        ids = list(self.script(request.prompt_ids))[done : done + length]
        ids += [self.stop_id] * (length - len(ids))
        count = request.append_run(ids, length - 1)
        if done:
            cut = count < length
            request.events.append(VerifyEvent(4, 4, length - 1, count, cut, 0.0, 0.0, 0.0, len(self.running)))


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture(scope="session", name="running")
def running_fixture():
    return running


class OracleDrafter:
    """Drafts from the true answers, with mistakes: chains and random trees whose accepted paths lie anywhere.

    answers: output ids by prompt. right: chance that a level holds the true token. tree: trees of random form.
    """

    def __init__(
        self, answers: dict[tuple[int, ...], list[int]], vocab_size: int, *, right: float, tree: bool, seed: int = 0
    ) -> None:
        self.answers, self.vocab_size, self.right, self.tree = answers, vocab_size, right, tree
        self.levels = 4
        self.random = random.Random(seed)

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        widths = [self.random.choice((1, 2, 3)) if self.tree else 1 for _ in range(self.levels)]
        rows = [self._row(request, widths) for request in requests]
        tokens, parents, depths = (torch.tensor(part) for part in zip(*rows, strict=True))
        valid = torch.ones_like(tokens, dtype=torch.bool)
        drafted = [request.speculative for request in requests]
        valid[:, 1:] &= torch.tensor(drafted)[:, None]
        mask = ancestor_mask(parents[:, 1:], self.levels)
        mask[~torch.tensor(drafted)] = torch.eye(tokens.shape[1], dtype=torch.bool)
        return DraftTree(tokens, parents, depths, mask, valid, self.levels, is_chain=not self.tree)

    def _row(self, request: Request, widths: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Tokens, parents and depths of one tree in level order."""
        done = len(request.output_ids)
        truth = self.answers[tuple(request.prompt_ids)][done : done + self.levels]
        tokens, parents, depths = [request.output_ids[-1]], [-1], [0]
        above, true_node = [0], 0
        for level, width in enumerate(widths):
            here = list(range(len(tokens), len(tokens) + width))
            above_each = [self.random.choice(above) for _ in here]
            lucky = self.random.choice(here)
            if true_node in above:
                above_each[here.index(lucky)] = true_node
            found = None
            used: dict[int, set[int]] = {}
            for node, upper in zip(here, above_each, strict=True):
                taken = used.setdefault(upper, set())
                wanted = truth[level] if level < len(truth) else None
                if node == lucky and upper == true_node and wanted is not None and self.random.random() < self.right:
                    taken.discard(wanted)
                    token, found = wanted, node
                else:
                    choices = [t for t in range(self.vocab_size) if t not in taken and t != wanted]
                    token = self.random.choice(choices)
                taken.add(token)
                tokens.append(token)
                parents.append(upper)
                depths.append(level + 1)
            above, true_node = here, found if found is not None else -1
        return tokens, parents, depths

    lookahead = 0

    def reach(self, shape: DraftShape, *, skips: bool = False) -> int:
        return 0

    def positions_read(self, row: int, request: Request) -> int:
        return request.length

    def admit(self, first_row: int, requests: Sequence[Request], tokens: int) -> None:
        pass

    def observe(self, requests: Sequence[Request], result: VerifyResult) -> None:
        pass

    def move_row(self, destination: int, source: int) -> None:
        pass

    def set_shape(self, shape: DraftShape) -> None:
        pass

    def close(self) -> None:
        pass


def oracle_engine(
    target: Target, answers: dict[tuple[int, ...], list[int]], *, right: float, tree: bool, **options: Any
) -> Engine:
    """An engine that drafts what an oracle says, four levels deep."""
    engine = Engine(target, **options)
    engine.shape = DraftShape.chain(4)
    engine.drafter = OracleDrafter(answers, target.vocab_size, right=right, tree=tree)
    engine._memory.slack = 16  # its trees have up to 13 nodes
    return engine


@pytest.fixture
def oracle() -> type[OracleDrafter]:
    """Assign one to `engine.drafter` to get long accepted runs from a random target."""
    return OracleDrafter


def propose(engine: Engine, drafter: Drafter, requests: Sequence[Request]) -> DraftTree:
    """What `drafter` drafts next for the first running requests."""
    with torch.inference_mode():
        return drafter.propose(requests, rows_of(engine, requests))


def finished(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The answers, with the integrity check after every step."""
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    engine.close()
    return [request.output_ids for request in requests]


def hf_greedy(target: Target, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What Hugging Face's generate writes, stop id included."""
    ids = torch.tensor([list(prompt)], device=target.device)
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=sorted(target.stop_ids),
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def reference() -> Callable[[Target, Sequence[int], int], list[int]]:
    """`hf_greedy`, each answer computed once."""
    known: dict[tuple, list[int]] = {}

    def ask(target: Target, prompt: Sequence[int], max_tokens: int) -> list[int]:
        key = (target, tuple(prompt), max_tokens)
        if key not in known:
            known[key] = hf_greedy(target, prompt, max_tokens)
        return list(known[key])

    return ask


def places_of(pool: PagePool, count: int, row: int = 0, rows: int = 1) -> Tensor:
    """[rows, count]: the cache entries of the first positions of these rows."""
    table = pool.table(row, rows, pool.pages_of(count), torch.device("cpu"))
    return places_in(table, torch.arange(count).expand(rows, -1), pool.page_size)


def build_small_target(max_context: int = 256) -> Target:
    """A target of 24 tokens: even an untrained head is often right there."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.25,
    )
    words = {f"w{i}": i for i in range(24)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), eos_token="w0")
    return Target(model=LlamaForCausalLM(config), tokenizer=tokenizer, name="small", revision=None)


def build_small_draft(target: Target) -> DraftCheckpoint:
    """An untrained EAGLE-3 head with a draft vocabulary of 20 of the 24 tokens."""
    torch.manual_seed(4)
    config = Eagle3Config.from_target_config(target.config, vocab_size=24, draft_vocab_size=20, aux_layer_ids=(1, 2, 3))
    head = Eagle3Head(config).eval().requires_grad_(False)
    return DraftCheckpoint(head=head, token_map=TokenMap.from_ids([0, *range(5, 24)], 24))


DSPARK_HEADS = {
    "dspark": {"markov_rank": 4},
    "dspark-shared": {"markov_rank": 4, "own_output": False, "confidence_with_markov": False},
    "dflash": {"markov_rank": 0, "confidence": False, "sample_from_anchor": False, "own_output": False},
    "dspark-causal": {"markov_rank": 4, "causal": True},
    "dspark-dfly": {"correction": "dfly", "causal": True},
}


def build_small_dspark(target: Target, name: str = "dspark") -> DraftCheckpoint:
    """An untrained DSpark head of two layers that drafts 5 tokens, by a name of DSPARK_HEADS; with an output matrix it
    has a draft vocabulary of 20 of the 24 tokens."""
    torch.manual_seed(9)
    settings = DSPARK_HEADS[name]
    own = settings.get("own_output", True)
    config = DSparkConfig.from_target_config(
        target.config, vocab_size=24, target_hidden_size=64, draft_vocab_size=20 if own else 24,
        aux_layer_ids=(1, 2, 3), num_hidden_layers=2, block_size=6 if name == "dflash" else 5, mask_token_id=3,
        **settings,
    )  # fmt: skip
    head = DSparkHead(config).eval().requires_grad_(False)
    return DraftCheckpoint(head=head, token_map=TokenMap.from_ids([0, *range(5, 24)] if own else range(24), 24))


def rows_of(engine: Engine, requests: Sequence[Request]) -> RoundRows:
    """The rows of these requests on the device, as a drafter's `propose` takes them."""
    states = engine._rounds.set_rows(requests)
    return engine._rounds.state.rows(len(requests), max(length for _, length, _, _ in states))


SHARED_HEADS = {
    "eagle2": {},
    "eagle2-two-layers": {"num_hidden_layers": 2, "fc_bias": False, "attention_bias": True},
    "mtp": {},
    "mtp-three-layers": {"num_mtp_layers": 3},
    "mtp-hidden-first": {
        "embedding_first": False,
        "target_hidden": "pre_norm",
        "zero_first_embedding": True,
        "num_mtp_layers": 2,
    },
}


def build_shared_head(target: Target, name: str, kept: Sequence[int] = range(24)) -> DraftCheckpoint:
    """An untrained head that shares the small target's embedding and output matrix, by a name of SHARED_HEADS."""
    torch.manual_seed(6)
    eagle2 = name.startswith("eagle2")
    config_class, head_class = (Eagle2Config, Eagle2Head) if eagle2 else (MtpConfig, MtpHead)
    head = head_class(config_class.from_target_config(target.config, vocab_size=24, **SHARED_HEADS[name]))
    head = head.eval().requires_grad_(False)
    return DraftCheckpoint(head=head, token_map=TokenMap.from_ids(list(kept), 24))


@pytest.fixture(scope="session")
def small_target() -> Target:
    return build_small_target()


@pytest.fixture(scope="session")
def small_draft(small_target: Target) -> DraftCheckpoint:
    return build_small_draft(small_target)


@pytest.fixture(scope="session")
def shared_draft(small_target: Target) -> Callable[..., DraftCheckpoint]:
    """`build_shared_head` for the small target."""
    return partial(build_shared_head, small_target)


@pytest.fixture
def build(small_target, small_draft, shared_draft):
    """A drafter's draft by its name: n-gram lookup, the EAGLE-3 head, a block drafter, or one of the shared heads."""

    def make(name: str):
        if name in DSPARK_HEADS:
            return build_small_dspark(small_target, name)
        if name == "ngram":
            return NgramLookup(min_n=1)
        return small_draft if name == "eagle3" else shared_draft(name)

    return make
