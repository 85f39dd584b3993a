"""Export a draft head for vLLM: a folder, checked, and the line that serves it there.

    python examples/export_to_vllm.py
    python examples/export_to_vllm.py --draft runs/my-chats/ckpt --out exports/my-chats

vLLM is not needed: the folder is made and checked here, and copied to the machine that serves. `--to sglang` exports
for SGLang in the same way.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path


def toolkit(*words: str) -> None:
    """Run a command of toolkit; its output is the user's."""
    print("\n$ toolkit", *words, flush=True)
    status = subprocess.run([sys.executable, "-m", "toolkit", *words]).returncode
    if status:
        sys.exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="runs/smollm2-135m/ckpt", metavar="DIR", help="draft directory")
    parser.add_argument("--out", default="exports/vllm", metavar="DIR", help="new folder (default: exports/vllm)")
    parser.add_argument("--to", default="vllm", choices=["vllm", "sglang", "speculators", "eagle"])
    args = parser.parse_args()
    if not Path(args.draft).is_dir():
        sys.exit(f"no draft head in {args.draft}; make one: toolkit run recipes/smollm2-135m.yaml")

    toolkit("export", "--draft", args.draft, "--to", args.to, "--out", args.out)
    toolkit("inspect", args.out)
    if args.to == "vllm":
        installed = importlib.util.find_spec("vllm") is not None
        print(f"\nvllm is {'' if installed else 'not '}installed here")


if __name__ == "__main__":
    main()
