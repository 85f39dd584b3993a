"""Log-probabilities in OpenAI's form for chat replies, with the exact bytes of every token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from toolkit.infer.request.request import TokenLogprob

LEAST = -9999.0  # OpenAI's value for -inf, which JSON does not have


class TokenBytes:
    """The exact bytes of a token, including a leading space and partial characters.

    Decoding a single id loses both: SentencePiece decoders drop a leading space, and a partial character becomes
    U+FFFD.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
        written = json.dumps(decoder, ensure_ascii=False)
        self._byte_level = "ByteLevel" in written
        self._sentencepiece = "▁" in written
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        self._added = tokenizer.added_tokens_decoder

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; b"" for an id outside the tokenizer's vocabulary."""
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(self._byte_of[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode() if self._sentencepiece else piece.encode()


class LogprobForm:
    """Writes `choices[].logprobs` of one server."""

    def __init__(self, tokenizer: Any) -> None:
        self._bytes = TokenBytes(tokenizer)

    def content(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`choices[].logprobs` with one item per token of the answer, including the stop id that ended it."""
        items = []
        for entry in entries:
            best = [self._item(token, logprob) for token, logprob in entry.top]
            items.append({**self._item(entry.token_id, entry.logprob), "top_logprobs": best})
        return {"content": items, "refusal": None}

    def _item(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self._bytes.of(token_id)
        return {
            "token": written.decode("utf-8", errors="replace"),
            "logprob": max(logprob, LEAST),
            "bytes": list(written),
        }
