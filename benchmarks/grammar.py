"""accept_length with and without a grammar, by draft shape, greedy. Counts only, so other work may run beside it.

    python benchmarks/grammar.py --draft runs/NAME/ckpt [--shapes 4,1,5 5,4,16] [--max-tokens 160] [--dtype float32]

Every prompt asks for a description as JSON. It is answered freely, and under a JSON schema or a regular expression.
`equal`: answers that are those of plain decoding under the same grammar (free ones: without). `whole`: answers that
ended before --max-tokens; those under a schema are parsed. `offered`: drafts a step that the target read.
Writes benchmarks/results/grammar-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from results_folder import leave
from rich.console import Console
from rich.table import Table

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.records import command_line, make_record
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine, device_of, load_models
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.chat_prompt import chat_ids
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request
from toolkit.targets.target import Target

SUBJECTS = (
    "a fox", "the river Nile", "a bicycle", "the planet Mars", "a violin", "an oak tree", "the city of Lima", "a kite",
    "a lighthouse", "the number seven", "a teacher", "a thunderstorm", "bread", "a chess game", "a glacier", "a spider",
)  # fmt: skip
ASKED = 'Describe {} as JSON with the keys "name", "kind", "summary", "facts" (a list) and "rating" (1 to 10).'
TEXT, LONG = {"type": "string", "maxLength": 40}, {"type": "string", "maxLength": 160}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "kind": {"enum": ["thing", "place", "person", "animal", "plant", "idea", "event"]},
        "summary": LONG,
        "facts": {"type": "array", "items": LONG, "minItems": 2, "maxItems": 3},
        "rating": {"type": "integer", "minimum": 1, "maximum": 10},
    },
    "required": ["name", "kind", "summary", "facts", "rating"],
    "additionalProperties": False,
}
REGEX = r"Name: [A-Z][a-z ]{2,30}\nKind: (thing|place|person|animal|plant|idea|event)\nSummary: [A-Za-z ,]{20,200}\."
GRAMMARS: dict[str, dict[str, Any]] = {"none": {}, "json_schema": {"json_schema": SCHEMA}, "regex": {"regex": REGEX}}


def answers(engine: Any, target: Target, name: str, max_tokens: int, *, speculative: bool) -> list[Request]:
    """The answers to all prompts under one of GRAMMARS; each that ended is checked against its grammar."""
    prompts = [chat_ids(target.tokenizer, [{"role": "user", "content": ASKED.format(one)}]) for one in SUBJECTS]
    found = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, **GRAMMARS[name]), speculative=speculative)
    for request in found:
        text = target.tokenizer.decode(request.output_ids, skip_special_tokens=True)
        if request.finish_reason == "stop" and name == "json_schema":
            assert list(json.loads(text)) == SCHEMA["required"], text
        if request.finish_reason == "stop" and name == "regex":
            assert re.fullmatch(REGEX, text), text
    return found


def row_of(found: list[Request], plain: list[Request], name: str, shape: DraftShape) -> dict[str, Any]:
    """One row of the record."""
    events = [event for request in found for event in request.events]
    stats, drafted = summarise(events), [event for event in events if event.offered]
    return {
        "method": "grammar",
        "grammar": name,
        "shape": "chain" if shape.is_chain else "tree",
        "num_steps": shape.num_steps,
        "top_k": shape.top_k,
        "num_draft_tokens": shape.num_draft_tokens,
        "temperature": 0,
        "prompts": len(found),
        "verify_steps": stats.verify_steps,
        "plain_steps": len(events) - len(drafted),
        "accept_length": stats.accept_length,
        "tokens_per_step": sum(event.committed for event in events) / len(events),
        "offered": sum(event.offered for event in events) / len(events),
        "equal": sum(one.output_ids == other.output_ids for one, other in zip(found, plain, strict=True)),
        "whole": sum(request.finish_reason == "stop" for request in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target")
    parser.add_argument("--shapes", nargs="+", default=["4,1,5", "5,4,16"])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(draft=args.draft, target=args.target, dtype=args.dtype, adaptive=False, lookup=False)
    target, draft = load_models(config, device_of(config))
    assert draft is not None, "--draft names a draft"
    rows = []
    plain: dict[str, list[Request]] = {}
    for text in args.shapes:
        loaded = build_engine(config.with_options(shape=text), target, draft)
        with closing(loaded.engine):
            for name in GRAMMARS:
                if name not in plain:
                    plain[name] = answers(loaded.engine, target, name, args.max_tokens, speculative=False)
                found = answers(loaded.engine, target, name, args.max_tokens, speculative=True)
                rows.append(row_of(found, plain[name], name, DraftShape.parse(text)))
    columns = ("shape", "num_draft_tokens", "grammar", "accept_length", "tokens_per_step", "offered", "verify_steps")
    table = Table(*columns, "plain_steps", "equal", "whole")
    for row in rows:
        cells = (row[name] for name in (*columns, "plain_steps", "equal", "whole"))
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)
    settings = {"temperature": 0, "dtype": args.dtype, "max_tokens": args.max_tokens, "prompts": len(SUBJECTS)}
    described = {"target": describe_target(target), "draft": describe_draft(draft)}
    leave(make_record("grammar", command_line(), settings, rows, **described), "grammar", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
