"""Grammars: the JSON schema or the regular expression that an answer must match, compiled by llguidance.

A grammar says after every token which tokens may follow. A draft tree needs its answer at every node: the state of a
node is that of its parent, advanced by the node's token. So the tree is walked depth first, with a step back after each
subtree:

    committed {"a":      tree  {"a": ── 1 ── }      at node 1: digits, white space, "," or "}"
                                     └─ x           outside of the grammar: cut before the target verifies it

Where only one text can follow, such as the name of a required property, llguidance allows that text in one way: as the
tokens that the tokenizer makes of it.
JSON is written with at most MOST_BLANKS characters of white space in a row: a model cannot write blanks without end.
A keyword of JSON schema that llguidance does not implement is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from toolkit.errors import MissingPackageError, optional_package
from toolkit.infer.request.params import SamplingError, SamplingParams

MOST_BLANKS = 40
MOST_KEPT = 64  # compiled grammars; the state of an answer is a copy of one
# A state of the lexer takes 1 to 2 kB. Errors without a dump of the state, which holds text of the answer.
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
MOST_SHOWN = 300  # characters of an error of llguidance: it may quote the whole expression
JSON_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MOST_BLANKS}}}",
    "lenient": False,  # True: ignore keywords that are not implemented
    "coerce_one_of": False,  # True: take oneOf for anyOf where its branches overlap
}


class GrammarState:
    """The state of one answer in its grammar. A mask has a bit per token of the vocabulary, lowest bit first.

    mask_bytes: length of a mask. failure: why the grammar gave up (it may do so much work per token), which ends the
    request; None: it works.
    """

    def __init__(self, start: Any, stop_ids: frozenset[int], mask_bytes: int) -> None:
        self._start, self._matcher = start, start.deep_copy()
        self._stop_ids, self.mask_bytes = stop_ids, mask_bytes
        self._read = 0  # output tokens that the matcher has read
        self.failure: str | None = None

    def masks(
        self, output_ids: Sequence[int], tokens: Sequence[int], parents: Sequence[int], nodes: Sequence[int]
    ) -> list[bytes | None]:
        """Return for every node of a tree the mask of the tokens that may follow it; None outside of the grammar.

        output_ids: the answer so far. tokens, parents: of all nodes, the root first. nodes: the numbers of the nodes
        that are looked at, ascending; the root, which is committed, is one of them.
        """
        self._follow(output_ids)
        children: dict[int, list[int]] = {}
        for node in nodes[1:]:
            children.setdefault(parents[node], []).append(node)
        found = self._below(0, tokens, children, [None] * len(tokens))
        if self._matcher.is_error():  # at the root, or at a draft, which the target may not choose
            self._follow(output_ids)
            found = self._below(0, tokens, {}, [None] * len(tokens))
            if self._matcher.is_error():
                self.failure = f"the grammar failed after {len(output_ids)} tokens: {_error_of(self._matcher)}"
        return found

    def after(self, output_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        """Return the mask of the tokens that may follow each path of drafts; None outside of the grammar, and where the
        answer has ended."""
        self._follow(output_ids)
        return [self._after(list(path)) for path in paths]

    def _after(self, path: list[int]) -> bytes | None:
        if not self._stop_ids.isdisjoint(path):  # a stop token cannot be taken back
            return None
        read = self._matcher.try_consume_tokens(path)
        mask = self._matcher.compute_bitmask()[: self.mask_bytes] if read == len(path) else None
        self._matcher.rollback(read)
        return None if self._matcher.is_error() else mask

    def _follow(self, output_ids: Sequence[int]) -> None:
        """Let the matcher read what is new. After an error, which is for good, another one reads all."""
        if self._matcher.is_error():
            self._matcher, self._read = self._start.deep_copy(), 0
        self._matcher.consume_tokens(list(output_ids[self._read :]))
        self._read = len(output_ids)

    def _below(
        self, node: int, tokens: Sequence[int], children: dict[int, list[int]], found: list[bytes | None]
    ) -> list[bytes | None]:
        """Write the masks of `node`, at which the matcher stands, and of the nodes below it to `found`. Returns it."""
        mask = found[node] = self._matcher.compute_bitmask()[: self.mask_bytes]
        for child in children.get(node, ()):
            token = tokens[child]
            if not mask[token >> 3] >> (token & 7) & 1:
                continue
            if token in self._stop_ids:
                found[child] = b"\xff" * self.mask_bytes  # the answer ends here: what follows is cut off
                continue
            self._matcher.consume_token(token)
            self._below(child, tokens, children, found)
            self._matcher.rollback(1)
        return found


class Grammars:
    """The grammars of one target, compiled once each. Threads may share it.

    tokenizer: of the target. stop_ids: its own, which may follow a complete answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, stop_ids
        self._compiled = lru_cache(MOST_KEPT)(self._compile)  # compiles without a lock: threads do not wait for others

    def start(self, params: SamplingParams) -> GrammarState | None:
        """Return the state before the first token; None without a schema and regular expression.

        Raises SamplingError for one that is wrong or not supported, for a target without a stop id or with a tokenizer
        that is not a fast one, and if llguidance is not installed.
        """
        if not params.has_grammar:
            return None
        field = "regex" if params.json_schema is None else "json_schema"
        source = params.regex if params.json_schema is None else params.json_schema
        assert isinstance(source, str), "SamplingParams keeps texts"
        return GrammarState(self._compiled(field, source), self._stop_ids, -(-self._vocab_size // 8))

    def _compile(self, field: str, source: str) -> Any:
        try:
            library = optional_package("llguidance", field)
        except MissingPackageError as error:
            raise SamplingError(field, str(error)) from error
        if not self._stop_ids:
            raise SamplingError(field, f"{field} needs a target with a stop id, which ends the answer; this has none")
        try:
            tokens = self._tokens
        except (ValueError, AttributeError) as error:
            kind = type(self._tokenizer).__name__
            raise SamplingError(
                field, f"{field} needs a fast tokenizer (a tokenizer.json); the target's is a {kind}: {error}"
            ) from error
        try:
            if field == "regex":
                grammar = library.LLMatcher.grammar_from_regex(source)
            else:
                grammar = library.LLMatcher.grammar_from_json_schema(_object(source), overrides=JSON_OPTIONS)
            limits = library.LLParserLimits(**LIMITS)
            matcher = library.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        except ValueError as error:  # not JSON, not an object, or not valid unicode
            raise SamplingError(field, f"{field} cannot be read: {error}") from error
        matcher.compute_bitmask()  # fails now where no answer can begin, and its copies find what it has learned
        if matcher.is_error():
            raise SamplingError(field, f"{field} is not supported: {_error_of(matcher)}")
        return matcher

    @cached_property
    def _tokens(self) -> Any:
        """llguidance's view of the tokenizer."""
        reader = optional_package("llguidance.hf", "a grammar")
        return reader.from_tokenizer(self._tokenizer, self._vocab_size, eos_token=sorted(self._stop_ids))


def _object(text: str) -> str:
    """Return the text of a JSON schema. Raises ValueError unless it is an object."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON object is needed, and this is {text[:60]}")
    return text


def _error_of(matcher: Any) -> str:
    """Return llguidance's message in one line; the middle of a long one is left out."""
    text = " ".join(str(matcher.get_error()).removesuffix("<non-verbose/>").split())
    half = MOST_SHOWN // 2
    return text if len(text) <= MOST_SHOWN else f"{text[:half]} .. {text[-half:]}"
