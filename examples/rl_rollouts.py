"""Reinforcement learning whose rollouts are drafted: the target learns, and its draft head follows.

    python examples/rl_rollouts.py                        # a few minutes on a CPU
    python examples/rl_rollouts.py --steps 40 --adapt-every 4

The task is made here: sums of two digits, one point for the right last number, one for an answer that ends there. Each
step, the engine answers every question several times at temperature 1; the answers better than their group's mean
become more likely (GRPO without its KL term); `LLM.update_weights` hands the new weights to the engine, and
`LLM.refresh_draft` the head, which a few passes over the newest rollouts have adapted. To compare, the same rollouts
are written with the head as it was, and without drafts.

Measured 2026-11-25 with the demo's head, by `OMP_NUM_THREADS=2 python examples/rl_rollouts.py`, in under five minutes,
on two cores of an AMD EPYC with AVX512 and without AMX. One run, 24 answers a step; five of its 16 rows (of the others,
step 11 has 0.60x for the adapted head, and the rest lie between 0.77x and 1.03x):

    step    reward  tokens   accept_length        tokens/s, and over plain
                             frozen  adapted    plain  frozen  adapted
       0      0.29    28.7     1.34     1.34    245.5   0.88x    0.89x
       4      0.25    29.6     1.31     1.39    251.9   0.87x    0.94x
       8      0.54    24.0     1.39     1.57    275.7   0.80x    0.92x
      12      0.83    20.2     1.35     1.50    231.3   0.94x    1.03x
      15      1.21    17.2     1.41     1.56    219.9   0.92x    1.04x

So the adapted head's drafts hardly pay here with four answers at once; fewer at once, and a GPU, were not measured.
"""

import argparse
import random
import re
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

from toolkit import LLM, SamplingParams
from toolkit.checkpoint.open_head import open_head
from toolkit.data.batches import Example, collate
from toolkit.targets.load import read_target
from toolkit.targets.target import Target
from toolkit.train.head_adapter import HeadAdapter

PROMPT = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"


def reward(text: str, stopped: bool, a: int, b: int) -> float:
    """0, 1 or 2 points: the last number is the sum; the answer has ended by itself with a number."""
    numbers = re.findall(r"\d+", text)
    right = bool(numbers) and int(numbers[-1]) == a + b
    return float(right) + float(stopped and bool(re.search(r"\d\W*$", text)))


def write(llm: LLM, questions: list[tuple[int, int]], seed: int, tokens: int, speculative: bool = True) -> dict:
    """Rollouts of all questions, and what they cost. The seeds decide the tokens, with drafts or without."""
    params = [SamplingParams(1.0, max_tokens=tokens, seed=seed + n) for n in range(len(questions))]
    began = time.perf_counter()
    answers = llm.generate([PROMPT.format(a, b) for a, b in questions], params, speculative=speculative)
    seconds = time.perf_counter() - began
    steps = sum(answer.acceptance.verify_steps for answer in answers)
    accepted = sum(answer.acceptance.accepted for answer in answers)
    return {
        "answers": answers,
        "speed": sum(len(answer.token_ids) for answer in answers) / seconds,
        "accept_length": 1 + accepted / steps if steps else float("nan"),
    }


