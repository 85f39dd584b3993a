"""`toolkit chat`: talk to a target in the terminal; drafted tokens are marked, and their speed is shown."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from toolkit.commands.model_arguments import OPTIONS, add_engine_arguments, describe, load_from
from toolkit.log import DIM, END, GREEN, UNDERLINE, UNPRINTABLE

if TYPE_CHECKING:
    from toolkit.commands.chat_session import Exchange
    from toolkit.infer.load.load_engine import LoadedEngine
    from toolkit.infer.request.request import AcceptanceStats, Request

HELP = "talk to a target in the terminal, drafted tokens shown in green"

STATUS_EVERY_S = 0.2
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
    from toolkit.commands.chat_session import ChatSession

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
    plain = None
    if shape is not None:
        plain = conversation.plain_tokens_per_s()

    def answer(text: str) -> None:
        with interrupts() as interrupted, StatusLine(sys.stdout) as status:
            exchange = conversation.ask(
                text,
                painter.write,
                interrupted,
                lambda request: status.show(lambda: status_of(request, plain)),
            )
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
    from toolkit.commands.chat_session import ChatSessionError

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


class StatusLine:
    """The last line of the terminal, while an answer is written above it. Shows nothing where there is no terminal.

    The lines above become the scrolling region (DECSTBM), so that the answer never scrolls the status away.
    """

    def __init__(self, stdout: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stdout, self._clock = stdout, clock
        self._on = stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._columns, self._rows = shutil.get_terminal_size()
        self._drawn_at: float | None = None

    def __enter__(self) -> StatusLine:
        if self._on:
            # A new line and back: the cursor is then above the last line. Setting the region moves it; \x1b8 restores.
            self._write(f"\n\x1b[1A\x1b7\x1b[1;{self._rows - 1}r\x1b8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    def show(self, text: Callable[[], str]) -> None:
        """Draw the text, at most every STATUS_EVERY_S seconds; only then it is computed."""
        now = self._clock()
        if self._on and (self._drawn_at is None or now - self._drawn_at >= STATUS_EVERY_S):
            self._drawn_at = now
            line = text()[: self._columns - 1]
            self._write(f"\x1b7\x1b[{self._rows};1H\x1b[2K{DIM}{line}{END}\x1b8")

    def _write(self, codes: str) -> None:
        self._stdout.write(codes)
        self._stdout.flush()


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C sets a flag and does not raise: an engine step always completes."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def status_of(request: Request, plain_tokens_per_s: float | None) -> str:
    """The status line of an answer that is being written."""
    from toolkit.commands.chat_session import tokens_per_s
    from toolkit.infer.request.request import summarise

    since = 0.0 if request.first_token_at is None else time.perf_counter() - request.first_token_at
    facts = [f"{len(request.output_ids)} tokens", _speed(tokens_per_s(len(request.output_ids), since))]
    if request.speculative:
        facts += [_accept_length(summarise(request.events)), *_plain(plain_tokens_per_s)]
    return ", ".join(facts)


def summary(exchange: Exchange, shape: str | None, temperature: float, plain_tokens_per_s: float | None) -> str:
    """The line printed after an answer. shape: None for plain decoding."""
    ending = {"length": ", cut at the token limit", "abort": ", stopped"}.get(str(exchange.answer.finish_reason), "")
    count, speed = exchange.answer.n_tokens, _speed(exchange.tokens_per_s)
    if shape is None:
        parts = f"plain decoding, {count} tokens, {speed}{ending}"
    else:
        of_drafts = (
            f"{_accept_length(exchange.stats)} over {exchange.stats.verify_steps} verify steps, {shape}, "
            f"temperature {temperature:g}"
        )
        beside = "".join(f"; {fact} here" for fact in _plain(plain_tokens_per_s))
        parts = f"{count} tokens, {exchange.answer.n_from_draft} of them drafted, {speed}{ending}, {of_drafts}{beside}"
    return f"{DIM}[{parts}]{END}" if sys.stderr.isatty() else f"[{parts}]"


def _speed(tokens_per_s: float | None) -> str:
    return "- tokens/s" if tokens_per_s is None else f"{tokens_per_s:.1f} tokens/s"


def _accept_length(stats: AcceptanceStats) -> str:
    return f"accept_length {stats.accept_length:.2f}" if stats.verify_steps else "accept_length -"


def _plain(tokens_per_s: float | None) -> list[str]:
    """The plain speed, if it was measured."""
    return [] if tokens_per_s is None else [f"plain decoding about {_speed(tokens_per_s)}"]
