"""`toolkit chat`: talk to a target in the terminal; drafted tokens are marked, and their speed is shown."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from toolkit.commands.model_arguments import OPTIONS, add_engine_arguments, describe, load_from
from toolkit.infer.request.chat_prompt import ChatPromptError, chat_ids, require_chat_template
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.params import SamplingParams
from toolkit.log import DIM, END, GREEN, UNDERLINE, UNPRINTABLE

if TYPE_CHECKING:  # the parser is built without torch
    from toolkit.infer.load.load_engine import LoadedEngine
    from toolkit.infer.request.request import AcceptanceStats, Answer, Request

HELP = "talk to a target in the terminal, drafted tokens shown in green"

# Plain steps that are timed: at most so many or those of so many seconds, at least 3. The first of a process are slow.
TIMED_STEPS, TIMED_SECONDS, LEAST_STEPS, SLOW_STEPS = 12, 2.0, 3, 2
COMMANDS_HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [name for name in OPTIONS if name != "max_running_requests"]  # one conversation
    add_engine_arguments(parser.add_argument_group("engine"), names)
    group = parser.add_argument_group("chat")
    group.add_argument("--prompt", metavar="TEXT", help="answer this prompt and end; only the answer goes to stdout")
    group.add_argument("--system", metavar="TEXT", help="system message (default: the chat template's own)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, help="default: 1, every token")
    group.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: 512)")
    group.add_argument(
        "--seed", type=int, help="of the sampling; the same seed gives the same answer (default: one at random)"
    )
    group.add_argument(
        "--plain", action="store_true", help="do not mark drafted tokens (output that is no terminal is never marked)"
    )
    parser.epilog = "Drafted tokens that the target accepted are green, or underlined where NO_COLOR is set."


def run(args: argparse.Namespace) -> int:
    """Answer --prompt, or hold a conversation until /quit."""
    from toolkit.infer.load.load_engine import closing

    loaded = load_from(args, max_running_requests=1)
    with closing(loaded):
        converse(args, loaded)
    return 0


def converse(args: argparse.Namespace, loaded: LoadedEngine) -> None:
    """Answer --prompt or talk. Raises ValueError with a message for the user, RankLostError when a rank ends."""
    conversation = ChatSession(
        loaded.engine,
        loaded.target.tokenizer,
        context_length=loaded.engine.context_length,
        system=args.system,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    painter = Painter(sys.stdout, marker(args.plain, sys.stdout))
    shape = loaded.shape_name
    plain = None if shape is None else conversation.plain_tokens_per_s()

    def answer(text: str) -> None:
        with interrupts() as interrupted:
            exchange = conversation.ask(text, painter.write, interrupted)
        painter.end()
        print(summary(exchange, shape, args.temperature, plain), file=sys.stderr, flush=True)

    if args.prompt is not None:
        answer(args.prompt)
        return
    target = loaded.target
    print(f"{target.name} ({target.precision}); draft: {describe(loaded)}\n{COMMANDS_HELP}", file=sys.stderr)
    if painter.mark and shape is not None:
        print(f"{painter.mark}drafted tokens{END}, the target's own tokens", file=sys.stderr)
    talk(answer, conversation.reset, sys.stdin)


def talk(answer: Callable[[str], None], reset: Callable[[], None], stdin: TextIO) -> None:
    """Read lines until /quit or the end of input. A line that cannot be answered prints an error and is dropped."""
    with contextlib.suppress(ImportError):  # line editing and history, if the platform has it
        import readline  # noqa: F401

    while True:
        try:
            line = _read_line(stdin)
        except KeyboardInterrupt:
            print(f"\n{COMMANDS_HELP}", file=sys.stderr)
            continue
        except EOFError:
            if stdin.isatty():
                print(file=sys.stderr)  # so that the shell's prompt begins a line
            return
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            reset()
            print("the conversation is forgotten", file=sys.stderr)
        elif line.startswith("/") and line[1:].isalpha():
            print(f"no command {line}; {COMMANDS_HELP}", file=sys.stderr)
        elif line:
            try:
                answer(line)
            except ChatSessionError as error:
                print(f"toolkit chat: {error}", file=sys.stderr)


def _read_line(stdin: TextIO) -> str:
    if stdin.isatty():
        return input("\nyou> ").strip()
    line = stdin.readline()
    if not line:
        raise EOFError
    return line.strip()


def marker(plain: bool, stdout: TextIO) -> str:
    """The escape sequence that begins drafted text; "" if nothing is marked."""
    if plain or not stdout.isatty() or os.environ.get("TERM") == "dumb":
        return ""
    return UNDERLINE if os.environ.get("NO_COLOR") else GREEN


class Painter:
    """Writes an answer piece by piece; drafted pieces are enclosed in `mark` and END."""

    def __init__(self, stdout: TextIO, mark: str) -> None:
        self._stdout = stdout
        self.mark = mark
        self._clean = stdout.isatty()
        self._at_line_start = True

    def write(self, text: str, from_draft: bool) -> None:
        """Write one piece and flush."""
        if not text:
            return
        shown = text.translate(UNPRINTABLE) if self._clean else text
        self._at_line_start = text.endswith("\n")
        self._stdout.write(f"{self.mark}{shown}{END}" if from_draft and self.mark else shown)
        self._stdout.flush()

    def end(self) -> None:
        """End the answer's last line."""
        if not self._at_line_start:
            self._stdout.write("\n")
            self._stdout.flush()
        self._at_line_start = True


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C sets a flag and does not raise: an engine step always completes."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def summary(exchange: Exchange, shape: str | None, temperature: float, plain_tokens_per_s: float | None) -> str:
    """The line printed after an answer. shape: None for plain decoding."""
    ending = {"length": ", cut at the token limit", "abort": ", stopped"}.get(str(exchange.answer.finish_reason), "")
    count, speed = exchange.answer.n_tokens, _speed(exchange.tokens_per_s)
    if shape is None:
        parts = f"plain decoding, {count} tokens, {speed}{ending}"
    else:
        stats = exchange.stats
        length = f"{stats.accept_length:.2f}" if stats.verify_steps else "-"
        of_drafts = (
            f"accept_length {length} over {stats.verify_steps} verify steps, {shape}, temperature {temperature:g}"
        )
        beside = "" if plain_tokens_per_s is None else f"; plain decoding about {_speed(plain_tokens_per_s)} here"
        parts = f"{count} tokens, {exchange.answer.n_from_draft} of them drafted, {speed}{ending}, {of_drafts}{beside}"
    return f"{DIM}[{parts}]{END}" if sys.stderr.isatty() else f"[{parts}]"


