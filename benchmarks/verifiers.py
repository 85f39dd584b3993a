"""What each verifier makes of the same head at a temperature: tokens committed per verify step, in one run.

    python benchmarks/verifiers.py --draft runs/smollm2-135m/ckpt

`target` offers the head's most probable tokens and lets the target draw; `rejection` and `block` draw the drafts from
the head's own distribution. All write the target's distribution, so accept_length alone tells them apart, and it does
not depend on what else the machine does. Every prompt is answered several times, by seeds of its own. A unit of the
intervals is a prompt.
Writes benchmarks/results/acceptance-verifiers-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mask_shift import paired_gain
from results_folder import leave

from toolkit import LLM, SamplingParams
from toolkit.bench.bootstrap import ratio_interval
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.records import command_line, make_record
from toolkit.bench.rows import number
from toolkit.bench.table import decimal
from toolkit.infer.load.llm import Completion
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.request import VerifyEvent

FIRST, OTHERS = "target", ("rejection", "block")
NOT_MEASURED = ("tokens_per_s", "plain_tokens_per_s", "speedup", "tokens_equal", "near_ties")


@dataclass(frozen=True)
class Unit:
    """All answers to one prompt."""

    events: list[VerifyEvent]


def units(done: Sequence[Completion], answers: int) -> list[Unit]:
    """`answers` completions of every prompt, which stand side by side, as one."""
    return [
        Unit([event for one in done[first : first + answers] for event in one.events])
        for first in range(0, len(done), answers)
    ]


def row_of(verify: str, shape: DraftShape, temperature: float, found: Sequence[Unit]) -> dict[str, Any]:
    """A row of an acceptance record."""
    stats = summarise([event for unit in found for event in unit.events])
    each = [summarise(unit.events) for unit in found]
    interval = ratio_interval([one.verify_steps + one.accepted for one in each], [one.verify_steps for one in each])
    return {
        "method": verify,
        "verify": verify,
        "shape": "chain" if shape.is_chain else "tree",
        "num_steps": shape.num_steps,
        "top_k": shape.top_k,
        "num_draft_tokens": shape.num_draft_tokens,
        "temperature": temperature,
        "task": "built-in",
        "prompts": len(found),
        "verify_steps": stats.verify_steps,
        "accept_length": number(stats.accept_length),
        "interval": [None, None] if interval is None else list(interval),
        "accept_rate": [number(rate) for rate in stats.accept_rate],
        **dict.fromkeys(NOT_MEASURED),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True, metavar="DIR", help="a trained head")
    parser.add_argument("--target", metavar="MODEL", help="another target than the one the draft directory names")
    parser.add_argument("--chain", type=int, default=4, metavar="N", help="tokens drafted a step (default: 4)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0], metavar="T", help="default: 1")
    parser.add_argument("--limit", type=int, default=24, metavar="N", help="built-in prompts (default: 24)")
    parser.add_argument("--answers", type=int, default=2, metavar="N", help="answers to each prompt (default: 2)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer at most (default: 64)")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if min(args.temperatures) <= 0:
        parser.error("verifiers differ above temperature 0 only")
    shape = DraftShape.chain(args.chain)
    chosen = limited(builtin_prompts(), args.limit)
    chats = [[{"role": "user", "content": one.turns[0]}] for one in chosen for _ in range(args.answers)]
    found: dict[tuple[float, str], list[Unit]] = {}
    for verify in (FIRST, *OTHERS):
        with LLM(args.target, args.draft, shape=shape, verify=verify, device="cpu") as llm:
            target = llm.target
            for temperature in args.temperatures:
                params = [
                    SamplingParams(temperature=temperature, seed=seed, max_tokens=args.max_tokens)
                    for seed in range(len(chats))
                ]
                found[temperature, verify] = units(llm.generate(chats, params), args.answers)
    rows = []
    for (temperature, verify), ours in found.items():
        row = row_of(verify, shape, temperature, ours)
        change, interval = paired_gain(ours, found[temperature, FIRST])
        rows.append(row | {"change": change, "change_interval": interval})
        length, low, high = (decimal(one, 3) for one in (row["accept_length"], *row["interval"]))
        print(f"T={temperature:g} {verify}: accept_length {length} [{low}, {high}]", change)
    settings = {
        "prompts": "built-in",
        "limit": args.limit,
        "answers": args.answers,
        "max_tokens": args.max_tokens,
        "dtype": str(target.dtype),
        "target": target.name,
    }
    record = make_record("acceptance", f"python benchmarks/{command_line()}", settings, rows)
    leave(record, "acceptance-verifiers", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
