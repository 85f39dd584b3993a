"""A rehearsal of a recipe: `toolkit run RECIPE target.model=stand-in:qwen3-8b` runs all six stages with random weights.

What decides memory and speed stays as in the recipe: lengths, batches, layers, precision, processes. Only the counts
are small, and the built-in prompts take the place of the recipe's sources, unless an override names some. At the end
each stage's time is multiplied by the counts of the recipe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.jsonl import read_rows
from toolkit.pipeline.run import METRICS, PROMPTS, ROLLOUTS_STATS, Run
from toolkit.pipeline.stages import FILE_NAME
from toolkit.recipe import Recipe, load_recipe
from toolkit.weights import read_json

STEPS = 4  # of the optimizer; the first one is slower than the others
HELD_OUT = 0.1
BENCH_PROMPTS = 4
BUILT_IN = 40  # prompts of the bench


def rehearsed(path: Path, overrides: Sequence[str]) -> tuple[Recipe, Recipe | None, list[str]]:
    """(the recipe to run, the whole recipe, all overrides). The whole recipe is None unless the target is a stand-in;
    the counts of a rehearsal come before the user's overrides, which replace them."""
    whole = load_recipe(path, overrides)
    if not whole.target.model.startswith("stand-in:"):
        return whole, None, list(overrides)
    given = [*_small_counts(whole), *overrides, f"run_dir={whole.run_dir}-rehearsal"]
    given.insert(0, f"prompts.limit={_count_of_prompts(load_recipe(path, given))}")  # the user's sources may be large
    return load_recipe(path, given), whole, given


def _small_counts(recipe: Recipe) -> list[str]:
    train = recipe.train
    counts = {
        "target.revision": "null",  # of the real model; a stand-in has its own
        "prompts.sources": json.dumps([str(_prompts_of(f"{recipe.run_dir}-rehearsal"))]),
        "prompts.synthesize": 0,
        "rollouts.held_out": HELD_OUT,
        "rollouts.server": "[]",
        "rollouts.server_model": "null",
        "train.max_steps": STEPS,
        "train.evaluation.eval_every": STEPS,
        "train.evaluation.real_every": STEPS if train.evaluation.real_every else "null",
        "train.save_every": STEPS,
        "train.on_policy.every": STEPS // 2 if train.on_policy.every else "null",
        "train.on_policy.prompts": "null",
        "train.tracking.wandb": "false",
        "bench.prompts": "null",
        "bench.limit": BENCH_PROMPTS,
        "bench.warmup": 1,
    }
    return [f"{key}={value}" for key, value in counts.items()]


def _prompts_of(run_dir: str) -> Path:
    return Path(run_dir) / "built_in_prompts.jsonl"


def _count_of_prompts(recipe: Recipe) -> int:
    """As many as the steps take."""
    steps = recipe.train.max_steps or STEPS
    return max(BUILT_IN, math.ceil(steps * recipe.train.data.global_batch / (1 - 2 * HELD_OUT)))


def write_prompts(recipe: Recipe) -> None:
    """Write the built-in prompts to the run folder; they are used again and again, each time with a number."""
    from toolkit.bench.prompts import builtin_prompts  # loads torch; only a rehearsal does

    path, texts = _prompts_of(recipe.run_dir), [one.turns[0] for one in builtin_prompts()]
    lines = []
    for at in range(_count_of_prompts(recipe)):
        again, place = divmod(at, len(texts))
        text = texts[place] if not again else f"{texts[place]} ({again})"
        lines.append(json.dumps({"id": f"built-in-{at}", "messages": [{"role": "user", "content": text}]}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def estimate(run: Run, whole: Recipe) -> str:
    """What the rehearsal says of the whole recipe: a line a stage, and the peak memory of a training process."""
    head = f"REHEARSAL of {whole.name} with {run.recipe.target.model}: times and memory are real, weights are random."
    lines = [f"\033[31m{head}\033[0m", "  the whole recipe on this machine, at these speeds:"]
    return "\n".join([*lines, *(f"    {name:<10} {text}" for name, text in _estimates(run, whole))])


def _estimates(run: Run, whole: Recipe) -> Iterator[tuple[str, str]]:
    folders = {"rollouts": "rollouts", "measure": "bench"}
    made = {name: read_json(run.folder / folder / FILE_NAME) for name, folder in folders.items()}
    known = whole.prompts.limit is not None or not whole.prompts.sources
    count = (whole.prompts.limit or 0) + whole.prompts.synthesize if known else 1000
    unit = f"{count:,} conversations" + ("" if known else " (the sources have no limit: times grow with their number)")
    written = read_json(run.folder / ROLLOUTS_STATS)
    answers, here = written["rollouts"], len(list(read_rows(run.folder / PROMPTS)))
    if whole.prompts.synthesize:
        yield "prompts", f"not rehearsed: the target writes {whole.prompts.synthesize:,} of them itself"
    said = f"{answers} answers, {written['response_tokens']:,} tokens in {made['rollouts']['seconds']:.0f} s"
    yield "rollouts", _at_most(made["rollouts"], count / here, f"{unit}; here {said}")
    rows = [row for _, row in read_rows(run.folder / METRICS) if "seconds_per_step" in row]
    each, batch = median(row["seconds_per_step"] for row in rows[1:] or rows), whole.train.data.global_batch
    rate = median(row["tokens_per_s"] for row in rows[1:] or rows)
    steps = whole.train.max_steps or math.ceil(whole.train.epochs * count * (1 - whole.rollouts.held_out) / batch)
    text = f"{steps:,} steps of {each:.2f} s, {rate:,.0f} supervised tokens/s, without its evaluations"
    yield "train", f"{_time(steps * each)}: {text}"
    yield "memory", f"{max(row['peak_memory_bytes'] for row in rows) / 1e9:.1f} GB in a training process at its peak"
    prompts = whole.bench.limit or (BUILT_IN if whole.bench.prompts is None else None)
    if prompts is not None:
        factor = prompts / (run.recipe.bench.limit or BENCH_PROMPTS)
        yield "measure", _at_most(made["measure"], factor, f"{prompts} prompts")


def _at_most(made: dict[str, Any], factor: float, what: str) -> str:
    if made["sessions"] > 1:  # the manifest has the seconds of the last session alone
        return f"not known, because the stage was resumed; --force {made['stage']} times it anew"
    return f"at most {_time(made['seconds'] * factor)} for {what}"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
