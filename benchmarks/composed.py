"""A head, lookup and both in one drafter, beside plain decoding, by task.

    python benchmarks/composed.py --draft runs/NAME/ckpt [--prompts NAME=FILE ...] [--batch 1] [--shape 3,1,4]

Modes: plain; the head and the composed drafter in every step (--shape) and adaptively; n-gram lookup alone, in every
step and adaptively. All answer the same prompts in turns. The built-in prompts are one task; each FILE is one more.
`never_slower`: adaptive composed drafting over the better of the adaptive head and adaptive lookup.
Writes benchmarks/results/composed-batch-<N>-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch
from results_folder import leave

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.answers import Round, Sampling
from toolkit.bench.bootstrap import LEAST_GROUPS, resampled_interval
from toolkit.bench.prompts import builtin_prompts, limited, read_prompts
from toolkit.bench.records import command_line, make_record
from toolkit.bench.side_by_side import Mode, run_side_by_side
from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.infer.drafters.choose_drafter import Draft
from toolkit.infer.drafters.ngram_drafter import NgramLookup
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine, device_of, load_models
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.draft_tree import PLAIN, DraftShape
from toolkit.targets.target import Target
from toolkit.threads import physical_cores, users_threads

HEAD, COMPOSED, LOOKUP = "head adaptive", "composed adaptive", "lookup adaptive"


def modes_of(
    target: Target, draft: DraftCheckpoint, shape: DraftShape, config: EngineConfig, stack: ExitStack
) -> list[Mode]:
    def mode(label: str, draft: Draft | None, **options: Any) -> Mode:
        loaded = build_engine(replace(config, **options), target, draft)
        stack.enter_context(closing(loaded.engine))
        return Mode(loaded.engine, loaded.shape, bool(options.get("adaptive")), label)

    every, chosen = {"adaptive": False, "shape": shape.as_text()}, {"adaptive": True, "shape": shape.as_text()}
    return [
        mode(PLAIN, None, adaptive=False),
        mode("head", draft, **every, lookup=False),
        mode(HEAD, draft, **chosen, lookup=False),
        mode("lookup", NgramLookup(), **every),
        mode(LOOKUP, NgramLookup(), **chosen),
        mode("composed", draft, **every, lookup=True),
        mode(COMPOSED, draft, **chosen, lookup=True),
    ]


def rows_of(rounds: list[Round], task: str, batch: int) -> list[dict[str, Any]]:
    """One row a mode. interval: of the speedup, by resampling groups of prompts, paired with plain decoding."""
    plain = [one for one in rounds if one.mode == PLAIN]
    answers = [answer.output_ids for one in plain for answer in one.answers]
    rows = []
    for name in dict.fromkeys(one.mode for one in rounds):
        own = [one for one in rounds if one.mode == name]
        events = [event for one in own for answer in one.answers for event in answer.events]
        pairs = [(a.decode_tokens, a.decode_s, b.decode_tokens, b.decode_s) for a, b in zip(own, plain, strict=True)]
        tokens, seconds = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        equal = sum(a.output_ids == b for a, b in zip((x for one in own for x in one.answers), answers, strict=True))
        rows.append(
            {
                "task": task, "method": name, "batch": batch, "answers": len(answers), "tokens": tokens,
                "accept_length": summarise(events).accept_length if any(event.offered for event in events) else None,
                "tokens_per_step": sum(event.committed for event in events) / len(events),
                "drafted_share": sum(event.offered > 0 for event in events) / len(events),
                "tokens_per_s": tokens / seconds,
                "speedup": tokens / seconds * sum(pair[3] for pair in pairs) / sum(pair[2] for pair in pairs),
                "interval": resampled_interval(pairs, lambda t, s, pt, ps: t / s * ps / pt)
                if len(pairs) >= LEAST_GROUPS
                else None,
                "answers_equal": equal,
            }
        )  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--shape", default="3,1,4")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(int(users_threads() or physical_cores()))
    config = EngineConfig(draft=args.draft, prefix_cache=False, verify="target", max_running_requests=args.batch)
    target, draft = load_models(config, device_of(config))
    assert isinstance(draft, DraftCheckpoint), "a head is measured"
    tasks = {"built-in": builtin_prompts()}
    tasks |= {name: read_prompts(path) for name, path in (one.split("=", 1) for one in args.prompts)}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        modes = modes_of(target, draft, DraftShape.parse(args.shape), config, stack)
        for task, prompts in tasks.items():
            chosen = [replace(prompt, turns=prompt.turns[:1]) for prompt in limited(prompts, args.limit)]
            sampling = Sampling(args.max_tokens, 0.0, 0)
            rounds = run_side_by_side(modes, target.tokenizer, chosen, sampling, batch=args.batch)
            rows += rows_of(rounds, task, args.batch)
            for row in rows[-len(modes) :]:
                low, high = row["interval"] or (float("nan"), float("nan"))
                print(
                    f"{task:>12} {row['method']:>18} {row['accept_length'] or 0:6.2f} {row['tokens_per_step']:6.2f} "
                    f"{100 * row['drafted_share']:4.0f} % {row['speedup']:6.2f} [{low:.2f}, {high:.2f}] "
                    f"{row['answers_equal']} of {row['answers']}"
                )
    speeds = {(row["task"], row["method"]): row["speedup"] for row in rows}
    never_slower = {task: speeds[task, COMPOSED] / max(speeds[task, HEAD], speeds[task, LOOKUP]) for task in tasks}
    print(
        "composed adaptive over the better of both: ", {task: round(ratio, 3) for task, ratio in never_slower.items()}
    )
    settings = {key: value for key, value in vars(args).items() if key not in ("draft", "prompts")}
    record = make_record(
        "engine", command_line(), settings, rows, never_slower=never_slower, target=describe_target(target),
        draft=describe_draft(draft),
    )  # fmt: skip
    leave(record, f"composed-batch-{args.batch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
