"""`toolkit chat`: talk to a target in the terminal; drafted tokens are marked, and their speed is shown."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from toolkit.commands.model_arguments import OPTIONS, add_engine_arguments, describe, load_from
from toolkit.infer.request.chat_prompt import ChatPromptError, chat_ids, require_chat_template
from toolkit.infer.request.detokenize import Detokenizer
from toolkit.infer.request.params import EngineError, SamplingParams
from toolkit.log import DIM, END, GREEN, UNDERLINE, UNPRINTABLE

if TYPE_CHECKING:  # the parser is built without torch
    from toolkit.infer.request.request import Answer, Request

# Plain steps that are timed: at most so many or those of so many seconds. The first of a process are slow.
TIMED_STEPS, TIMED_SECONDS, SLOW_STEPS = 12, 2.0, 3
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

    params = SamplingParams(args.temperature, args.top_p, max_tokens=args.max_tokens, seed=args.seed)
    loaded = load_from(args, max_running_requests=1)
    with closing(loaded):
        target, shape = loaded.target, loaded.shape_name
        session = ChatSession(loaded.engine, target.tokenizer, params, args.system)
        painter = Painter(sys.stdout, marker(args.plain, sys.stdout))
        plain = None if shape is None else session.plain_tokens_per_s()

        def answer(text: str) -> None:
            with interrupts() as interrupted:
                request, reply = session.ask(text, painter.write, interrupted)
            painter.end()
            print(summary(request, reply, shape, plain), file=sys.stderr, flush=True)

        if args.prompt is not None:
            answer(args.prompt)
            return 0
        print(f"{target.name} ({target.precision}); draft: {describe(loaded)}\n{COMMANDS_HELP}", file=sys.stderr)
        if painter.mark and shape is not None:
            print(f"{painter.mark}drafted tokens{END}, the target's own tokens", file=sys.stderr)
        talk(answer, session.reset)
    return 0


def talk(answer: Callable[[str], None], reset: Callable[[], None]) -> None:
    """Read lines until /quit or the end of input. A line that cannot be answered prints an error and is dropped."""
    with contextlib.suppress(ImportError):  # line editing and history, if the platform has it
        import readline  # noqa: F401

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are an error of their line
    at_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("\nyou> " if at_terminal else "").strip()
        except KeyboardInterrupt:
            print(f"\n{COMMANDS_HELP}", file=sys.stderr)
            continue
        except EOFError:
            if at_terminal:
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
            except (ChatPromptError, EngineError) as error:
                print(f"toolkit chat: {error}; {COMMANDS_HELP}", file=sys.stderr)


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
        self._at_line_start = True

    def write(self, text: str, from_draft: bool) -> None:
        """Write one piece and flush."""
        self._at_line_start = text.endswith("\n")
        shown = text.translate(UNPRINTABLE) if self._stdout.isatty() else text
        self._stdout.write(f"{self.mark}{shown}{END}" if from_draft and self.mark else shown)
        self._stdout.flush()

    def end(self) -> None:
        """End the answer's last line."""
        if not self._at_line_start:
            self.write("\n", False)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C sets a flag and does not raise: an engine step always completes."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def summary(request: Request, answer: Answer, shape: str | None, plain_tokens_per_s: float | None) -> str:
    """The line printed after an answer. shape: None for plain decoding. Speeds are of the tokens after the first, which
    comes with the prompt."""
    from toolkit.infer.request.request import events_of_answer, summarise

    ending = {"length": ", cut at the token limit", "abort": ", stopped"}.get(str(answer.finish_reason), "")
    seconds = (request.finished_at or 0.0) - (request.first_token_at or 0.0)
    speed = f"{(answer.n_tokens - 1) / seconds:.1f}" if answer.n_tokens > 1 and seconds > 0 else "-"
    if shape is None:
        parts = f"plain decoding, {answer.n_tokens} tokens, {speed} tokens/s{ending}"
    else:
        stats = summarise(events_of_answer(request.events, answer.n_tokens))
        length = f"{stats.accept_length:.2f}" if stats.verify_steps else "-"
        parts = (
            f"{answer.n_tokens} tokens, {answer.n_from_draft} of them drafted, {speed} tokens/s{ending}, accept_length "
            f"{length} over {stats.verify_steps} verify steps, {shape}, temperature {request.params.temperature:g}"
        )
        if plain_tokens_per_s is not None:
            parts += f"; plain decoding about {plain_tokens_per_s:.1f} tokens/s here"
    return f"{DIM}[{parts}]{END}" if sys.stderr.isatty() else f"[{parts}]"


class ChatSession:
    """Keeps the messages and steps the engine. No other code may step the engine during `ask`.

    Raises NoChatTemplateError."""

    def __init__(self, engine: Any, tokenizer: Any, params: SamplingParams, system: str | None = None) -> None:
        require_chat_template(tokenizer)
        self._engine, self._tokenizer, self._params = engine, tokenizer, params
        self._detokenizer = Detokenizer(tokenizer)
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._start)

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.messages = list(self._start)

    def plain_tokens_per_s(self) -> float | None:
        """Measure the speed of plain decoding: write a few tokens without drafts, outside of the conversation.

        None if the chat template rejects a greeting, or the context is too short for one.
        """
        params = SamplingParams(max_tokens=TIMED_STEPS + SLOW_STEPS, ignore_eos=True)
        try:
            ids = chat_ids(self._tokenizer, [*self._start, {"role": "user", "content": "Hello"}])
            request = self._engine.add_request(ids, params, speculative=False)
        except (ChatPromptError, EngineError):
            return None
        seconds: list[float] = []
        while not request.finished:
            began = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - began)
            if sum(seconds) > TIMED_SECONDS and len(seconds) > 2 * SLOW_STEPS:
                self._engine.abort(request)
        return 1 / median(seconds[SLOW_STEPS:]) if len(seconds) > SLOW_STEPS else None

    def ask(
        self, text: str, show: Callable[[str, bool], None], interrupted: Callable[[], bool]
    ) -> tuple[Request, Answer]:
        """Answer `text`. Call show(piece, from_draft) for each new piece; stop if interrupted() between steps.

        The conversation keeps the shown part of a stopped answer. Raises ChatPromptError or EngineError for a turn that
        cannot be answered, which leaves the conversation as it was.
        """
        from toolkit.infer.request.request import Answer, Update

        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._engine.add_request(chat_ids(self._tokenizer, messages), self._params)
        answer, written, sent = Answer(self._detokenizer.stream()), "", 0
        try:
            while answer.finish_reason is None:
                if interrupted():
                    self._engine.abort(request)
                else:
                    self._engine.step()
                update = Update.since(request, sent)
                sent += len(update.token_ids)
                for piece, from_draft in answer.feed_pieces(update):
                    written += piece
                    show(piece, from_draft)
        finally:
            if request.finish_reason is None:  # show() raised, e.g. into a closed pipe
                self._engine.abort(request)
        self.messages = [*messages, {"role": "assistant", "content": written}]
        return request, answer
