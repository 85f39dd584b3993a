"""Time plain and speculative decoding of the same prompts in one run, interleaved.

Each group of prompts is decoded by every mode in turn, and the first mode rotates from group to group:

    group 0   plain   chain   tree         If the machine becomes slower (heat, another user), it slows
    group 1   chain   tree    plain        all modes alike, so that their ratio stays.
    group 2   tree    plain   chain

In every mode, turn n + 1 of a conversation follows plain decoding's answer to turn n. So all modes decode the same
prompts even if 16-bit rounding makes their answers differ.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from toolkit.bench.prompts import BUILTIN, Prompt
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.data.chat_template import prompt_ids
from toolkit.infer.cache.cache_manager import GPU_SHARE
from toolkit.infer.cache.round_state import RoundRows
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.drafter import NoDrafter
from toolkit.infer.drafters.lookup import NgramLookup, with_chains
from toolkit.infer.engine.config import EngineConfig
from toolkit.infer.engine.engine import Engine
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape, DraftTree, root_only
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import PromptTooLongError, Request, VerifyEvent
from toolkit.infer.verify.verifiers import ForcedAcceptance
from toolkit.jsonl import RowAppender, cut_torn_line, read_rows
from toolkit.log import get_logger
from toolkit.targets.target import Target
from toolkit.weights import sha256_file, sha256_json

WARMUP_TOKENS = 16
PERFECT = "perfect drafts"  # the mode of `PerfectDrafter`
Progress = Callable[[int, int], None]
AnyMode = TypeVar("AnyMode")


class BenchError(ValueError):
    """A measurement cannot be made with these prompts, shapes or this target."""


@dataclass(frozen=True)
class Mode:
    """Plain decoding (no shape), or speculative decoding with a shape or at most that shape, and its engine.

    adaptive: the engine chooses in every step. It learns from step to step, so it runs no other mode. label: the name;
    None: that of the shape.
    """

    engine: Engine
    shape: DraftShape | None
    adaptive: bool = False
    label: str | None = None

    @property
    def name(self) -> str:
        if self.label is not None:
            return self.label
        if self.adaptive:
            return ADAPTIVE
        return PLAIN if self.shape is None else self.shape.name


class PerfectDrafter(NoDrafter):
    """Drafts known answers, a chain of `depth` tokens a step: what the engine gains when every draft is right.

    answers: by a request's seed, which differs between questions. Drafts past the answer's end are padded: on a GPU
    each size of tree is another graph. `SideBySide.open_perfect` accepts all of them: in 16 bits the target would part
    from its own answer at a near-tie, and the drafts after that would be of another text.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.answers: dict[int | None, tuple[int, ...]] = {}

    def propose(self, requests: Sequence[Request], rows: RoundRows) -> DraftTree:
        drafts = [list(self._following(request)) if request.speculative else [] for request in requests]
        roots = root_only(rows.roots)
        return with_chains(roots, rows.roots, drafts) if any(drafts) else roots

    def _following(self, request: Request) -> tuple[int, ...]:
        written = len(request.output_ids)
        answer = self.answers.get(request.params.seed, ())
        known = answer[written : written + self.depth]
        return (*known, *[0] * (self.depth - len(known))) if answer else ()

    def set_shape(self, shape: DraftShape) -> None:
        self.depth = shape.num_steps


def run_side_by_side(
    modes: Sequence[Mode],
    tokenizer: Any,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch: int = 1,
    warmup: int = 1,
    keep: ResumeLog | None = None,
    on_progress: Progress | None = None,
) -> list[Round]:
    """Answer every turn of `prompts` in every mode, `batch` conversations at a time.

    `warmup` prompts are decoded in every mode first, and are not in the result. Groups stored in `keep` are not decoded
    again. `on_progress(done, total)` counts answers over all modes. Raises `BenchError` for a prompt that is too long
    for the target, `ChatTemplateError` for one that the chat template rejects.
    """
    kept = {} if keep is None else keep.read(prompts, sampling)
    groups = range(0, len(prompts), batch)
    if len(kept) < len(groups):
        _warm_up(modes, tokenizer, prompts[:warmup], sampling, batch)
    total, done = sum(len(prompt.turns) for prompt in prompts) * len(modes), 0
    rounds: list[Round] = []
    place = 0
    for start in groups:
        group = prompts[start : start + batch]
        found = kept.get(start)
        if found is None:
            found = []
            for fresh in _answer_group(modes, tokenizer, group, sampling, place):
                found.append(fresh)
                if on_progress is not None:
                    on_progress(done + sum(len(one.answers) for one in found), total)
            if keep is not None:
                keep.append(start, found)
        rounds += found
        done += sum(len(one.answers) for one in found)
        place += max(len(prompt.turns) for prompt in group)
    return rounds


