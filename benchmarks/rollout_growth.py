"""How much faster rollouts get as the head improves: every refresh of a training with train.on_policy.every.

    toolkit run recipes/smollm2-135m.yaml train.on_policy.every=200 train.data.features=online \\
        rollouts.keep_features=false
    python benchmarks/rollout_growth.py RUN

Reads what the training measured (RUN/train/metrics.jsonl); nothing is run. The plain speed beside each refresh is that
of the same session: what its own plain rounds take at as many rows (toolkit/train/rollout_speed.py). Load of the
machine moves both, so read the ratio.
Writes benchmarks/results/training-rollout-growth-<hardware>.json: run it on the machine that trained.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from results_folder import leave
from rich.console import Console
from rich.table import Table

from toolkit.bench.records import command_line, make_record
from toolkit.bench.table import decimal
from toolkit.jsonl import read_rows
from toolkit.weights import read_json

DEFINITIONS = {
    "step": "optimiser steps that the head had seen when it drafted",
    "tokens": "supervised tokens that it had seen",
    "rollout_tokens": "response tokens of this refresh",
    "tokens_per_s": "of its decoding rounds; prompts are in rollout_tokens_per_s, wall time",
    "plain_tokens_per_s": "the same tokens, had all rounds been plain",
    "accept_length": "over the verify steps that drafted, at the temperatures of the refresh; the shape adapts",
}


def refreshes(metrics: Path) -> list[dict[str, Any]]:
    """A row for each refresh. Raises `DataError` for damaged metrics."""
    found, tokens = [], 0
    for _, row in read_rows(metrics):
        tokens = row.get("tokens", tokens)
        if "rollouts" not in row:
            continue
        speed, plain = row.get("rollout_decode_tokens_per_s"), row.get("rollout_plain_tokens_per_s")
        found.append(
            {
                "variant": "refresh",
                "step": row["step"],
                "tokens": tokens,
                "rollouts": row["rollouts"],
                "rollout_tokens": row["rollout_tokens"],
                "rollout_tokens_per_s": row["rollout_tokens_per_s"],
                "tokens_per_s": speed,
                "plain_tokens_per_s": plain,
                "speedup": speed / plain if speed and plain else None,
                "accept_length": row["rollout_accept_length"],
                "verify_steps": row["rollout_verify_steps"],
            }
        )
    return found


def settings_of(run: Path) -> dict[str, Any]:
    """Seed, target, prompts, rollouts and training as the run's recipe had them; null for a stage that was not run."""
    found: dict[str, Any] = dict.fromkeys(("seed", "target", "prompts", "rollouts", "train"))
    for stage in ("prompts", "rollouts", "train"):
        manifest = run / stage / "manifest.json"
        found |= read_json(manifest)["settings"] if manifest.is_file() else {}
    return found


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="fresh rollouts, by the head that drafted them", title_justify="left")
    names = (
        "step",
        "tokens seen",
        "rollouts",
        "accept_length",
        "verify steps",
        "tokens/s",
        "plain tokens/s",
        "speedup",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("step", "tokens", "rollouts")),
            decimal(row["accept_length"]),
            str(row["verify_steps"]),
            *(decimal(row[name], 1) for name in ("tokens_per_s", "plain_tokens_per_s")),
            decimal(row["speedup"]),
        )
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run that was trained with train.on_policy.every")
    parser.add_argument("--note", help="what else the machine did, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = refreshes(args.run / "train" / "metrics.jsonl")
    if not rows:
        raise SystemExit(f"{args.run} holds no fresh rollouts: train it with train.on_policy.every")
    show(rows)
    command = f"python benchmarks/{command_line()}"
    settings = settings_of(args.run)
    record = make_record("training", command, settings, rows, definitions=DEFINITIONS, note=args.note)
    leave(record, "training-rollout-growth", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
