"""Train a draft head on your own chats, and measure it on chats that it has not seen.

    python examples/train_on_your_chats.py                      # on made-up chats with a shop: a few minutes on a CPU
    python examples/train_on_your_chats.py --chats my.jsonl --target org/model

A line of the file is {"messages": [{"role": "user", "content": "..."}, ...]}; a sixth of the chats is kept for the
measurement. The target answers the user's turns itself: a head learns to draft what the target would write.

The rest comes from the demo recipe, with changes that suit any target: answers of up to 512 tokens, texts of up to
1,024, and the target's hidden states computed in each training step, so that nothing large is stored. Settings of the
recipe can follow, for example `train.epochs=8`. Typed again, the command skips what is up to date. For a large target
on GPUs write a recipe (docs/training.md).
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

from toolkit.bench.table import shape_name

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "smollm2-135m.yaml"
SYSTEM = "You are the assistant of a shop."
QUESTIONS = [
    "What should I know before I buy a {}?",
    "My {} arrived broken. What can I do?",
    "How do I clean a {}?",
    "Write an advertisement for a {}.",
    "Is a {} a good present for a child? Why?",
    "How long does a {} last?",
    "What is the difference between a cheap {} and an expensive one?",
    "Write a polite email to a customer whose {} is late.",
]
PRODUCTS = "bicycle kettle tent guitar lamp camera backpack chair watch kite blender bookcase".split()
ANY_TARGET = [
    "rollouts.max_tokens=512",
    "rollouts.keep_features=false",
    "train.data.features=online",
    "train.data.max_length=1024",
]
FEW_CHATS = ["rollouts.max_tokens=96", "train.epochs=10", "bench.max_tokens=48"]  # sizes for the made-up chats


def made_up_chats() -> list[str]:
    """One conversation a line."""
    texts = [question.format(product) for question in QUESTIONS for product in PRODUCTS]
    turns = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in texts]
    return [json.dumps({"messages": messages}) for messages in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=Path, metavar="FILE.jsonl", help="your chats (default: 96 made-up ones)")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL", help="hub id or directory of the model")
    parser.add_argument("--out", type=Path, default=Path("runs/my-chats"), metavar="DIR", help="folder of the run")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    args = parser.parse_args()

    chats = made_up_chats() if args.chats is None else args.chats.read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(chats)
    train, test = args.out / "train.jsonl", args.out / "test.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    test.write_text("\n".join(chats[: len(chats) // 6]) + "\n", encoding="utf-8")
    train.write_text("\n".join(chats[len(chats) // 6 :]) + "\n", encoding="utf-8")

    settings = [f"name={args.out.name}", f"run_dir={args.out}", f"target.model={args.target}"]
    settings += ["prompts.synthesize=0", f"prompts.sources=[{train}]", f"bench.prompts=[{test}]"]
    settings += [*ANY_TARGET, *(FEW_CHATS if args.chats is None else []), *args.settings]
    print("$ toolkit", shlex.join(["run", str(RECIPE), *settings]), flush=True)
    status = subprocess.run([sys.executable, "-m", "toolkit", "run", str(RECIPE), *settings]).returncode
    if status:
        sys.exit(status)

    rows = json.loads((args.out / "report.json").read_text(encoding="utf-8"))["rows"]
    for row in (row for row in rows if row["task"] == "all"):
        length = "-" if row["accept_length"] is None else f"{row['accept_length']:.2f}"  # adaptive may draft nothing
        print(f"{shape_name(row):<20} accept_length {length}, {row['speedup']:.2f}x plain decoding")


if __name__ == "__main__":
    main()