def _warm_up(modes: Sequence[Mode], tokenizer: Any, prompts: Sequence[Prompt], sampling: Sampling, batch: int) -> None:
    for start in range(0, len(prompts), batch):
        questions = []
        for prompt in prompts[start : start + batch]:
            ids = tuple(prompt_ids(tokenizer, [*_system(prompt), _user(prompt.turns[0])]))
            questions.append(Question(prompt, 0, ids, sampling.params(prompt, 0)))
        for mode in modes:
            _tell(modes, _answer(mode, questions, limit=WARMUP_TOKENS))


def _tell(modes: Sequence[Mode], done: Round) -> None:
    """Give plain decoding's answers to the perfect drafters."""
    for drafter in (mode.engine.drafter for mode in modes if mode.name == PERFECT and done.mode == PLAIN):
        assert isinstance(drafter, PerfectDrafter)
        drafter.answers = {one.question.params.seed: one.output_ids for one in done.answers}


def _answer_group(
    modes: Sequence[Mode], tokenizer: Any, group: Sequence[Prompt], sampling: Sampling, place: int
) -> Iterator[Round]:
    """Answer all turns of a group in every mode. `place` is the number of earlier turns, which sets the mode order."""
    histories = {prompt.question_id: _system(prompt) for prompt in group}
    for turn in range(max(len(prompt.turns) for prompt in group)):
        questions = []
        for prompt in (prompt for prompt in group if turn < len(prompt.turns)):
            history = histories[prompt.question_id]
            history.append(_user(prompt.turns[turn]))
            ids = tuple(prompt_ids(tokenizer, history))
            questions.append(Question(prompt, turn, ids, sampling.params(prompt, turn)))
        last = [one for one in modes if one.name == PERFECT]  # its drafts are plain decoding's answers
        for mode in [*rotated([one for one in modes if one.name != PERFECT], place + turn), *last]:
            done = _answer(mode, questions)
            yield done
            _tell(last, done)
            for answer in done.answers if mode.name == PLAIN else ():
                text = tokenizer.decode(list(answer.output_ids), skip_special_tokens=True)
                histories[answer.question.prompt.question_id].append({"role": "assistant", "content": text})


def rotated(modes: Sequence[AnyMode], place: int) -> list[AnyMode]:
    """Return the order of the modes for group number `place`."""
    first = place % len(modes)
    return [*modes[first:], *modes[:first]]


def _system(prompt: Prompt) -> list[dict[str, str]]:
    return [] if prompt.system is None else [{"role": "system", "content": prompt.system}]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer(mode: Mode, questions: Sequence[Question], limit: int | None = None) -> Round:
    """Decode `questions` together in one mode, timing each engine step."""
    engine = mode.engine
    if mode.shape is not None and not mode.adaptive:
        engine.set_shape(mode.shape)
    requests: list[Request] = []
    clock = time.perf_counter()
    for question in questions:
        params = question.params
        if limit is not None:
            params = SamplingParams(params.temperature, seed=params.seed, max_tokens=min(limit, params.max_tokens))
        try:
            requests.append(engine.add_request(question.prompt_ids, params, speculative=mode.shape is not None))
        except PromptTooLongError as error:
            raise BenchError(f"prompt {question.prompt.question_id}, turn {question.turn}: {error}") from error
    decode_s = 0.0
    while engine.has_work():
        fresh = [request for request in requests if not request.output_ids]
        engine.step()
        now = time.perf_counter()
        # A step prefills waiting prompts before it decodes, so its last first token separates the two phases.
        first = max((request.first_token_at for request in fresh if request.first_token_at is not None), default=clock)
        decode_s += now - first
        clock = now
    decode_tokens = sum(len(request.output_ids) - 1 for request in requests)
    answers = tuple(
        LoggedAnswer(question, tuple(request.output_ids), tuple(request.events))
        for question, request in zip(questions, requests, strict=True)
    )
    return Round(mode.name, answers, decode_s, decode_tokens)


logger = get_logger(__name__)


