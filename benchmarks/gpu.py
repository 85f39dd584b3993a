"""What the GPU benchmarks share: a target with a head, one engine's turn on them, the parts of a round, rows in time.

Targets have random weights, made on the device, and random prompts; the head is a random one, whose drafts are
accepted by chance to a FORCED accept_length: only times mean anything.
    llama   the shape of Llama-3.1-8B in bfloat16, and a head over 32000 ids
    tiny    to see that a script runs: --device cpu --target tiny

Parts of a recorded round, whose graphs are stamped with CUDA events (without a GPU, by the host's clock):
    draft     the head's forwards, its read of what was committed before (EAGLE's "extend") included, and the tree
    verify    the target's forward over every node
    sample    the target's choices, output matrix included, the walk through the tree, and the moves in the caches
    host      everything else: scheduling, commits, reading the result, waiting for launches
"""

from __future__ import annotations

import argparse
import gc
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from harness import Row, leave, parser_of, settings_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from toolkit import __version__
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.heads.dspark import DSparkConfig, DSparkHead
from toolkit.heads.eagle3 import Eagle3Config, Eagle3Head
from toolkit.heads.head_config import default_aux_layer_ids
from toolkit.infer.engine.cpu_door import pack
from toolkit.infer.engine.engine import Engine
from toolkit.infer.graphs import compiled_forward
from toolkit.infer.graphs.recordings import Capture, Run
from toolkit.infer.load.load_draft import fit_draft
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap

ENDS = {"bos_token_id": 0, "eos_token_id": 1}
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
# Name in records, config, dtype, draft ids.
TARGETS: dict[str, tuple[str, LlamaConfig, torch.dtype, int]] = {
    "llama": (
        "llama-3.1-8b-shaped, random weights",
        LlamaConfig(**LLAMA, **ENDS, tie_word_embeddings=False),
        torch.bfloat16,
        32000,
    ),
    "tiny": ("tiny-llama", LlamaConfig(**TINY, **ENDS), torch.float32, 128),
}
# A causal block head as published for 8B targets, with a bias that knows the parent.
BLOCK: dict[str, Any] = {"num_hidden_layers": 5, "block_size": 16, "causal": True}
HEADS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "eagle3": (Eagle3Config, Eagle3Head, {}),
    "dspark": (DSparkConfig, DSparkHead, BLOCK),
}
# Estimates and aims of before any of it ran, which each record has beside its rows: milliseconds of an H100 that reads
# 3.11 TB/s, unless a name has another unit. What nobody predicted is left out.
PREDICTED: dict[str, dict[str, Any]] = {
    "products": {"share_of_bandwidth up to 16 rows": {
        "cublas": {"gate_up": 0.89, "gate": 0.89, "down": 0.85, "qkv": 0.85, "q_o": 0.85, "kv": 0.48, "lm_head": 0.91},
        "ours": 0.88, "dependent": 0.93, "fp8": 0.79,
    }},
    "engine": {
        "ours-plain-graph": 5.6, "ours-chain-graph": 6.3, "ours-tree-graph": 7.5, "ours-plain-compiled": 6.86,
        "ours-plain-graph without dependent": 5.95, "ours-plain-graph without skinny": 6.4,
        "ours-plain-graph without fused": 7.6,
        "aims": {"ours-plain-graph": 5.7, "ours-chain-graph": 6.5, "ours-tree-graph": 7.8},
    },
    "cliffs": {"greedy, batch 16, plain": 6.5, "over of one among eight with log-probabilities or a penalty": 1.05},
    "training": {"as is": 260, "aims": {"tokens_per_s": 16000, "share_of_peak": 0.45, "peak_memory_bytes": 60e9}},
}  # fmt: skip
PARTS = {"draft": "draft", "forward": "verify", "choice": "sample"}  # of a round, by the graph that runs it
Found = TypeVar("Found")


# -- one run -----------------------------------------------------------------------------------------------------------


def gpu_parser(text: str | None, budget: int, **sizes: int | list[int]) -> argparse.ArgumentParser:
    """What all of them take. budget: the default, in seconds."""
    parser = parser_of(text, **sizes)
    parser.add_argument("--target", choices=tuple(TARGETS), default="llama")
    told = "seconds after which no row begins (default: %(default)s)"
    parser.add_argument("--budget", type=float, default=budget, metavar="SECONDS", help=told)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser


