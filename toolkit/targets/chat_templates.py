"""The chat template of a target: its own, a file beside a GGUF file, or the user's choice; or plain text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import TargetError

if TYPE_CHECKING:  # `from toolkit import LLM` imports no transformers
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A base model continues texts. As a template, so that prompts, masks and measurements need no second way.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
REMEDY = (
    "choose one by chat_template (target.chat_template in a recipe): none for a base model, which continues plain "
    "texts, chatml, or a FILE"
)


def choose_template(tokenizer: PreTrainedTokenizerBase, chosen: str | None, source: str) -> str | None:
    """Give the tokenizer the chosen chat template; returns its text, None for that of the target.

    chosen: a file, "chatml", "none" (plain text), or the text of a template, as a draft directory records it. source:
    the target's name; FILE.jinja beside FILE.gguf is that file's template. Raises `TargetError` without the file.
    """
    beside = Path(source).expanduser().with_suffix(".jinja")
    if chosen is None:
        if source.endswith(".gguf") and beside.is_file():
            tokenizer.chat_template = _read(beside)
        return None
    if chosen == "none":
        begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        text = ("{{ bos_token }}" if begins else "") + PLAIN
    elif chosen == "chatml" or "{" in chosen:
        text = CHATML if chosen == "chatml" else chosen
    elif Path(chosen).expanduser().is_file():
        text = _read(Path(chosen).expanduser())
    else:
        raise TargetError(f"chat_template is {chosen!r}, and there is no such file; give a Jinja file, chatml or none")
    tokenizer.chat_template = text
    return text


def _read(path: Path) -> str:
    """The text of a template, without the mark that some editors put first: it would begin every prompt."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TargetError(f"{path}: {error}; a chat template in UTF-8 is needed") from error


def is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the user chose plain text in place of a chat template."""
    template = tokenizer.chat_template
    return isinstance(template, str) and template.endswith(PLAIN)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether chats can be rendered: there is a template, and it is not the one of plain text."""
    return bool(getattr(tokenizer, "chat_template", None)) and not is_plain(tokenizer)