@dataclass(frozen=True)
class Question:
    """One rendered turn of one conversation."""

    prompt: Prompt
    turn: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class LoggedAnswer:
    """One mode's answer to one question, with its verify steps."""

    question: Question
    output_ids: tuple[int, ...]
    events: tuple[VerifyEvent, ...]


@dataclass(frozen=True)
class Round:
    """One mode's answers to a group of questions that were decoded together.

    decode_s: seconds after the first token of each answer. decode_tokens: the tokens written in them.
    """

    mode: str
    answers: tuple[LoggedAnswer, ...]
    decode_s: float
    decode_tokens: int


@dataclass(frozen=True)
class Sampling:
    """Sampling settings that are the same for every question."""

    max_tokens: int
    temperature: float
    seed: int

    def params(self, prompt: Prompt, turn: int) -> SamplingParams:
        """Return the parameters of one question. The seed differs between questions and is equal for all modes."""
        seed = zlib.crc32(f"{self.seed}/{prompt.question_id}/{turn}".encode())
        return SamplingParams(temperature=self.temperature, seed=seed, max_tokens=self.max_tokens)


class ResumeLog:
    """The stored groups of one measurement: one JSON object per line, first a hash of its settings, then each group.

    made_of: everything that determines its rows (settings, models, machine, versions). A file of another measurement is
    deleted and started again.
    """

    def __init__(self, path: Path, made_of: Mapping[str, Any]) -> None:
        self.path = path
        self._mark = sha256_json(made_of)

    def read(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[int, list[Round]]:
        """Return the finished groups by the index of their first prompt. Raises `DataError` for a damaged line."""
        if not self.path.is_file():
            return {}
        cut_torn_line(self.path)
        rows = [row for _, row in read_rows(self.path)]
        if not rows or rows[0].get("made_of") != self._mark:
            logger.info("%s has other settings, machine or versions; measuring again from the start", self.path)
            self.path.unlink()
            return {}
        by_id = {prompt.question_id: prompt for prompt in prompts}
        return {row["group"]: [_round(one, by_id, sampling) for one in row["rounds"]] for row in rows[1:]}

    def append(self, group: int, rounds: Sequence[Round]) -> None:
        """Store a finished group; `group` is the index of its first prompt."""
        fresh = not self.path.is_file()
        with RowAppender(self.path) as rows:
            if fresh:
                rows.append({"made_of": self._mark})
            rows.append({"group": group, "rounds": [_row(done) for done in rounds]})


def _row(done: Round) -> dict[str, Any]:
    answers = [
        {
            "question_id": answer.question.prompt.question_id,
            "turn": answer.question.turn,
            "prompt_ids": list(answer.question.prompt_ids),
            "output_ids": list(answer.output_ids),
            "events": [astuple(event) for event in answer.events],
        }
        for answer in done.answers
    ]
    return {"mode": done.mode, "decode_s": done.decode_s, "decode_tokens": done.decode_tokens, "answers": answers}


def _round(row: Mapping[str, Any], prompts: Mapping[str, Prompt], sampling: Sampling) -> Round:
    answers = []
    for kept in row["answers"]:
        prompt, turn = prompts[kept["question_id"]], kept["turn"]
        question = Question(prompt, turn, tuple(kept["prompt_ids"]), sampling.params(prompt, turn))
        events = tuple(VerifyEvent(*event) for event in kept["events"])
        answers.append(LoggedAnswer(question, tuple(kept["output_ids"]), events))
    return Round(row["mode"], tuple(answers), row["decode_s"], row["decode_tokens"])


TOKENS_AGAIN = 3  # most tokens that one of an answer is in the next prompt: incomplete characters are read as U+FFFD


@dataclass(frozen=True)
class Trial:
    """What is measured: a draft on its target, prompts and how they are answered, and the options of the engines.

    source: where the prompts come from, as records have it.
    """

    target: Target
    draft: Draft
    prompts: Sequence[Prompt]
    sampling: Sampling
    config: EngineConfig
    source: str = BUILTIN

    @property
    def head(self) -> DraftCheckpoint:
        assert isinstance(self.draft, DraftCheckpoint), "a head is measured"
        return self.draft

    def settings(self) -> dict[str, Any]:
        """The settings that records of every kind have."""
        config, token_map = self.config, self.config.token_map
        named = None if token_map is None else {"file": Path(token_map).name, "sha256": sha256_file(Path(token_map))}
        return {
            "prompts": self.source,
            **asdict(self.sampling),
            "token_map": named,
            "batch": self.batch,
            "deterministic": config.deterministic,
            "torch_compile": config.torch_compile,
        }

    @property
    def batch(self) -> int:
        return self.config.max_running_requests

    def at_batch(self, batch: int) -> Trial:
        return replace(self, config=replace(self.config, max_running_requests=batch))

    def first(self, warmup: int) -> int:
        """The prompts to decode before the clock starts. On a GPU a whole group at least: rounds whose drafts the host
        makes (lookup's, perfect ones) are recorded when they first run."""
        return max(warmup, self.batch) if warmup and self.target.device.type == "cuda" else warmup

    def with_room(self) -> Trial:
        """In a context as long as the conversations need."""
        most = self.sampling.max_tokens
        longest = longest_prompt(self.target, self.prompts, most)
        return replace(self, config=with_context(self.config, longest, most))


class SideBySide(ExitStack):
    """A context manager that opens `count` engines of `config`, and closes them at its end.

    settings: of `build_engine`. On a GPU they share what one engine would take: the first has a `count`th of the
    cache's share of the memory, and the others a cache of the same size. On a CPU memory is taken when it is used, so
    each has its own share.
    """

    def __init__(self, config: EngineConfig, target: Target, count: int, **settings: Any) -> None:
        super().__init__()
        self._target, self._settings = target, settings
        if target.device.type == "cuda" and config.max_total_tokens is None:
            config = replace(config, mem_fraction_static=(config.mem_fraction_static or GPU_SHARE) / count)
        # All read the same prompts; with a prefix cache, later engines would reuse the work of earlier ones.
        self._config = replace(config, prefix_cache=False)

    def open(
        self,
        draft: Draft | None = None,
        shape: DraftShape | None = None,
        forced: ForcedAcceptance | None = None,
        **options: Any,
    ) -> Engine:
        """Open an engine that drafts `shape` in every step, or decodes plainly without a draft.

        forced: in place of that of the settings. options: fields of EngineConfig."""
        text = None if draft is None or shape is None else shape.as_text()
        config = replace(self._config, **{"shape": text, "adaptive": False, **options})
        settings = self._settings if forced is None else {**self._settings, "forced": forced}
        engine = self.enter_context(closing(build_engine(config, self._target, draft, **settings).engine))
        if self._target.device.type == "cuda":
            pool = engine.scheduler.memory.pool
            tokens = pool.capacity * pool.page_size
            self._config = replace(self._config, mem_fraction_static=None, max_total_tokens=tokens)
        return engine

    def open_perfect(self, depth: int) -> Mode:
        """Open an engine that drafts known answers, `depth` tokens a step, and accepts them."""
        every, shape = ForcedAcceptance((1.0,) * depth), DraftShape.chain(depth)
        plainly = {"lookup": None, "lookup_corpus": None, "token_map": None}
        confidence = EngineConfig().draft_confidence
        engine = self.open(NgramLookup(), shape, every, verify="target", draft_confidence=confidence, **plainly)
        engine.drafter = PerfectDrafter(depth)
        return Mode(engine, shape, label=PERFECT)


def with_context(config: EngineConfig, longest: int, max_tokens: int) -> EngineConfig:
    """The options for prompts of up to `longest` tokens and answers of max_tokens; a given `context_length` stays.

    The cache follows from it: all rows at full length, each with room for drafted nodes, within the engine's share of
    the memory (see `CacheNeed`).
    """
    return replace(config, context_length=config.context_length or longest + max_tokens)


def with_eager_rounds(config: EngineConfig) -> EngineConfig:
    """The options for rounds of which the host sees the parts: no CUDA graphs, which are also what a GPU compiles."""
    graphs = {"cuda_graph_max_bs": None, "torch_compile": False, "torch_compile_max_bs": None}
    return replace(config, disable_cuda_graph=True, **graphs)  # type: ignore[arg-type]


def longest_prompt(target: Target, prompts: Iterable[Prompt], max_tokens: int) -> int:
    """The most tokens of a prompt in these conversations, whose earlier answers have up to max_tokens."""
    longest = 1
    for prompt in prompts:
        messages = _system(prompt)
        for turn in prompt.turns:
            messages += [_user(turn), {"role": "assistant", "content": "."}]
        answers = TOKENS_AGAIN * max_tokens * (len(prompt.turns) - 1)
        longest = max(longest, len(prompt_ids(target.tokenizer, messages[:-1])) + answers)
    return longest
