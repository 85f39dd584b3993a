"""Token ids of prompts: chats by the target's chat template, texts; and of /tokenize and /detokenize."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.infer.request.chat_messages import for_template
from toolkit.infer.request.chat_prompt import ChatPromptError, NoChatTemplateError, chat_text, text_ids
from toolkit.infer.server.answer_parser import Parsers, reads, template_text
from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.protocol import ChatRequest, TokenizeRequest

REASONING_SWITCHES = ("enable_thinking", "thinking")  # variables of templates: Qwen's and GLM's, DeepSeek's


class Prompts:
    """Makes prompts with one tokenizer."""

    def __init__(self, tokenizer: Any, parsers: Parsers) -> None:
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._template = template_text(tokenizer)
        # A request must not replace the template, or change how transformers renders it.
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}

    def of_text(self, text: str, special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return list(self._tokenizer(text, add_special_tokens=special_tokens)["input_ids"])

    def of_chat(self, body: ChatRequest, *, generation_prompt: bool = True) -> list[int]:
        """The ids of a chat's prompt. Raises ApiError if the template rejects the messages or does not read a field."""
        if body.offered and self._parsers.calls is None:
            message = "'tools' is not supported: no parser reads the calls of this target; name one: --tool-call-parser"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        messages, tools = for_template(body.messages), [tool.for_template() for tool in body.offered]
        with_tools = bool(tools) or any(one.tool_calls or one.role == "tool" for one in body.messages)
        if with_tools and not reads(self._template, "tools"):
            messages, tools = in_text(messages, tools), []
        settings = {**self._variables(body), "add_generation_prompt": generation_prompt}
        try:
            text = chat_text(self._tokenizer, messages, tools or None, **settings)
        except NoChatTemplateError as error:
            message = "the target's tokenizer has no chat template; use /v1/completions"
            raise ApiError(400, message, code="no_chat_template") from error
        except ChatPromptError as error:
            raise ApiError(400, str(error), param="messages") from error
        return text_ids(self._tokenizer, text + (self._parsers.before_content(text) if body.has_grammar else ""))

    def _variables(self, body: ChatRequest) -> dict[str, Any]:
        """The template's variables that the request sets; one that the template does not read would be ignored."""
        places = {name: f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs}
        variables: dict[str, Any] = dict(body.chat_template_kwargs)
        if body.reasoning_effort is not None:
            places["reasoning_effort"] = "reasoning_effort"
            variables["reasoning_effort"] = body.reasoning_effort
        for name, place in places.items():
            if name in self._reserved or not reads(self._template, name):
                message = f"'{place}' is not supported: the target's chat template reads no variable of this name"
                raise ApiError(400, message, param=place, code="unsupported_parameter")
            if body.has_grammar and name in REASONING_SWITCHES and variables[name]:
                message = f"'{place}' is not supported for an answer of a given form, which begins without reasoning"
                raise ApiError(400, message, param=place, code="unsupported_parameter")
        off = REASONING_SWITCHES if body.has_grammar else ()
        return {name: False for name in off if reads(self._template, name)} | variables

    def tokenize(self, body: TokenizeRequest, context_length: int) -> dict[str, Any]:
        """The reply of /tokenize. Raises ApiError for what a chat refuses."""
        if body.prompt is not None:
            ids = self.of_text(body.prompt, body.add_special_tokens is not False)
        else:
            names = ("messages", "tools", "chat_template_kwargs")
            chat = ChatRequest.checked({"model": "", **{name: getattr(body, name) for name in names}})
            ids = self.of_chat(chat, generation_prompt=body.add_generation_prompt is not False)
        texts = self._tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": context_length, "tokens": ids, "token_strs": texts}

    def detokenize(self, ids: list[int]) -> dict[str, str]:
        """The reply of /detokenize, special tokens included. Raises ApiError for ids outside the vocabulary."""
        size = len(self._tokenizer)
        wrong = next((at for at, token in enumerate(ids) if not 0 <= token < size), None)
        if wrong is not None:
            message = f"'tokens[{wrong}]' is {ids[wrong]}, outside of the vocabulary of {size} tokens"
            raise ApiError(400, message, param=f"tokens[{wrong}]", code="invalid_value")
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return {"prompt": text}


DESCRIPTION = """You may call functions to help with the user's request. Their signatures, as JSON, are:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between these tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def in_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{"role", "content"} messages with the same meaning for a template that knows no tools: all is text.

    Tools are described in the system message, in Hermes' form. The results of one turn become one message of the user,
    as templates with tools do it.
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
        written = json.dumps(call["function"], ensure_ascii=False)
        parts.append(f"<tool_call>\n{written}\n</tool_call>")
    return "\n".join(parts)
