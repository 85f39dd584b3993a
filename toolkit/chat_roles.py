"""The words that files of conversations use for the speakers."""

from __future__ import annotations

# ShareGPT's words beside OpenAI's.
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}
