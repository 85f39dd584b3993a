"""Answer a list of prompts without a server, write the answers to a file, and compare with plain decoding.

    python examples/offline_batch.py
    python examples/offline_batch.py --prompts my.jsonl --draft runs/my-chats/ckpt

A line of the file is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}. Without a draft head
the engine drafts by n-gram lookup. In bfloat16 a drafted answer may leave the plain one where two tokens are equally
probable but for rounding; with LLM(dtype="float32") it does not.
"""

import argparse
import json
import time
from pathlib import Path

from toolkit import LLM, SamplingParams

PROMPTS = [
    "Write a Python function that adds two numbers, and explain it.",
    "Name the planets of the solar system, one a line.",
    "Translate into French: The weather is nice today.",
    "Summarise in one sentence: Bees collect nectar, make honey, and pollinate many plants while they do so.",
    "What is a prime number? Give three examples.",
    "Write a polite letter that asks for a day off.",
    "How do I boil an egg?",
    "Repeat this list three times: red, green, blue.",
]


def read_chats(path: Path | None) -> list[list[dict[str, str]]]:
    """One conversation a prompt."""
    lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    rows = [{"prompt": text} for text in PROMPTS] if path is None else [json.loads(line) for line in lines if line]
    return [row.get("messages") or [{"role": "user", "content": row["prompt"]}] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="your prompts (default: eight built-in ones)"
    )
    parser.add_argument("--draft", default="runs/smollm2-135m/ckpt", metavar="DIR", help="draft directory")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL", help="model to load without a head")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="prompts answered at once (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("answers.jsonl"), metavar="FILE.jsonl")
    args = parser.parse_args()
    model = {"draft": args.draft}
    if not Path(args.draft).is_dir():
        print(f"no draft head in {args.draft}; n-gram lookup drafts (train a head: examples/train_on_your_chats.py)")
        model = {"target": args.target, "draft": "ngram"}

    chats, params = read_chats(args.prompts), SamplingParams(max_tokens=args.max_tokens)
    # Without the prefix cache: the second pass must not find the prompts that the first one has read.
    with LLM(**model, max_running_requests=args.batch, prefix_cache=False) as llm:
        for name, speculative in (("plain", False), ("drafted", True)):
            llm.generate(chats[:1], SamplingParams(max_tokens=8), speculative=speculative)  # warm up
            began = time.perf_counter()
            answers = llm.generate(chats, params, speculative=speculative)
            seconds = time.perf_counter() - began
            tokens = sum(len(answer.token_ids) for answer in answers)
            print(f"{name:<8} {tokens} tokens, {tokens / seconds:.1f} tokens/s")
    steps = sum(answer.acceptance.verify_steps for answer in answers)
    accepted = sum(answer.acceptance.accepted for answer in answers)
    print(f"accept_length {1 + accepted / steps:.2f} in {steps} verify steps" if steps else "drafting did not pay here")

    rows = [
        {"messages": [*chat, {"role": "assistant", "content": answer.text}], "finish_reason": answer.finish_reason}
        for chat, answer in zip(chats, answers, strict=True)
    ]
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} answers in {args.out}")


if __name__ == "__main__":
    main()
