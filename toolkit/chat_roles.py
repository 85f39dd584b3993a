"""The names of roles in conversation files."""

from __future__ import annotations

# Names used by ShareGPT and OpenAI files -> OpenAI's role.
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}