def _speed(tokens_per_s: float | None) -> str:
    return "- tokens/s" if tokens_per_s is None else f"{tokens_per_s:.1f} tokens/s"


class ChatSessionError(ValueError):
    """A turn cannot be answered. The conversation does not change."""


@dataclass(frozen=True)
class Exchange:
    """One turn. decode_s: seconds from the answer's first token to its last. stats: the acceptance statistics."""

    text: str
    answer: Answer
    decode_s: float
    stats: AcceptanceStats

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first one, which comes with the prompt; None for an answer of one token."""
        after = self.answer.n_tokens - 1
        return after / self.decode_s if after > 0 and self.decode_s > 0 else None


class ChatSession:
    """Keeps the messages and steps the engine. No other code may step the engine during `ask`."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        *,
        context_length: int,
        system: str | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._context_length = context_length
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._start)
        try:
            require_chat_template(tokenizer)
            self._params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
        except ValueError as error:
            raise ChatSessionError(str(error)) from error

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.messages = list(self._start)

    def plain_tokens_per_s(self) -> float | None:
        """Measure the speed of plain decoding: write a few tokens without drafts, outside of the conversation.

        None if the chat template rejects a greeting, or the context is too short for one.
        """
        from toolkit.infer.request.request import PromptTooLongError

        params = SamplingParams(max_tokens=TIMED_STEPS + SLOW_STEPS + 1, ignore_eos=True)
        try:
            ids = chat_ids(self._tokenizer, [*self._start, {"role": "user", "content": "Hello"}])
            request = self._engine.add_request(ids, params, speculative=False)
        except (ChatPromptError, PromptTooLongError):
            return None
        seconds: list[float] = []
        while not request.finished:
            written, began = len(request.output_ids), time.perf_counter()
            self._engine.step()
            if written:  # the first token comes with the prompt
                seconds.append(time.perf_counter() - began)
            if sum(seconds) > TIMED_SECONDS and len(seconds) >= SLOW_STEPS + LEAST_STEPS:
                self._engine.abort(request)
        return 1 / median(seconds[SLOW_STEPS:]) if len(seconds) >= SLOW_STEPS + LEAST_STEPS else None

    def ask(
        self,
        text: str,
        show: Callable[[str, bool], None],
        interrupted: Callable[[], bool],
    ) -> Exchange:
        """Answer `text`. Call show(piece, from_draft) for each new piece; stop if interrupted() between steps.

        The conversation keeps the shown part of a stopped answer. Raises ChatSessionError.
        """
        from toolkit.infer.request.request import Answer, Update, events_of_answer, summarise

        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._submit(messages)
        answer = Answer(self._detokenizer.stream())
        written: list[str] = []
        sent = 0
        try:
            while answer.finish_reason is None:
                if interrupted():
                    self._engine.abort(request)
                else:
                    self._engine.step()
                update = Update.since(request, sent)
                sent += len(update.token_ids)
                for piece, from_draft in answer.feed_pieces(update):
                    written.append(piece)
                    show(piece, from_draft)
        finally:
            if request.finish_reason is None:  # show() raised, e.g. into a closed pipe
                self._engine.abort(request)
        whole = "".join(written)
        self.messages = [*messages, {"role": "assistant", "content": whole}]
        stats = summarise(events_of_answer(request.events, answer.n_tokens))
        decode_s = 0.0
        if request.first_token_at is not None and request.finished_at is not None:
            decode_s = request.finished_at - request.first_token_at
        return Exchange(whole, answer, decode_s, stats)

    def _submit(self, messages: list[dict[str, str]]) -> Request:
        try:
            ids = chat_ids(self._tokenizer, messages)
        except ChatPromptError as error:
            raise ChatSessionError(str(error)) from error
        if len(ids) >= self._context_length:
            raise ChatSessionError(
                f"the conversation has {len(ids)} tokens and the model's context is {self._context_length}; "
                "/reset starts a new one"
            )
        return self._engine.add_request(ids, self._params)
