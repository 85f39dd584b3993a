"""Train a small MTP head (DeepSeek-V3's kind of draft head) on the demo target, briefly, and decode with it.

    python examples/mtp.py                       # a few minutes on a CPU
    python examples/mtp.py train.epochs=8        # settings of the recipe

The recipe is that of the demo with `train.head.kind=mtp`, on fewer prompts, which the target writes itself. Typed
again, the training is skipped, and the head decodes.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from toolkit import LLM, SamplingParams

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "smollm2-135m.yaml"
BRIEFLY = ["prompts.synthesize=64", "prompts.max_tokens=64", "rollouts.max_tokens=96", "train.epochs=6"]
QUESTIONS = ["Name three rivers in Europe.", "How do plants make food?", "Write a short poem about the sea."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/mtp", metavar="DIR", help="folder of the run (default: runs/mtp)")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    args = parser.parse_args()

    words = [str(RECIPE), "name=mtp", f"run_dir={args.out}", "train.head.kind=mtp", *BRIEFLY, *args.settings]
    words += ["--until", "train"]  # the stages measure and report are left out
    print("$ toolkit run", shlex.join(words), flush=True)
    status = subprocess.run([sys.executable, "-m", "toolkit", "run", *words]).returncode
    if status:
        sys.exit(status)

    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    with LLM(draft=f"{args.out}/ckpt", shape="3,1,4") as llm:  # a chain: three drafts a step, one after the other
        for answer in llm.generate(chats, SamplingParams(max_tokens=48)):
            steps = answer.acceptance.verify_steps
            print(f"\n{answer.text}\n  [accept_length {answer.accept_length:.2f} in {steps} verify steps]")


if __name__ == "__main__":
    main()
