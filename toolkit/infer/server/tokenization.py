"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from toolkit.infer.server.admission import PromptLimit
from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.chat_prompts import ChatPrompts
from toolkit.infer.server.message_protocol import (
    MOST_TOOLS,
    ChatMessage,
    JsonObject,
    Strict,
    Text,
    Tool,
    wrong_field,
)
from toolkit.infer.server.openai_protocol import ChatRequest


class TokenizeRequest(Strict):
    """Body of POST /tokenize: a text, or a chat by the target's chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    add_special_tokens: bool | None = Field(None, description="of a text; default: true")
    add_generation_prompt: bool | None = Field(None, description="of a chat; default: true")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong_field("prompt", "give one of 'prompt' and 'messages'")
        of_chats = ("tools", "chat_template_kwargs", "add_generation_prompt")
        of_texts = ("add_special_tokens",)  # in a chat the template writes them
        for name in of_chats if self.messages is None else of_texts:
            if getattr(self, name) not in (None, [], {}):
                raise wrong_field(name, f"'{name}' needs {'messages' if self.messages is None else 'a prompt'}")
        return self


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def tokens_of(body: TokenizeRequest, tokenizer: Any, prompts: ChatPrompts, limit: PromptLimit) -> dict[str, Any]:
    """The reply of /tokenize. Raises ApiError for what a chat refuses, and for a text beyond the limit."""
    if body.prompt is not None:
        limit.check(body.prompt, None, "prompt")
        ids = list(tokenizer(body.prompt, add_special_tokens=body.add_special_tokens is not False)["input_ids"])
    else:
        fields = {"model": "", "messages": body.messages, "tools": body.tools}
        chat = ChatRequest.checked({**fields, "chat_template_kwargs": body.chat_template_kwargs})
        ids = prompts.ids(chat, generation_prompt=body.add_generation_prompt is not False, limit=limit)
    texts = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": limit.context_length, "tokens": ids, "token_strs": texts}


def text_of(tokenizer: Any, ids: list[int]) -> dict[str, str]:
    """The reply of /detokenize, special tokens included. Raises ApiError for ids outside the vocabulary."""
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < len(tokenizer)), None)
    if wrong is not None:
        message = f"'tokens[{wrong}]' is {ids[wrong]}, outside of the vocabulary of {len(tokenizer)} tokens"
        raise ApiError(400, message, param=f"tokens[{wrong}]", code="invalid_value")
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)}
