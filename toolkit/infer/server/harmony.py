"""GPT-OSS answers: messages on channels, each with a header (the "harmony" form).

<|channel|>analysis<|message|>..<|end|>                                             reasoning
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>   a call
<|start|>assistant<|channel|>final<|message|>..                                     content
"""

from __future__ import annotations

import re
from collections.abc import Collection

from toolkit.infer.server.answer_pieces import Kind, SteppedParser

BODY, START, CHANNEL = "<|message|>", "<|start|>", "<|channel|>"
ASSISTANT, FINAL = f"{START}assistant", f"{CHANNEL}final{BODY}"  # the end of a prompt; a header of content
HEADERS = (START, CHANNEL, "to=")  # the prompt ends in a header's first words: an answer may go on with the recipient
ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)


class Harmony(SteppedParser):
    """Parses reasoning and calls at once. names: the offered functions.

    A preamble (commentary without a recipient) is content; a message to another recipient is reasoning.
    """

    markers: tuple[str, ...] = (BODY, "<|constrain|>", *ENDS)

    def __init__(self, names: Collection[str]) -> None:
        self.thinking = False
        self._names = names
        self._kind: Kind = "content"
        super().__init__(self._between)

    def _between(self) -> bool:
        """The beginning of a message. Text without a header is content."""
        start = self._text.lstrip()
        if start.startswith(HEADERS):
            return self._go(self._in_header)
        if not start or (not self._ended and any(mark.startswith(start) for mark in HEADERS)):
            return False
        self._kind = "content"
        return self._go(self._body)

    def _in_header(self) -> bool:
        header, mark, body = self._text.partition(BODY)
        if not mark:
            return False  # an answer that ends here has no further message
        self._text = body
        recipient = re.search(r"to=([\w.-]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if name in self._names:
            self._write("call", name)
            self._kind = "arguments"
        else:
            thinks = recipient is not None or (channel is not None and channel[1] == "analysis")
            self._kind = "reasoning" if thinks else "content"
        self.thinking = self._kind == "reasoning"
        return self._go(self._body)

    def _body(self) -> bool:
        text, mark = self._before(ENDS)
        self._write(self._kind, text)
        if mark is None:
            return False
        self.thinking = False
        if mark in (START, CHANNEL):
            self._text = mark + self._text
        return self._go(self._between)
