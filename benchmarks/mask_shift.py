"""What the exact loss mask is worth: the same head trained with it and with the mask lagging by one, measured alike.

    python benchmarks/mask_shift.py recipes/smollm2-135m.yaml [train.max_steps=120 ...]

Both heads start alike, see the same batches in the same order and draft chains on the same unseen prompts (the run's
held-out rollouts). The lagging mask never trains the first draft of an answer, so the first verify step is shown apart.
Writes benchmarks/results/acceptance-mask-shift-<hardware>.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from results_folder import leave
from rich.console import Console
from rich.table import Table

from toolkit.bench.bootstrap import RESAMPLES, ratio_interval
from toolkit.bench.records import make_record
from toolkit.bench.rows import number
from toolkit.bench.table import decimal
from toolkit.checkpoint.draft_dir import load_draft
from toolkit.data.batches import Example
from toolkit.data.examples import load_examples
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import VerifyEvent
from toolkit.recipe import load_recipe
from toolkit.targets.load import load_target

REPOSITORY = Path(__file__).resolve().parents[1]
NOT_MEASURED = ("tokens_per_s", "plain_tokens_per_s", "speedup", "tokens_equal", "near_ties")


class Answered(Protocol):
    """What has the log of its verify steps."""

    @property
    def events(self) -> list[VerifyEvent]: ...


def train_variant(recipe: str, overrides: list[str], run: Path, folder: Path, shift: int) -> None:
    """Train into `folder` from the rollouts and the token map of `run`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("rollouts", "token_map"):
        if not (folder / name).exists():
            (folder / name).symlink_to((run / name).resolve(), target_is_directory=True)
    script = REPOSITORY / "toolkit" / "train" / "eagle3.py"
    # The stages before training were done in the run folder; this one only borrows their files.
    environment = {**os.environ, "TOOLKIT_STAGES_DONE": "1"}
    line = [sys.executable, "-m", "accelerate.commands.launch", str(script), "--recipe", recipe, *overrides]
    subprocess.run([*line, f"run_dir={folder}", f"train.unroll.mask_shift={shift}"], check=True, env=environment)


def prompt_of(example: Example) -> list[int]:
    """The ids before the last answer."""
    start = len(example.input_ids)
    while start and example.response[start - 1]:
        start -= 1
    return example.input_ids[:start]


def counts(request: Answered) -> tuple[int, int]:
    """Committed tokens and verify steps of one prompt, as accept_length counts them."""
    stats = summarise(request.events)
    return stats.verify_steps + stats.accepted, stats.verify_steps


def paired_gain(exact: Sequence[Answered], shifted: Sequence[Answered]) -> tuple[float | None, list[float | None]]:
    """Relative gain in accept_length of the first over the second, and its 95 % interval over prompts.

    A ratio of two ratios, so `ratio_interval` does not fit: both heads' counts of a prompt are resampled together.
    """
    sides = np.array(
        [[counts(request) for request in side] for side in (exact, shifted)], dtype=np.float64
    )  # [2, P, 2]
    if sides.shape[1] < 2 or not sides[..., 1].sum(axis=1).all():
        return None, [None, None]
    picks = np.random.default_rng(0).integers(sides.shape[1], size=(RESAMPLES, sides.shape[1]))

    def gain(index: np.ndarray) -> np.ndarray:
        totals = sides[:, index].sum(axis=-2)
        means = totals[..., 0] / np.maximum(totals[..., 1], 1)
        return means[0] / np.maximum(means[1], 1) - 1

    low, high = np.quantile(gain(picks), [0.025, 0.975])
    return float(gain(np.arange(sides.shape[1]))), [float(low), float(high)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, args.overrides)
    run = Path(recipe.run_dir)
    shape = DraftShape.chain(recipe.train.unroll.ttt_steps)
    examples, _ = load_examples(run / "rollouts" / "rollouts.jsonl", "held_out", recipe.train.data.max_length)
    prompts = [prompt_of(example) for example in examples]
    answers: dict[str, list[Answered]] = {}
    target = load_target(recipe.target.model, dtype=recipe.target.dtype, revision=recipe.target.revision)
    for name, shift in (("exact", 0), ("lagging by one", 1)):
        folder = run / "mask_shift" / name.split()[0]
        train_variant(args.recipe, args.overrides, run, folder, shift)
        engine = Engine(target, load_draft(folder / "ckpt"), shape, max_running_requests=8)
        answers[name] = engine.generate(prompts, SamplingParams(max_tokens=recipe.rollouts.max_tokens))
        engine.close()
    gain, interval = paired_gain(*answers.values())
    rows = []
    for name, requests in answers.items():
        stats = summarise([event for request in requests for event in request.events])
        first = summarise([request.events[0] for request in requests if request.events])
        interval_of_one = ratio_interval(*zip(*(counts(request) for request in requests), strict=True))
        rows.append(
            {"method": f"eagle3, mask {name}", "shape": "chain", "num_steps": shape.num_steps, "top_k": 1,
             "num_draft_tokens": shape.num_draft_tokens, "temperature": 0.0, "task": "held-out rollouts",
             "prompts": len(prompts), "verify_steps": stats.verify_steps, "accept_length": number(stats.accept_length),
             "interval": [None, None] if interval_of_one is None else list(interval_of_one),
             "accept_rate": [number(rate) for rate in stats.accept_rate], **dict.fromkeys(NOT_MEASURED),
             "first_step_accept_length": number(first.accept_length)}
        )  # fmt: skip
    record = make_record(
        "acceptance",
        ["python", *sys.argv],
        {"recipe": args.recipe, "overrides": args.overrides},
        rows,
        gain_of_the_exact_mask=gain,
        gain_interval=interval,
    )
    show(rows, gain, interval)
    leave(record, "acceptance-mask-shift")
    return 0


def show(rows: list[dict], gain: float | None, interval: list[float | None]) -> None:
    table = Table(title="chain, greedy, prompts that were not trained on")
    for column in ("mask", "accept_length", "of the first verify step", "verify steps"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["method"],
            decimal(row["accept_length"], 3),
            decimal(row["first_step_accept_length"], 3),
            str(row["verify_steps"]),
        )
    Console().print(table)
    if gain is None:
        print("fewer than two prompts were verified: nothing can be said of the gain")
        return
    low, high = interval
    print(f"gain of the exact mask: {gain:+.1%} [{low:+.1%}, {high:+.1%}] (95 %, bootstrap over prompts)")


if __name__ == "__main__":
    sys.exit(main())