class Bench:
    """One run: its device, its rows, and what has no row. A row that fails or lasts too long costs itself alone."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.clock = args, device, Clock(device)
        self.started = time.perf_counter()
        self.rows: list[Row] = []
        self.left_out: dict[str, str] = {}
        signal.signal(signal.SIGALRM, _late)
        torch.manual_seed(0)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Ends the program where the device is a GPU and PyTorch sees none."""
        device = torch.device(args.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SystemExit("PyTorch sees no CUDA device here; to see that it runs: --device cpu --target tiny")
        return cls(args, device)

    @property
    def capture(self) -> Capture | None:
        """How rounds are recorded; None: as CUDA graphs. Without a GPU they only run again."""
        return None if self.clock.on_device else again

    @property
    def peak(self) -> int | None:
        """Bytes of the largest allocation of the process so far."""
        return torch.cuda.max_memory_allocated() if self.clock.on_device else None

    def attempt(self, what: str, call: Callable[[], Found], seconds: float = 180) -> Found | None:
        """What `call` returns; None, and `left_out` says why, where it fails, lasts longer or there is no time left."""
        left = self.args.budget - (time.perf_counter() - self.started)
        try:
            if left <= 0:
                raise TimeoutError(f"the {self.args.budget:g} s of --budget were over")
            signal.setitimer(signal.ITIMER_REAL, min(seconds, left))
            return call()
        except Exception as error:  # process edge: the record says why it has no row
            self.left_out[what] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            print(f"no row of {what}: {self.left_out[what]}", flush=True)
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.collect()
            if self.clock.on_device:
                torch.cuda.empty_cache()

    def leave(self, what: str, name: str, definitions: dict[str, str], **more: Any) -> int:
        """Write the record; returns the exit status."""
        more |= {"left_out": self.left_out, "predicted": PREDICTED[what], "definitions": definitions}
        leave(self.args, what, name, settings_of(self.args, target=TARGETS[self.args.target][0]), self.rows, **more)
        return 0 if self.rows else 1


def _late(*_signal: Any) -> None:
    raise TimeoutError("its seconds were over")


@dataclass(frozen=True)
class Subject:
    """A target and its head, both on the device. prompts: token ids, [64][context]."""

    name: str
    target: Target
    draft: DraftCheckpoint
    forced: ForcedAcceptance
    prompts: list[list[int]]

    @classmethod
    def of(
        cls, target: str, device: torch.device, context: int, accept_length: str = "2.5", kind: str = "eagle3"
    ) -> Subject:
        """One of TARGETS, and of HEADS. Made where it will lie: 8B parameters are not carried over."""
        name, config, dtype, draft_vocabulary = TARGETS[target]
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        tokenizer = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
        made = Target(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), name, dtype=dtype)
        fitted = fit_draft(random_head(made, draft_vocabulary, kind), made)
        assert isinstance(fitted, DraftCheckpoint)
        if device.type == "cuda":
            pack(made, fitted)  # as users get it: in float8 where the GPU has it
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(2, made.vocab_size, (64, context), generator=generator).tolist()
        return cls(name, made, fitted, ForcedAcceptance.parse(accept_length), prompts)

    def group(self, batch: int, repeat: int) -> list[list[int]]:
        """The prompts of one repeat, others than those of the last where there are enough."""
        return [self.prompts[(repeat * batch + i) % len(self.prompts)] for i in range(batch)]


