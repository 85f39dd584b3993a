"""Prompts of chats: messages, tools and template variables by the target's chat template."""

from __future__ import annotations

import inspect
from typing import Any

from toolkit.infer.request.chat_prompt import ChatPromptError, NoChatTemplateError, chat_text, text_ids
from toolkit.infer.server.admission import PromptLimit
from toolkit.infer.server.answer_parser import Parsers, reads, template_text
from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.message_protocol import for_template, wrap_arguments
from toolkit.infer.server.openai_protocol import ChatRequest
from toolkit.infer.server.tool_prompt import in_text

REASONING_SWITCHES = ("enable_thinking", "thinking")  # variables of templates: Qwen's and GLM's, DeepSeek's


class ChatPrompts:
    """Makes prompts with one tokenizer."""

    def __init__(self, tokenizer: Any, parsers: Parsers) -> None:
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._template = template_text(tokenizer)
        # A request must not replace the template, or change how transformers renders it.
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}

    def ids(self, body: ChatRequest, *, generation_prompt: bool = True, limit: PromptLimit | None = None) -> list[int]:
        """The ids of a chat's prompt. limit: of the text that the template writes.

        Raises ApiError if the template rejects the messages or does not read a field, and for a text beyond the limit.
        """
        if body.offered and self._parsers.calls is None:
            message = "'tools' is not supported: no parser reads the calls of this target; name one: --tool-call-parser"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        messages, tools = for_template(body.messages), [tool.for_template() for tool in body.offered]
        with_tools = bool(tools) or any(one.tool_calls or one.role == "tool" for one in body.messages)
        if with_tools and not reads(self._template, "tools"):
            messages, tools = in_text(messages, tools), []
        settings = {**self._variables(body), "add_generation_prompt": generation_prompt}
        try:
            try:
                text = chat_text(self._tokenizer, messages, tools or None, **settings)
            except ChatPromptError:
                if not wrap_arguments(messages):
                    raise
                text = chat_text(self._tokenizer, messages, tools or None, **settings)
        except NoChatTemplateError as error:
            raise ApiError(
                400, "the target's tokenizer has no chat template; use /v1/completions", code="no_chat_template"
            ) from error
        except ChatPromptError as error:
            raise ApiError(400, str(error), param="messages") from error
        if limit is not None:
            limit.check(text, body.token_limit, "messages")
        if body.has_grammar:
            text += self._parsers.before_content(text)
        return text_ids(self._tokenizer, text)

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
        return self._without_reasoning(variables) if body.has_grammar else variables

    def _without_reasoning(self, variables: dict[str, Any]) -> dict[str, Any]:
        """The variables of a request whose answer has a given form from its first token."""
        asked = next((name for name in REASONING_SWITCHES if variables.get(name)), None)
        if asked is not None:
            place = f"chat_template_kwargs.{asked}"
            message = f"'{place}' is not supported for an answer of a given form, which begins without reasoning"
            raise ApiError(400, message, param=place, code="unsupported_parameter")
        return {name: False for name in REASONING_SWITCHES if reads(self._template, name)} | variables
