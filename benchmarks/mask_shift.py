"""What the exact loss mask is worth: the same head trained with it and with the mask lagging by one, measured alike.

    python benchmarks/mask_shift.py recipes/smollm2-135m.yaml [train.max_steps=120 ...]

Both heads start alike, see the same batches in the same order and draft chains on the same unseen prompts (the run's
held-out rollouts). The lagging mask never trains the first draft of an answer, so the first verify step is shown apart.
Writes benchmarks/results/mask-shift-cpu.json (or -gpu).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from toolkit.bench.records import make_record, write_record
from toolkit.checkpoint.draft_dir import load_draft
from toolkit.data.batches import Example, load_examples
from toolkit.infer.acceptance import summarise
from toolkit.infer.draft_tree import DraftShape
from toolkit.infer.engine import Engine
from toolkit.infer.request import Request
from toolkit.infer.sampling_params import SamplingParams
from toolkit.recipe import load_recipe
from toolkit.target.load import load_target

REPOSITORY = Path(__file__).resolve().parents[1]
DRAWS = 2000


def train_variant(recipe: str, overrides: list[str], run: Path, folder: Path, shift: int) -> None:
    """Train into `folder` from the rollouts and the token map of `run`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("rollouts", "token_map"):
        if not (folder / name).exists():
            (folder / name).symlink_to((run / name).resolve(), target_is_directory=True)
    script = REPOSITORY / "toolkit" / "train" / "eagle3.py"
    line = [sys.executable, "-m", "accelerate.commands.launch", str(script), "--recipe", recipe, *overrides]
    subprocess.run([*line, f"run_dir={folder}", f"train.mask_shift={shift}"], check=True)


def prompt_of(example: Example) -> list[int]:
    """The ids before the last answer."""
    start = len(example.input_ids)
    while start and example.response[start - 1]:
        start -= 1
    return example.input_ids[:start]


def paired_gain(exact: list[Request], shifted: list[Request]) -> tuple[float, list[float]]:
    """Relative gain in accept_length of the first over the second, and its 95 % interval over prompts."""
    sums = torch.tensor([[sum(e.committed for e in r.events if not e.truncated) for r in side] for side in (exact, shifted)])
    steps = torch.tensor([[sum(not e.truncated for e in r.events) for r in side] for side in (exact, shifted)])
    picks = torch.randint(sums.shape[1], (DRAWS, sums.shape[1]), generator=torch.Generator().manual_seed(0))

    def gain(index: torch.Tensor) -> torch.Tensor:
        means = sums[:, index].sum(-1).double() / steps[:, index].sum(-1).clamp(min=1)
        return means[0] / means[1] - 1

    spread = gain(picks).sort().values
    every = float(gain(torch.arange(sums.shape[1])))
    return every, [float(spread[int(0.025 * DRAWS)]), float(spread[int(0.975 * DRAWS)])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, args.overrides)
    run = Path(recipe.run_dir)
    shape = DraftShape.chain(recipe.train.ttt_steps)
    examples, _ = load_examples(run / "rollouts" / "rollouts.jsonl", "held_out", recipe.train.max_length)
    prompts = [prompt_of(example) for example in examples]
    answers: dict[str, list[Request]] = {}
    target = load_target(recipe.target.model, dtype=recipe.target.dtype, revision=recipe.target.revision)
    for name, shift in (("exact", 0), ("lagging by one", 1)):
        folder = run / "mask_shift" / name.split()[0]
        train_variant(args.recipe, args.overrides, run, folder, shift)
        engine = Engine(target, load_draft(folder / "ckpt"), shape, max_batch=8)
        answers[name] = engine.generate(prompts, SamplingParams(max_tokens=recipe.rollouts.max_tokens))
        engine.close()
    gain, interval = paired_gain(*answers.values())
    rows = []
    for name, requests in answers.items():
        stats = summarise([event for request in requests for event in request.events])
        first = summarise([request.events[0] for request in requests if request.events])
        rows.append(
            {"method": f"eagle3, mask {name}", "shape": "chain", "num_steps": shape.num_steps, "top_k": 1,
             "num_draft_tokens": shape.num_draft_tokens, "temperature": 0.0, "task": "held-out rollouts",
             "prompts": len(prompts), "verify_steps": stats.verify_steps, "accept_length": stats.accept_length,
             "accept_rate": stats.accept_rate, "first_step_accept_length": first.accept_length}
        )  # fmt: skip
    record = make_record("acceptance", ["python", *sys.argv], {"recipe": args.recipe, "overrides": args.overrides}, rows,
                         gain_of_the_exact_mask=gain, gain_interval=interval)
    show(rows, gain, interval)
    out = REPOSITORY / "benchmarks" / "results" / f"mask-shift-{'gpu' if torch.cuda.is_available() else 'cpu'}.json"
    write_record(out, record)
    print(f"written: {out.relative_to(REPOSITORY)}")
    return 0


def show(rows: list[dict], gain: float, interval: list[float]) -> None:
    table = Table(title="chain, greedy, prompts that were not trained on")
    for column in ("mask", "accept_length", "of the first verify step", "verify steps"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["method"], f"{row['accept_length']:.3f}", f"{row['first_step_accept_length']:.3f}",
                      str(row["verify_steps"]))
    Console().print(table)
    print(f"the exact mask wins by {gain:+.1%} [{interval[0]:+.1%}, {interval[1]:+.1%}] (95 %, bootstrap over prompts)")


if __name__ == "__main__":
    sys.exit(main())
