"""A search's forecast, predictions and pick against every setting run end to end, in one load of the models.

    python benchmarks/brute_force.py --draft runs/NAME/ckpt [--batch 1] [--limit 8] [--max-tokens 48] [--dtype float32]

All settings answer the same prompts in turns, so that what else the machine does hits them alike. In float32 a forecast
must be the engine's accept_length exactly; in bfloat16 answers may part at near-ties.
Writes benchmarks/results/search-brute-force-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from results_folder import leave

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.answers import Sampling
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.records import command_line, make_record
from toolkit.bench.search import Objective, accept_length_of, measured_figures
from toolkit.bench.side_by_side import Mode, run_side_by_side
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import build_engine
from toolkit.infer.request.draft_tree import ADAPTIVE, PLAIN, DraftShape
from toolkit.pipeline.forecast import largest_shapes, load_head
from toolkit.pipeline.search import search_settings
from toolkit.threads import physical_cores, users_threads

OBJECTIVE: Objective = "tokens-per-s"


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
    surface, found, best, _ = search_settings(
        target, draft, prompts, largest, sampling, config, [args.batch], OBJECTIVE
    )
    winner = best[str(args.batch)]
    pick = (
        winner["shape"] if winner["setting"] == ADAPTIVE else winner["setting"]
    )  # brute force runs no adaptive drafting
    searched = time.perf_counter() - started
    print(f"search: {searched:.0f} s, pick {pick}", flush=True)

    started = time.perf_counter()
    settings = replace(config, prefix_cache=False, verify="target", adaptive=False)
    widest = DraftShape.covering(surface.shapes()).as_text()
    with (
        closing(build_engine(settings, target).engine) as plain,
        closing(build_engine(replace(settings, shape=widest), target, draft).engine) as engine,
    ):
        modes = [Mode(plain, None), *(Mode(engine, shape, label=shape.as_text()) for shape in surface.shapes())]
        rounds = run_side_by_side(modes, target.tokenizer, prompts, sampling, batch=args.batch, warmup=1)
    forced = time.perf_counter() - started
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
