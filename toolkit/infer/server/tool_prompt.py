"""Tools for a chat template that knows none: they are described in the system message, in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

DESCRIPTION = """You may call functions to help with the user's request. Their signatures, as JSON, are:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between these tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def in_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{"role", "content"} messages with the same meaning: tools, calls and results are text.

    The results of one turn become one message of the user, as templates with tools do it.
    """
    converted: list[dict[str, Any]] = []
    if tools:
        written = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        converted.append({"role": "system", "content": DESCRIPTION.format(tools=written)})
    previous = ""
    for at, message in enumerate(messages):
        role, text = message["role"], _text(message)
        if at == 0 and role == "system" and converted:
            converted[0]["content"] = f"{text}\n\n{converted[0]['content']}"
        elif role == "tool" and previous == "tool":
            converted[-1]["content"] += f"\n{text}"
        else:
            converted.append({"role": "user" if role == "tool" else role, "content": text})
        previous = role
    return converted


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"] or ""
    if message["role"] == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    parts = [content] if content else []
    for call in message.get("tool_calls", ()):
        name, values = (call["function"][key] for key in ("name", "arguments"))
        written = values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {written}}}\n</tool_call>')
    return "\n".join(parts)
