"""The same prompts with several draft shapes: what each accepts, and what it costs, beside plain decoding.

    python examples/custom_draft_shape.py
    python examples/custom_draft_shape.py --draft runs/my-chats/ckpt --tree 5,4,16

A shape is "levels,branches,verified nodes with the root": 4,1,5 is a chain of four drafts, 3,3,8 a small tree. A shape
is chosen for an engine or for a request; an adaptive engine chooses one in every step. Without a draft head n-gram
lookup drafts.
"""

import argparse
import time
from pathlib import Path

from toolkit import LLM, SamplingParams

TEXTS = [
    "Write a Python function that adds two numbers, and explain it.",
    "Name the planets of the solar system, one a line.",
    "What is a prime number? Give three examples.",
    "Repeat this list three times: red, green, blue.",
]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]


def measure(name: str, llm: LLM, max_tokens: int, **options: object) -> None:
    """Print one row: accept_length over all answers, and tokens a second."""
    llm.generate(CHATS, SamplingParams(max_tokens=8), **options)  # warm up
    began = time.perf_counter()
    answers = llm.generate(CHATS, SamplingParams(max_tokens=max_tokens), **options)
    seconds = time.perf_counter() - began
    steps = sum(answer.acceptance.verify_steps for answer in answers)
    accepted = sum(answer.acceptance.accepted for answer in answers)
    length = f"{1 + accepted / steps:.2f}" if steps else "-"
    print(f"{name:<28} {length:>13} {sum(len(answer.token_ids) for answer in answers) / seconds:>9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="runs/smollm2-135m/ckpt", metavar="DIR", help="draft directory")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL", help="model to load without a head")
    parser.add_argument("--chain", default="3,1,4", metavar="S,1,N")
    parser.add_argument("--tree", default="3,3,8", metavar="S,K,N")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    model = {"draft": args.draft}
    if not Path(args.draft).is_dir():
        print(f"no draft head in {args.draft}; n-gram lookup drafts (train a head: examples/train_on_your_chats.py)")
        model = {"target": args.target, "draft": "ngram"}
    model |= {"max_running_requests": 1, "prefix_cache": False}  # one answer at a time, every prompt read anew

    print(f"{'drafts':<28} {'accept_length':>13} {'tokens/s':>9}")
    with LLM(**model, shape=args.tree) as llm:  # the largest shape that a request may ask for
        measure("plain", llm, args.max_tokens, speculative=False)
        measure(f"tree {args.tree}", llm, args.max_tokens)
        measure(f"chain {args.chain}", llm, args.max_tokens, shape=args.chain)
        measure("each request its own", llm, args.max_tokens, shape=["1,1,2", args.chain, args.tree, None])
    with LLM(**model, shape=args.tree, adaptive=True) as llm:
        measure(f"adaptive up to {args.tree}", llm, args.max_tokens)


if __name__ == "__main__":
    main()
