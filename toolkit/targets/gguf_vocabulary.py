"""The vocabulary of a target as GGUF metadata. llama.cpp compares a draft's, token by token, with the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import TargetError, optional_package
from toolkit.targets.facts import TargetFacts
from toolkit.targets.gguf_file import open_gguf
from toolkit.targets.load import load_tokenizer

# Name, value, GGUF type, and the type of an array's elements.
Vocabulary = list[tuple[str, Any, Any, Any]]
PREFIX = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of token in GGUF files


def vocabulary_of(facts: TargetFacts) -> Vocabulary:
    """Copied from a target that is a GGUF file, else made of its tokenizer, as llama.cpp's converter does.

    Raises `TargetError` for a tokenizer that is no byte-level BPE, or has more tokens than the target.
    """
    gguf = optional_package("gguf", "a GGUF file")

    kinds = gguf.GGUFValueType
    if facts.name.endswith(".gguf"):
        fields = open_gguf(Path(facts.name)).fields
        return [
            (name, one.contents(), one.types[0], one.types[-1] if one.types[0] == kinds.ARRAY else None)
            for name, one in fields.items()
            if name.startswith(PREFIX)
        ]
    tokenizer = load_tokenizer(facts.name, facts.revision)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if tokenizer.is_fast else {}
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    if model.get("type") != "BPE" or model.get("byte_fallback") or max(texts) >= facts.vocab_size:
        raise TargetError(
            f"the tokenizer of {facts.name} ({model.get('type')}, {max(texts) + 1} tokens) is not written to GGUF; one "
            f"of byte-level BPE with at most {facts.vocab_size} tokens is. Give the target's GGUF file as `target`"
        )
    added = tokenizer.added_tokens_decoder
    types = [
        UNUSED if i not in texts else NORMAL if i not in added else CONTROL if added[i].special else USER_DEFINED
        for i in range(facts.vocab_size)
    ]
    empty = tokenizer("")["input_ids"]  # what the tokenizer adds to every text
    found: Vocabulary = [
        (PREFIX + "model", "gpt2", kinds.STRING, None),
        (PREFIX + "pre", "default", kinds.STRING, None),  # how text is split; a draft splits none
        (PREFIX + "tokens", [texts.get(i, f"[PAD{i}]") for i in range(facts.vocab_size)], kinds.ARRAY, kinds.STRING),
        (PREFIX + "token_type", types, kinds.ARRAY, kinds.INT32),
        (PREFIX + "merges", [one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
         kinds.ARRAY, kinds.STRING),
        (PREFIX + "add_bos_token", empty[:1] == [tokenizer.bos_token_id], kinds.BOOL, None),
        (PREFIX + "add_eos_token", empty[-1:] == [tokenizer.eos_token_id], kinds.BOOL, None),
    ]  # fmt: skip
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    return found + [(f"{PREFIX}{name}_token_id", i, kinds.UINT32, None) for name, i in ids.items() if i is not None]
