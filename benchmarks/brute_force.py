"""A search's forecast, predictions and pick against every setting run end to end, in one load of the models.

    python benchmarks/brute_force.py --draft runs/NAME/ckpt [--batch 1] [--limit 8] [--max-tokens 48] [--dtype float32]

All settings answer the same prompts in turns, so that what else the machine does hits them alike. In float32 a forecast
must be the engine's accept_length exactly; in bfloat16 answers may part at near-ties. The best of a hundred noisy times
is too good, so the pick and that best run once more, side by side, on all built-in prompts (`rematch`).
Writes benchmarks/results/search-brute-force-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from results_folder import leave

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.answers import Round, Sampling
from toolkit.bench.bootstrap import resampled_interval
from toolkit.bench.engine_context import SideBySide, Trial
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.records import command_line, make_record
from toolkit.bench.search import Objective, accept_length_of, measured_figures
from toolkit.bench.side_by_side import Mode, run_side_by_side
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.pipeline.forecast import largest_shapes, load_head
from toolkit.pipeline.search import search_settings
from toolkit.threads import physical_cores, users_threads

OBJECTIVE: Objective = "tokens-per-s"


def speed(rounds: Sequence[Round], label: str) -> float:
    """Returns the tokens per second of the mode with this label."""
    return measured_figures([one for one in rounds if one.mode == label]).tokens_per_s


def ratio_interval(rounds: Sequence[Round], a: str, b: str) -> tuple[float, float]:
    """Returns the 95 % interval of the speed of mode a over that of b, by resampling groups of prompts."""
    own, other = ([one for one in rounds if one.mode == name] for name in (a, b))
    pairs = [(x.decode_tokens, x.decode_s, y.decode_tokens, y.decode_s) for x, y in zip(own, other, strict=True)]
    return resampled_interval(pairs, lambda tokens, s, others, other_s: tokens / s * other_s / others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--top-k", type=int, nargs="+")
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--num-draft-tokens", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(int(users_threads() or physical_cores()))
    config = EngineConfig(draft=args.draft, dtype=args.dtype, max_running_requests=args.batch)
    target, draft = load_head(config)
    prompts, sampling = limited(builtin_prompts(), args.limit), Sampling(args.max_tokens, 0.0, 0)
    largest = largest_shapes(args.top_k, args.num_steps, args.num_draft_tokens)

    started = time.perf_counter()
    trial = Trial(target, draft, prompts, sampling, config)
    surface, found, best, _ = search_settings(trial, largest, [args.batch], OBJECTIVE)
    winner = best[str(args.batch)]
    pick = (
        winner["shape"] if winner["setting"] == ADAPTIVE else winner["setting"]
    )  # brute force runs no adaptive drafting
    searched = time.perf_counter() - started
    print(f"search: {searched:.0f} s, pick {pick}", flush=True)

    started = time.perf_counter()
    every = builtin_prompts()
    with SideBySide(replace(trial, prompts=every).with_room().config, target, 2) as engines:
        engine = engines.open(draft, DraftShape.covering(surface.shapes()))
        modes = [Mode(engines.open(), None)]
        modes += [Mode(engine, shape, label=shape.as_text()) for shape in surface.shapes()]
        rounds = run_side_by_side(modes, target.tokenizer, prompts, sampling, batch=args.batch, warmup=1)
        forced = time.perf_counter() - started
        best_mode = max(modes, key=lambda mode: speed(rounds, mode.name))
        pair = [next(mode for mode in modes if mode.name == pick), replace(best_mode, label="best")]
        again = run_side_by_side(pair, target.tokenizer, every, sampling, batch=args.batch, warmup=1)
    rows = []
    for one in found:
        if one["setting"] == ADAPTIVE:
            continue
        own = [done for done in rounds if done.mode == one["setting"]]
        drafts = one["setting"] != PLAIN
        rows.append(
            {
                "setting": one["setting"],
                "forecast_accept_length": one["forecast_accept_length"] if drafts else None,
                "accept_length": accept_length_of(own),
                "predicted_tokens_per_s": one["predicted_tokens_per_s"],
                "measured_tokens_per_s": measured_figures(own).tokens_per_s,
            }
        )
    rows.sort(key=lambda row: -row["measured_tokens_per_s"])
    picked = next(row for row in rows if row["setting"] == pick)
    exact = sum(row["forecast_accept_length"] == row["accept_length"] for row in rows if row["setting"] != PLAIN)
    summary = {
        "settings": len(rows) - 1,
        "search_s": searched,
        "brute_force_s": forced,
        "pick": pick,
        "best": rows[0]["setting"],
        "pick_of_best": picked["measured_tokens_per_s"] / rows[0]["measured_tokens_per_s"],
        "rematch": speed(again, pick) / speed(again, "best"),
        "rematch_interval": ratio_interval(again, pick, "best"),
        "exact_forecasts": exact,
        "largest_difference": max(
            abs(row["forecast_accept_length"] - row["accept_length"]) for row in rows if row["setting"] != PLAIN
        ),
    }
    for name, value in summary.items():
        print(f"{name:20} {value}")
    described = {"target": describe_target(target), "draft": describe_draft(draft)}
    record = make_record("search", command_line(), {**vars(args), "out": None}, rows, summary=summary, **described)
    leave(record, f"search-brute-force-{describe_target(target)['dtype']}", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
