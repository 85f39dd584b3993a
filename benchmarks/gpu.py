"""What the GPU benchmarks measure: targets with a head, one engine's turn on them, and the parts of a round.

Targets:
    demo           the target that --draft names (else the demo) with its trained head; without --draft a head that is
                   initialised from the target and not trained. Real prompts, real acceptance.
    llama-3.1-8b   the shape of Llama-3.1-8B, random weights made on the device, and a random EAGLE-3 head over 32000
                   ids. Random prompts, and a FORCED accept_length: only its times mean anything.
With `smoke`, or as `tiny`, they are tiny random models.

Parts of a round:
    draft     the head's forwards, its read of what was committed before (EAGLE's "extend") included, and its picks
    build     the tree of the best candidates
    verify    the target's forward over every node, output matrix included
    sample    the target's choices, and the walk through the tree
    compact   keys of accepted nodes move to their places; what the next draft reads is kept
    host      everything else: scheduling, commits, reading the result, waiting for launches
The engine's functions are wrapped while it is measured. Eager rounds leave a stamp wherever a part begins. A recorded
round has no inside to stamp, so it is recorded as one graph a part, which share their memory and are started one after
the other with a stamp between them. Stamps are CUDA events; without a GPU, the host's clock.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from toolkit import __version__
from toolkit.bench.prompts import builtin_prompts
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import default_aux_layer_ids
from toolkit.infer.attention.target_forward import TargetForward
from toolkit.infer.drafters import head_drafter
from toolkit.infer.drafters.head_drafter import HeadDrafter
from toolkit.infer.drafters.lookup import NgramDrafter
from toolkit.infer.engine import round as engine_round
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs import compiled_forward
from toolkit.infer.graphs.recordings import WARM_UPS, Capture, Run
from toolkit.infer.load.load_draft import fit_draft, stated_target
from toolkit.infer.request.chat_prompt import chat_ids
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import EngineError, SamplingParams
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.targets.gguf_file import DEMO_NAME
from toolkit.targets.load import read_target
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.warm_start import initialise_from_target

DRAFT_VOCABULARY = 32000
LLAMA: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A target and its head, both on the device. head: what the head is, in words. forced: acceptance by chance;
    None: the target decides. prompts: token ids."""

    name: str
    target: Target
    draft: DraftCheckpoint
    head: str
    forced: ForcedAcceptance | None
    prompts: list[list[int]]

    def group(self, batch: int, repeat: int) -> list[list[int]]:
        """The prompts of one repeat, others than those of the last where there are enough."""
        return [self.prompts[(repeat * batch + i) % len(self.prompts)] for i in range(batch)]

    @property
    def acceptance(self) -> str:
        """For the title of every table."""
        if self.forced_length is None:
            return "acceptance as the target decides"
        return f"forced accept_length {self.forced_length:.2f}"

    @property
    def forced_length(self) -> float | None:
        return None if self.forced is None else self.forced.accept_length


def demo_subject(name: str | None, draft: Path | None, device: torch.device) -> Subject:
    """Raises what load_draft and read_target raise."""
    head = None if draft is None else load_draft(draft)
    asked, revision = (name or DEMO_NAME, None) if name or head is None else stated_target(head)
    target = read_target(asked, revision=revision, device=device)
    prompts = [chat_ids(target.tokenizer, [{"role": "user", "content": one.turns[0]}]) for one in builtin_prompts()]
    if head is None:
        said = "initialised from the target, not trained"
        fitted = fit_draft(_untrained(target), target)
    else:
        said, fitted = f"trained ({head.kind}, {head.path})", fit_draft(head, target)
    assert isinstance(fitted, DraftCheckpoint)
    return Subject(asked, target, fitted, said, None, prompts)


