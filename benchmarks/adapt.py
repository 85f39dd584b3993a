"""What a head is worth on a fine-tuned copy of its target: as it is, trained further, and a new one in its place.

    python benchmarks/adapt.py runs/smollm2-135m/ckpt gsm8k_train.jsonl.gz --out runs/adapt [--steps 600] [a.b=c ...]

The head's target is fine-tuned on the answers of the file's first conversations (AdamW, fp32 weights; bf16
products where this CPU multiplies it faster).
The copy answers the questions that follow in the file (rollouts of the demo recipe); a share of them is held out. Then,
for each seed and over the same rollouts:

adapted    `train.init`: trained further from the head
new        a new head by the same recipe, for as many optimizer steps

accept_length is the engine's on the held-out prompts, greedy: of the head as it is on the fine-tuned target (*old*,
before the first step), and of both after the last step. Killed, the same command goes on.
Writes benchmarks/results/adapt-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from results_folder import leave

from toolkit.bench.records import command_line, make_record
from toolkit.checkpoint.open_head import open_head
from toolkit.data.chat_template import prompt_ids
from toolkit.data.conversations import Conversation, read_conversations, write_conversations
from toolkit.jsonl import read_rows
from toolkit.recipe import DEMO_RECIPE, load_recipe, result_settings
from toolkit.targets.cpu_dtype import fastest_cpu_dtype
from toolkit.targets.load import load_target

SHARED = ("rollouts", "token_map", "features", "prompts")
CHAIN = "4,1,5"
PART, BATCH = 40, 4  # conversations of a part and of an optimizer step


def fine_tune(name: str, conversations: Sequence[Conversation], rate: float, out: Path) -> Path:
    """Train all weights of a target on the last turns; returns the folder of the copy. After every PART conversations
    the copy is written and AdamW begins anew, so that a killed command loses little."""
    folder = Path(name)
    for start in range(0, len(conversations), PART):
        source, folder = folder, out / f"copy-{start // PART + 1}"
        if (folder / "tokenizer_config.json").is_file():  # is written last
            continue
        target = load_target(source, dtype="float32")
        model = target.model.train().requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for first in range(start, min(start + PART, len(conversations)), BATCH):
            for one in conversations[first : first + BATCH]:
                prompt = prompt_ids(target.tokenizer, one.messages[:-1])
                answer = target.tokenizer(one.messages[-1]["content"], add_special_tokens=False)["input_ids"]
                ids = torch.tensor([[*prompt, *answer, min(target.stop_ids)]])
                labels = ids.clone()
                labels[:, : len(prompt)] = -100
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fastest_cpu_dtype() == torch.bfloat16):
                    loss = model(input_ids=ids, labels=labels).loss
                (loss / BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"fine-tuned on {PART} more conversations, loss of the last {loss:.2f}", file=sys.stderr)
        model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)
    return folder


def toolkit(*words: str) -> None:
    status = subprocess.run([sys.executable, "-m", "toolkit", *words], check=False).returncode
    if status:
        raise SystemExit(status)


def row_of(run: Path, variant: str, seed: int, step: int) -> dict[str, Any]:
    """What the engine measured at a step of a training."""
    rows = [row for _, row in read_rows(run / "train" / "metrics.jsonl")]
    steps = [row for row in rows if "loss" in row and row["step"] <= step]
    found = {key: value for row in rows if row["step"] == step for key, value in row.items()}
    (real,) = found["real"]
    return {
        "variant": variant,
        "seed": seed,
        "steps": step,
        "tokens": steps[-1]["tokens"] if steps else 0,
        "seconds": sum(row["seconds_per_step"] for row in steps),
        **{key: real[key] for key in ("num_steps", "top_k", "num_draft_tokens", "temperature", "accept_length")},
        **{key: real[key] for key in ("interval", "verify_steps", "accept_rate")},
        "prompts": found["real_prompts"],
        "forecast": found["forecast_accept_length"],
        "forecast_interval": found["forecast_interval"],
        "loss": steps[-1]["loss"] if steps else None,
    }


def measured(args: argparse.Namespace, base: Path, words: Iterable[str]) -> list[dict[str, Any]]:
    """Train the variants of every seed over the rollouts of `base`; the rows of the record."""
    rows = []
    for seed in args.seeds:
        for variant, start in (("adapted", [f"train.init={args.draft}"]), ("new", [])):
            run = args.out / f"{variant}-{seed}"
            run.mkdir(exist_ok=True)
            for name in SHARED:
                if not (run / name).exists():
                    (run / name).symlink_to((base / name).resolve())
            toolkit("train", "--recipe", str(DEMO_RECIPE), *words, *start, f"seed={seed}", f"run_dir={run}")
            if variant == "adapted" and seed == args.seeds[0]:
                rows.append(row_of(run, "old", seed, 0))
            rows.append(row_of(run, variant, seed, args.steps))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="an eagle3 draft directory that names its target")
    parser.add_argument("questions", help="conversations with answers")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the demo recipe's")
    parser.add_argument("--out", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--answers", type=int, default=200, help="conversations to fine-tune on")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="of the fine-tuning")
    parser.add_argument("--prompts", type=int, default=400, help="further questions that the fine-tuned target answers")
    parser.add_argument("--held-out", type=int, default=40, help="of them, which the engine answers at a measurement")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of a training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--note", help="what else the machine did, for the record")
    args = parser.parse_intermixed_args()
    found = list(islice(read_conversations(args.questions), args.answers + args.prompts))
    name = open_head(args.draft).meta["target"]["name"]
    copy = fine_tune(name, found[: args.answers], args.learning_rate, args.out)
    write_conversations(questions := args.out / "questions.jsonl", found[args.answers :])
    share, steps = args.held_out / args.prompts, str(args.steps)
    words = [f"target.model={copy}", f"prompts.sources=[{questions}]", "prompts.synthesize=0"]
    words += [f"rollouts.held_out={share}", f"train.max_steps={steps}", "train.epochs=99", "train.save_every=50"]
    words += [f"train.evaluation.eval_every={steps}", f"train.evaluation.real_every={steps}"]
    words += [f"train.evaluation.real_prompts={args.held_out}", "train.evaluation.real_max_tokens=96"]
    words += [f"train.evaluation.real_shapes=['{CHAIN}']", "train.evaluation.real_temperatures=[0.0]", *args.overrides]
    base = args.out / "rollouts-of-the-copy"
    toolkit("run", str(DEMO_RECIPE), *words, f"run_dir={base}", "--until", "token_map")
    rows = measured(args, base, words)
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("out", "note", "questions")}
    settings |= {"questions": Path(args.questions).name}
    settings |= {"train": result_settings(load_recipe(DEMO_RECIPE, words).train)}
    record = make_record("training", f"python benchmarks/{command_line()}", settings, rows, note=args.note)
    print(json.dumps(rows, indent=1))
    leave(record, f"adapt-{Path(name).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
