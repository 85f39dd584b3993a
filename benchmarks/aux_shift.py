"""What it costs to read a head's auxiliary layers in the wrong convention: its ids one off, forced through.

    python benchmarks/aux_shift.py --draft runs/smollm2-135m/ckpt

Some projects count a layer's input, others the output of the layer before it. The head is exported for SGLang, the ids
in its config.json are moved by -1 and +1 as a writer of the other convention would leave them, and the folder is
served as it is: the import warns of both, and goes on. Greedy, float32, so that every answer is plain decoding's.
Writes benchmarks/results/acceptance-aux-shift-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from results_folder import leave

from toolkit import LLM, SamplingParams
from toolkit.bench.bootstrap import ratio_interval, resampled_interval
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.records import command_line, make_record
from toolkit.bench.rows import number
from toolkit.checkpoint.draft_dir import DraftCheckpoint, load_draft
from toolkit.checkpoint.export_head import export_head
from toolkit.checkpoint.import_eagle3 import AUX_KEY
from toolkit.checkpoint.launch_lines import Shape
from toolkit.heads.eagle3 import Eagle3Config
from toolkit.infer.load.llm import Completion
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.targets.facts import TargetFacts, target_facts
from toolkit.weights import read_json, write_json

SHIFTS = (0, -1, 1)
NOT_MEASURED = ("tokens_per_s", "plain_tokens_per_s", "speedup")


def shifted(draft: DraftCheckpoint, facts: TargetFacts, shift: int, folder: Path) -> Path:
    """The head in SGLang's form, its ids moved by `shift`, under the one key that SGLang reads."""
    out = folder / f"shift{shift:+d}"
    export_head(draft, "sglang", out, facts, Shape(3, 1, 4))
    config = read_json(out / "config.json")
    del config[AUX_KEY]
    config["eagle_config"][AUX_KEY] = [one + shift for one in config["eagle_config"][AUX_KEY]]
    write_json(out / "config.json", config)
    return out


def answers(target: str, draft: Path | None, shape: DraftShape, chats: list[Any], max_tokens: int) -> list[Completion]:
    options = {"shape": shape if draft else None, "dtype": "float32", "device": "cpu", "max_running_requests": 1}
    with LLM(target, draft, **options) as llm:
        return llm.generate(chats, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def counts(done: list[Completion]) -> list[tuple[int, int]]:
    """Committed tokens and verify steps of each answer, as accept_length counts them."""
    return [(one.acceptance.verify_steps + one.acceptance.accepted, one.acceptance.verify_steps) for one in done]


def paired_change(done: list[Completion], right: list[Completion]) -> tuple[float, list[float]]:
    """Change of accept_length from `right` to `done` (0.1: 10 % more), and its 95 % interval over prompts."""
    units = [(*one, *other) for one, other in zip(counts(done), counts(right), strict=True)]

    def change(tokens: np.ndarray, steps: np.ndarray, right_tokens: np.ndarray, right_steps: np.ndarray) -> np.ndarray:
        length, right_length = tokens / np.maximum(steps, 1), right_tokens / np.maximum(right_steps, 1)
        return length / np.maximum(right_length, 1) - 1

    return float(change(*np.sum(units, axis=0))), list(resampled_interval(units, change))


def row_of(shift: int, ids: Sequence[int], shape: DraftShape, done: list[Completion], plain: list[Completion]) -> dict:
    """A row of an acceptance record."""
    stats = summarise([event for one in done for event in one.events])
    interval = ratio_interval(*zip(*counts(done), strict=True))
    return {
        "method": f"eagle3, aux ids {shift:+d}" if shift else "eagle3",
        "aux_layer_ids": list(ids),
        "shape": "chain" if shape.top_k == 1 else "tree",
        "num_steps": shape.num_steps,
        "top_k": shape.top_k,
        "num_draft_tokens": shape.num_draft_tokens,
        "temperature": 0.0,
        "task": "built-in",
        "prompts": len(done),
        "verify_steps": stats.verify_steps,
        "accept_length": number(stats.accept_length),
        "interval": [None, None] if interval is None else list(interval),
        "accept_rate": [number(rate) for rate in stats.accept_rate],
        **dict.fromkeys(NOT_MEASURED),
        "tokens_equal": [one.token_ids for one in done] == [one.token_ids for one in plain],
        "near_ties": 0,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True, type=Path, metavar="DIR", help="a trained EAGLE-3 head of ours")
    parser.add_argument("--shape", default="4,1,5", metavar="S,K,N", help="draft shape (default: a chain of 4)")
    parser.add_argument("--limit", type=int, default=16, metavar="N", help="built-in prompts (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of every answer (default: 32)")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    draft, shape = load_draft(args.draft), DraftShape.parse(args.shape)
    if not isinstance(draft.head.config, Eagle3Config):
        parser.error(f"{args.draft} holds a head of the kind {draft.kind}; only eagle3 heads read auxiliary layers")
    stated = draft.meta["target"]
    facts = target_facts(stated["name"], stated.get("revision"))
    chats = [[{"role": "user", "content": one.turns[0]}] for one in limited(builtin_prompts(), args.limit)]
    plain = answers(stated["name"], None, shape, chats, args.max_tokens)
    rows: list[dict[str, Any]] = []
    right: list[Completion] = []
    with tempfile.TemporaryDirectory() as folder:
        for shift in SHIFTS:
            directory = shifted(draft, facts, shift, Path(folder))
            done = answers(stated["name"], directory, shape, chats, args.max_tokens)
            ids = [one + shift for one in draft.head.config.aux_layer_ids]
            rows.append(row_of(shift, ids, shape, done, plain))
            right = right or done
            change, interval = paired_change(done, right)
            rows[-1] |= {"change": change, "change_interval": interval}
            print(f"aux ids {ids}: accept_length {rows[-1]['accept_length']:.3f}, {change:+.1%} {interval}")
    settings = {"prompts": "built-in", "limit": args.limit, "max_tokens": args.max_tokens, "dtype": "float32"}
    settings["target"] = stated["name"]
    record = make_record("acceptance", f"python benchmarks/{command_line()}", settings, rows)
    leave(record, "acceptance-aux-shift", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