def improve(policy: Target, optimizer: torch.optim.Optimizer, rollouts: list[Example], advantages: list[float]) -> None:
    """One policy-gradient step: the mean over answer tokens of advantage * log-probability, uphill."""
    batch = collate(rollouts, pad_id=0)
    chosen = batch.response[:, 1:]  # position i predicts id i + 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = policy.body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        logits = policy.logits(states[:, :-1][chosen])
    losses = torch.nn.functional.cross_entropy(logits.float(), batch.input_ids[:, 1:][chosen], reduction="none")
    weights = torch.tensor(advantages)[:, None].expand(chosen.shape)[chosen]
    optimizer.zero_grad()
    (weights * losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def group_advantages(rewards: list[float], size: int) -> list[float]:
    """Each reward in its question's group: minus the mean, over the standard deviation."""
    grouped = torch.tensor(rewards).view(-1, size)
    return ((grouped - grouped.mean(1, True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten().tolist()


def draw(rows: list[dict], path: Path) -> None:
    """Reward above, accept_length of both heads below."""
    figure = Figure(figsize=(6, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [row["step"] for row in rows]
    above.plot(steps, [row["reward"] for row in rows], color="#4f46a5")
    above.set_ylabel("reward (0 to 2)")
    for name, colour in (("frozen", "#a3adba"), ("adapted", "#0f766e")):
        below.plot(steps, [row[name] for row in rows], color=colour, label=f"head {name}")
    below.set(xlabel="step of the target", ylabel="accept_length")
    below.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="runs/smollm2-135m/ckpt", metavar="DIR", help="draft directory")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="steps of the target (default: 16)")
    parser.add_argument("--adapt-every", type=int, default=1, metavar="N", help="steps between two adaptations")
    parser.add_argument("--questions", type=int, default=4, metavar="N", help="questions a step (default: 4)")
    parser.add_argument("--answers", type=int, default=6, metavar="N", help="answers to each (default: 6)")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="answers written at once (default: 4)")
    parser.add_argument("--shape", default="2,1,3", metavar="S,K,N", help="draft shape (default: a chain of two)")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="of the target")
    parser.add_argument("--out", type=Path, default=Path("rl_rollouts.png"), metavar="FILE.png")
    args = parser.parse_args()
    if not Path(args.draft).is_dir():
        sys.exit(f"no draft head in {args.draft}; make one: toolkit run recipes/smollm2-135m.yaml")

    policy, draft = read_target(args.target, dtype="float32"), open_head(args.draft, target=args.target)
    trained = list(policy.layers[-10:].requires_grad_(True).parameters())  # the last layers: a CPU's worth of training
    optimizer, adapter = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0), HeadAdapter(policy, draft)
    frozen, rows, newest = draft.head.state_dict(), [], []
    torch.manual_seed(0)
    choose = random.Random(0)
    print(f"{'step':>4} {'reward':>7} {'tokens':>7}   accept_length        tokens/s, and over plain")
    print(f"{'':>4} {'':>7} {'':>7} {'frozen':>7} {'adapted':>8}   {'plain':>6} {'frozen':>7} {'adapted':>8}")
    options = {"shape": args.shape, "max_running_requests": args.batch, "prefix_cache": False}
    with LLM(args.target, args.draft, **options) as llm:
        write(llm, [(1, 1)] * args.batch, 0, 8)  # warm up
        for step in range(args.steps):
            pairs = [(choose.randint(1, 9), choose.randint(1, 9)) for _ in range(args.questions)]
            questions = [pair for pair in pairs for _ in range(args.answers)]
            passes = {"plain": write(llm, questions, 1000 * step, args.max_tokens, speculative=False)}
            for name, weights in (("frozen", frozen), ("adapted", adapter.state_dict())):
                llm.refresh_draft(weights)
                passes[name] = write(llm, questions, 1000 * step, args.max_tokens)

            answers = passes["adapted"]["answers"]
            stopped = [answer.finish_reason == "stop" for answer in answers]
            rewards = [reward(one.text, end, *q) for one, end, q in zip(answers, stopped, questions, strict=True)]
            newest = [rollout(answer.prompt_ids, answer.token_ids) for answer in answers]
            improve(policy, optimizer, newest, group_advantages(rewards, args.answers))
            llm.update_weights(policy.model.state_dict())
            if (step + 1) % args.adapt_every == 0:
                for _ in range(2):
                    adapter.train(newest)

            speed = {name: one["speed"] for name, one in passes.items()}
            lengths = {name: passes[name]["accept_length"] for name in ("frozen", "adapted")}
            rows.append({"step": step, "reward": sum(rewards) / len(rewards), **lengths})
            tokens = sum(len(answer.token_ids) for answer in answers) / len(answers)
            print(
                f"{step:>4} {rows[-1]['reward']:>7.2f} {tokens:>7.1f} {lengths['frozen']:>7.2f} "
                f"{lengths['adapted']:>8.2f}   {speed['plain']:>6.1f} {speed['frozen'] / speed['plain']:>6.2f}x "
                f"{speed['adapted'] / speed['plain']:>7.2f}x",
                flush=True,
            )
    draw(rows, args.out)
    print(f"the curves are in {args.out}")


def rollout(prompt: list[int], answer: list[int]) -> Example:
    return Example("", prompt + answer, [False] * len(prompt) + [True] * len(answer))


if __name__ == "__main__":
    main()
