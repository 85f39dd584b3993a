"""Tool calls written as a list of Python calls, [f(a=1), g(b="x")]: Llama 3.2 and Llama 4."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection

from toolkit.infer.server.answer_pieces import SteppedParser
from toolkit.infer.server.tool_calls import JsonEnd


class PythonicCalls(SteppedParser):
    """Parses an answer that begins with such a list. The calls are known when the list is whole.

    names: the offered functions. A list with another function, or with more than literals in it, is content.
    """

    markers: tuple[str, ...] = ("<|python_start|>", "<|python_end|>")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(self._first)
        self._names = names
        self._end, self._scanned = JsonEnd(quotes="\"'"), 0
        self._opened = ""

    def _first(self) -> bool:
        start = self._text.lstrip()
        opens = self.markers[0]
        if start.startswith(opens) and not self._opened:
            taken = len(self._text) - len(start) + len(opens)
            self._opened, self._text = self._text[:taken], self._text[taken:]
            return True
        if not self._ended and opens.startswith(start):
            return False
        if start.startswith("["):
            return self._list(start)
        return self._go(self._content)

    def _list(self, start: str) -> bool:
        self._scanned += self._end.read(start[self._scanned :])
        if not self._end.done and not self._ended:
            return False
        calls = python_calls(start[: self._scanned])
        if not calls or any(name not in self._names for name, _ in calls):
            return self._go(self._content)
        for name, arguments in calls:
            self._write("call", name)
            self._write("arguments", arguments)
        self._text, self._opened = start[self._scanned :].lstrip(), ""
        return self._go(self._after)

    def _after(self) -> bool:
        self._text = self._text.lstrip()
        if self._text.startswith(self.markers[1]):
            self._text = self._text[len(self.markers[1]) :]
            return True
        if not self._text or self._may_begin(self.markers[1:]):
            return False
        return self._go(self._content)

    def _content(self) -> bool:
        self._write("content", self._opened + self._text)
        self._text, self._opened = "", ""
        return False


def python_calls(written: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of each call in a Python list of calls; None if it is no such list."""
    try:
        body = ast.parse(written.strip(), mode="eval").body
        return [_call(node) for node in body.elts] if isinstance(body, ast.List) else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    """Raises ValueError if the node is no call by name with literal keyword arguments."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keyword arguments")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    if len(arguments) != len(node.keywords):
        raise ValueError("an argument has no name")
    return ast.unparse(node.func), json.dumps(arguments, allow_nan=False)  # 1e999 is a literal too