def shaped_subject(device: torch.device, context: int, forced: ForcedAcceptance) -> Subject:
    """Llama-3.1-8B's shape in bfloat16."""
    config = LlamaConfig(**LLAMA, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    target = _random_target("llama-3.1-8b-shaped, random weights", config, torch.bfloat16, device)
    return _forced_subject(target, DRAFT_VOCABULARY, context, forced)


def tiny_subject(device: torch.device, context: int, forced: ForcedAcceptance) -> Subject:
    return tiny_subjects(device, context, forced)[1]


def tiny_subjects(device: torch.device, context: int, forced: ForcedAcceptance) -> tuple[Subject, Subject]:
    """In the places of both, in seconds."""
    config = LlamaConfig(**TINY, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    first, second = (_random_target(f"tiny-{one}", config, torch.float32, device) for one in ("demo", "llama"))
    fitted = fit_draft(_untrained(first), first)
    assert isinstance(fitted, DraftCheckpoint)
    demo = Subject(first.name, first, fitted, "initialised from the target, not trained", None, _random(first, context))
    return demo, _forced_subject(second, 128, context, forced)


def _random_target(name: str, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> Target:
    """Made where it will lie: 8B parameters are not carried over."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    words = {"<s>": 0, "</s>": 1, "<unk>": 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), name, dtype=dtype)


def _forced_subject(target: Target, draft_vocabulary: int, context: int, forced: ForcedAcceptance) -> Subject:
    head = _head(target, draft_vocabulary)
    fitted = fit_draft(DraftCheckpoint(head=head, token_map=_some_ids(target, draft_vocabulary)), target)
    assert isinstance(fitted, DraftCheckpoint)
    prompts = _random(target, context)
    return Subject(target.name, target, fitted, "random EAGLE-3 head", forced, prompts)


def _untrained(target: Target) -> DraftCheckpoint:
    size = min(DRAFT_VOCABULARY, target.vocab_size // 2)
    token_map = TokenMap.from_ids(sorted({*range(size), *target.stop_ids}), target.vocab_size)
    head = _head(target, token_map.size).to(target.dtype)
    initialise_from_target(head, target, token_map, [], seed=0)
    return DraftCheckpoint(head=head, token_map=token_map)


def _head(target: Target, draft_vocabulary: int) -> Eagle3Head:
    config = Eagle3Config.from_target_config(
        target.config,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocabulary,
        aux_layer_ids=default_aux_layer_ids(target.n_layers),
    )
    with target.device:
        return Eagle3Head(config).eval().requires_grad_(False)


def _some_ids(target: Target, count: int) -> TokenMap:
    """Ids from all over the vocabulary, the ends of turns among them."""
    ids = [number * target.vocab_size // count for number in range(count)]
    return TokenMap.from_ids(sorted({*ids[len(target.stop_ids - set(ids)) :], *target.stop_ids}), target.vocab_size)


def _random(target: Target, context: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, target.vocab_size, (64, context), generator=generator).tolist()


# Targets of random weights, by the names that scripts take.
FORCED = {"llama": shaped_subject, "tiny": tiny_subject}


# -- one engine --------------------------------------------------------------------------------------------------------

SETTLING = 4  # rounds before the clock starts: a graph's recording is among them
SLACK = 256  # positions of a row behind its answer
HOWS = ("eager", "graph", "graph-serial", "compiled")  # graph-serial: without overlap; compiled: a graph, with overlap


@dataclass(frozen=True)
class Turn:
    """Seconds of so many rounds of `rows` requests, and the tokens they wrote."""

    seconds: float
    rounds: int
    rows: int
    tokens: int

    @property
    def accept_length(self) -> float:
        return self.tokens / (self.rounds * self.rows)


@dataclass(frozen=True)
class Mode:
    """One way to run our engine."""

    shape: DraftShape | None
    how: str  # of HOWS

    @property
    def what(self) -> str:
        return "plain" if self.shape is None else "chain" if self.shape.is_chain else "tree"

    @property
    def name(self) -> str:
        return f"ours-{self.what}-{self.how}"

    @property
    def over(self) -> str:
        return "ours-plain-graph" if self.shape is None else f"ours-plain-{self.how}"


@dataclass(frozen=True)
class Sizes:
    """Of one measurement. longest: tokens of the longest prompt. rounds: of a turn. backend: of torch.compile."""

    batch: int
    longest: int
    rounds: int
    backend: str = "inductor"
    whole_prompts: bool = (
        True  # all in one step: with rows that start later, smaller rounds would be recorded on the way
    )

    def room(self, subject: Subject, mode: Mode) -> int:
        """Tokens that an answer may get, all told."""
        if mode.shape is None:
            most = 1
        else:
            most = 1 + (mode.shape.num_steps if subject.forced is None else len(subject.forced.rates))
        return (SETTLING + self.rounds + 4) * most

    def cached(self, subject: Subject, mode: Mode) -> int:
        """Tokens that the engine's cache has to hold."""
        return self.batch * (self.longest + self.room(subject, mode) + SLACK)


def open_mode(subject: Subject, mode: Mode, sizes: Sizes, capture: Capture | None) -> Engine:
    """capture: how rounds are recorded; None: as CUDA graphs."""
    compiled_forward.BACKEND = sizes.backend
    how: dict[str, Any] = {"disable_cuda_graph": True}
    if mode.how != "eager":
        how = {"cuda_graph_max_bs": sizes.batch, "disable_overlap_schedule": mode.how == "graph-serial"}
        how |= {"torch_compile": True, "torch_compile_max_bs": sizes.batch} if mode.how == "compiled" else {}
    engine = Engine(
        subject.target,
        None if mode.shape is None else subject.draft,
        mode.shape,
        max_running_requests=sizes.batch,
        context_length=sizes.longest + sizes.room(subject, mode),
        max_total_tokens=sizes.cached(subject, mode),
        prefix_cache=False,
        capture=capture,
        short_lived=True,  # only what is measured is recorded: every graph takes time and memory
        **how,
        forced=subject.forced,
    )
    if sizes.whole_prompts:
        engine.scheduler.chunk = sizes.batch * sizes.longest
    return engine


def nothing() -> None:
    pass


class Ours:
    """One engine that stays open."""

    version = __version__

    def __init__(self, subject: Subject, mode: Mode, sizes: Sizes, clock: Clock, capture: Capture | None) -> None:
        self.name, self.over, self.shape = mode.name, mode.over, mode.shape
        self._rounds, self._clock = sizes.rounds, clock
        self._params = SamplingParams(max_tokens=sizes.room(subject, mode), ignore_eos=True)
        self._engine = open_mode(subject, mode, sizes, capture)

    def turn(
        self, prompts: Sequence[Sequence[int]], began: Callable[[], None] = nothing, ended: Callable[[], None] = nothing
    ) -> Turn:
        """began, ended: called where the rounds that count begin and end."""
        requests = [self._engine.add_request(list(prompt), self._params) for prompt in prompts]
        while not all(request.ready for request in requests):
            self._engine.step()
        for _ in range(SETTLING):
            self._engine.step()
        before = sum(len(request.output_ids) for request in requests)
        self._clock.wait()
        began()
        started = time.perf_counter()
        for _ in range(self._rounds):
            self._engine.step()
        ended()
        self._clock.wait()
        seconds = time.perf_counter() - started
        assert not any(request.finished for request in requests), f"{self.name}: an answer ended while it was measured"
        tokens = sum(len(request.output_ids) for request in requests) - before
        for request in requests:
            self._engine.abort(request)
        return Turn(seconds, self._rounds, len(requests), tokens)

    def close(self) -> None:
        """Its memory is free for the next."""
        self._engine.close()
        del self._engine


def again(run: Run) -> Run:
    """In place of a recording, where there is no GPU."""
    run()
    return run


def device_of(args: Any, script: str) -> torch.device | None:
    """The device of --device; None, and why on the terminal, where that is a GPU and there is none."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"{script}: PyTorch sees no CUDA device here; to see that it runs: --device cpu --target tiny")
        return None
    torch.manual_seed(0)
    return device


# -- parts of a round --------------------------------------------------------------------------------------------------

HOST = "host"
PARTS: tuple[tuple[Any, str, str], ...] = (
    (HeadDrafter, "draft", "draft"),
    (NgramDrafter, "propose", "draft"),
    (head_drafter, "chain_tree", "build"),
    (head_drafter, "rerank", "build"),
    (TargetForward, "__call__", "verify"),
    (Target, "logits", "verify"),
    (engine_round, "choose_tokens", "sample"),
    (ForcedAcceptance, "__call__", "sample"),
    (engine_round, "follow", "sample"),
    (HeadDrafter, "keep_features", "compact"),
    (engine_round, "compact", "compact"),
    (engine_round, "advance", "compact"),
)
NAMES = (*dict.fromkeys(part for _, _, part in PARTS), HOST)


class Clock:
    """Stamps in the order of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"

    def stamp(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.on_device:
            torch.cuda.synchronize()

    def seconds(self, first: Any, last: Any) -> float:
        """Between two stamps; the device has done both."""
        return first.elapsed_time(last) / 1e3 if self.on_device else last - first

    def median(self, launch: Callable[[], Any], times: int) -> float:
        """Seconds of a launch, after two that do not count."""
        for _ in range(2):
            launch()
        stamps = [self.stamp()]
        for _ in range(times):
            launch()
            stamps.append(self.stamp())
        self.wait()
        took = [self.seconds(*pair) for pair in zip(stamps, stamps[1:], strict=False)]
        return sorted(took)[times // 2]


class RoundParts:
    """Stamps of one engine's rounds, and the capture of its recorded ones: `Engine(.., capture=RoundParts(clock))`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._inside = [HOST]
        self._stamps: list[tuple[str, Any]] = []
        self._kept: list[tuple[str, Any]] = []
        self._cut: Callable[[str], None] | None = None  # what a change of parts does while a round is recorded
        self.recorded = 0
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """The engine's functions say which part they are."""
        owns = [getattr(owner, name) for owner, name, _ in PARTS]
        for (owner, name, part), own in zip(PARTS, owns, strict=True):
            setattr(owner, name, self._wrapped(own, part))
        try:
            yield
        finally:
            for (owner, name, _), own in zip(PARTS, owns, strict=True):
                setattr(owner, name, own)

    def restart(self) -> None:
        """Forget the stamps so far; the host's time begins."""
        self._stamps, self._kept = [(HOST, self._clock.stamp())], []

    def stop(self) -> None:
        """What comes after does not count."""
        self._stamp(HOST)
        self._stamps, self._kept = [], self._stamps

    def seconds(self) -> dict[str, float]:
        """Of every part between `restart` and `stop`."""
        self._clock.wait()
        found = dict.fromkeys(NAMES, 0.0)
        for (part, began), (_, ended) in zip(self._kept, self._kept[1:], strict=False):
            found[part] += self._clock.seconds(began, ended)
        return found

    def _wrapped(self, own: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(own)
        def measured(*args: Any, **keywords: Any) -> Any:
            # Heads that share the target's output matrix score their drafts by it: that is drafting.
            drafting = part == "verify" and self._inside[-1] == "draft"
            self._inside.append("draft" if drafting else part)
            self._change()
            try:
                return own(*args, **keywords)
            finally:
                self._inside.pop()
                self._change()

        return measured

    def _change(self) -> None:
        (self._cut or self._stamp)(self._inside[-1])

    def _stamp(self, part: str) -> None:
        self._stamps.append((part, self._clock.stamp()))

    # -- recorded rounds -----------------------------------------------------------------------------------------------

    def __call__(self, run: Run) -> Run:
        """Records a round, part by part. Raises EngineError where it cannot be recorded."""
        if not self._clock.on_device:
            run()
            self.recorded += 1
            return run
        try:
            segments = self._record(run)
        except RuntimeError as error:
            raise EngineError(f"a round could not be recorded part by part ({error})") from error
        finally:
            self._cut = None
        self.recorded += 1

        def replay() -> None:
            for part, graph in segments:
                self._stamp(part)
                graph.replay()
            self._stamp(HOST)

        return replay

    def _record(self, run: Run) -> list[tuple[str, torch.cuda.CUDAGraph]]:
        pool = torch.cuda.graph_pool_handle()
        segments: list[tuple[str, torch.cuda.CUDAGraph]] = []

        def begin(part: str) -> None:
            segments.append((part, torch.cuda.CUDAGraph()))
            segments[-1][1].capture_begin(pool=pool)

        def cut(part: str) -> None:
            if part != segments[-1][0]:
                segments[-1][1].capture_end()
                begin(part)

        self._stream = self._stream or torch.cuda.Stream()
        for _ in range(WARM_UPS):  # not on the stream that captures: see CudaCapture
            run()
        torch.cuda.synchronize()
        gc.collect()
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # between two parts
            begin(self._inside[-1])
            self._cut = cut
            try:
                run()
            finally:
                self._cut = None
                segments[-1][1].capture_end()
        torch.cuda.synchronize()
        return segments


def bandwidth(clock: Clock, device: torch.device, size: int) -> dict[str, float]:
    """Bytes a second of a copy (read and written), and of a sum (read), of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copied = clock.median(lambda: target.copy_(source), 20)
    summed = clock.median(lambda: source.sum(), 20)
    return {"copy": 2 * source.nbytes / copied, "read": source.nbytes / summed}