def random_head(target: Target, size: int, kind: str = "eagle3") -> DraftCheckpoint:
    """An untrained head over ids from all over the vocabulary, the ends of turns among them: what it drafts is
    all but never right."""
    torch.manual_seed(0)
    of_config, of_head, more = HEADS[kind]
    config = of_config.from_target_config(
        target.config,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        aux_layer_ids=default_aux_layer_ids(target.n_layers),
        **more,
    )
    with target.device:
        head = of_head(config).eval().requires_grad_(False)
    ids = [number * target.vocab_size // size for number in range(size)]
    kept = sorted({*ids[len(target.stop_ids - set(ids)) :], *target.stop_ids})
    return DraftCheckpoint(head=head, token_map=TokenMap.from_ids(kept, target.vocab_size))


# -- one engine --------------------------------------------------------------------------------------------------------

SETTLING = 4  # rounds before the clock starts: a graph's recording is among them
SLACK = 512  # positions of a row behind its answer, drafted nodes among them
HOWS = ("eager", "graph", "graph-serial", "compiled")  # graph-serial: without overlap; compiled: a graph, with overlap


@dataclass(frozen=True)
class Turn:
    """Seconds of so many rounds of `rows` requests, and the tokens they wrote."""

    seconds: float
    rounds: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class Mode:
    """One way to run our engine. how: of HOWS."""

    shape: DraftShape | None
    how: str

    @property
    def name(self) -> str:
        what = "plain" if self.shape is None else "chain" if self.shape.is_chain else "tree"
        what += f"-{self.shape.as_text()}" if self.shape is not None and self.shape.budget else ""
        return f"ours-{what}-{self.how}"

    @property
    def over(self) -> str:
        return "ours-plain-graph" if self.shape is None else f"ours-plain-{self.how}"


@dataclass(frozen=True)
class Sizes:
    """Of one measurement. longest: tokens of the longest prompt. rounds: of a turn. whole_prompts: all in one step:
    with rows that start later, smaller rounds would be recorded on the way."""

    batch: int
    longest: int
    rounds: int
    whole_prompts: bool = True

    def room(self, subject: Subject, mode: Mode) -> int:
        """Tokens that an answer may get, all told."""
        return (SETTLING + self.rounds + 4) * (1 if mode.shape is None else 1 + len(subject.forced.rates))


def open_mode(subject: Subject, mode: Mode, sizes: Sizes, capture: Capture | None) -> Engine:
    """capture: how rounds are recorded; None: as CUDA graphs."""
    compiled_forward.BACKEND = "inductor" if subject.target.device.type == "cuda" else "eager"
    how: dict[str, Any] = {"disable_cuda_graph": True}
    if mode.how != "eager":
        how = {"cuda_graph_max_bs": sizes.batch, "disable_overlap_schedule": mode.how == "graph-serial"}
        how |= {"torch_compile": True, "torch_compile_max_bs": sizes.batch} if mode.how == "compiled" else {}
    most = sizes.longest + sizes.room(subject, mode)
    engine = Engine(
        subject.target,
        None if mode.shape is None else subject.draft,
        mode.shape,
        max_running_requests=sizes.batch,
        context_length=most,
        max_total_tokens=sizes.batch * (most + SLACK),
        prefix_cache=False,
        capture=capture,
        short_lived=True,  # only what is measured is recorded: every graph takes time and memory
        **how,
        forced=subject.forced,
    )
    if sizes.whole_prompts:
        engine.scheduler.chunk = sizes.batch * sizes.longest
    return engine


def started(engine: Engine, requests: Sequence[Any]) -> int:
    """Step until all requests have their first tokens and the rounds are settled; the tokens written so far."""
    while not all(request.ready for request in requests):
        engine.step()
    for _ in range(SETTLING):
        engine.step()
    return sum(len(request.output_ids) for request in requests)


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
        before = started(self._engine, requests)
        self._clock.wait()
        began()
        clocked = time.perf_counter()
        for _ in range(self._rounds):
            self._engine.step()
        ended()
        self._clock.wait()
        seconds = time.perf_counter() - clocked
        assert not any(request.finished for request in requests), f"{self.name}: an answer ended while it was measured"
        tokens = sum(len(request.output_ids) for request in requests) - before
        for request in requests:
            self._engine.abort(request)
        return Turn(seconds, self._rounds, len(requests), tokens)

    def parts(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Seconds of a round by part, in one more turn, after which its replays stay wrapped; none of eager rounds."""
        graphs, spans = self._engine._rounds.graphs, []
        for part, recorded in ({} if graphs is None else graphs.made).items():
            recorded.replay = self._stamped(recorded.replay, PARTS[part.what], spans)
        seconds = self.turn(prompts, spans.clear).seconds
        if not spans:
            return {}
        found = dict.fromkeys(PARTS.values(), 0.0)
        for name, began, ended in spans:
            found[name] += self._clock.seconds(began, ended)
        found["host"] = seconds - sum(found.values())
        return {name: of_all / self._rounds for name, of_all in found.items()}

    def _stamped(self, replay: Run, name: str, spans: list[tuple[str, Any, Any]]) -> Run:
        def run() -> None:
            began = self._clock.stamp()
            replay()
            spans.append((name, began, self._clock.stamp()))

        return run

    def close(self) -> None:
        """Its memory is free for the next."""
        self._engine.close()
        del self._engine


def again(run: Run) -> Run:
    """In place of a recording, where there is no GPU."""
    run()
    return run


# -- the device ------------------------------------------------------------------------------------------------------


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


def bandwidth(clock: Clock, device: torch.device, size: int) -> dict[str, float]:
    """Bytes a second of a copy (read and written), and of a sum (read), of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copied = clock.median(lambda: target.copy_(source), 20)
    summed = clock.median(lambda: source.sum(), 20)
    return {"copy": 2 * source.nbytes / copied, "read": source.nbytes / summed}
