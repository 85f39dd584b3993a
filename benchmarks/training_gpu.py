"""A training step on a GPU: seconds by part, tokens a second, share of the card's peak, memory.

    python benchmarks/training_gpu.py [--target llama] [--length 2048] [--texts 2] [--steps 7] [--budget 120]
    python benchmarks/training_gpu.py --device cpu --target tiny --length 64       to see that it runs

The target has random weights (gpu.py: `llama` has the shape of Llama-3.1-8B), and so has the head, over
random texts: seconds and memory are those of a real step, losses mean nothing but that both rows compute the same. No
DeepSpeed: forward of the target, K unrolled steps of the head, backward, fused AdamW. `pytest tests/train/test_loop.py`
runs the trainer itself. What fails or takes too long costs only its own row. Writes
benchmarks/results/training-gpu-<target>-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from gpu import Bench, Subject, gpu_parser
from harness import Row, show
from torch.utils.flop_counter import FlopCounterMode

from toolkit.data.batches import Batch, Example, collate
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.metrics import StepClock, peak_memory_bytes
from toolkit.train.step import micro_step, supervised_counts
from toolkit.train.target_side import TargetSide
from toolkit.train_settings import HeadSettings, OptimizerSettings, TrainSettings, UnrollSettings

PROMPT = 16  # tokens at the start of a row that are not trained on
PEAK = 989e12  # products of an H100 (SXM) in bf16 a second, by its data sheet
ROW_SECONDS = 60  # of one row at most, compilations included
PARTS = ("target", "labels", "head", "loss", "backward", "optimizer")
COLUMNS = ("row", "seconds_per_step", *(f"{part}_ms" for part in PARTS), "tokens_per_s", "share_of_peak")
# Of a quarter of all tokens: sequences that fill four rows.
RAGGED = (1, 0.75, 0.25, 0.625, 0.375, 0.5, 0.4375, 0.0625)
DEFINITIONS = {
    "row": "as is: texts that fill their rows; packed: eight texts in four rows",
    "tokens": "of the texts, without padding",
    "seconds_per_step": "median of the steps behind the first two; each begins when the one before is over",
    "parts": "median seconds: forward of the target, its argmax, unroll of the head, loss with its gradients and the "
    "teacher's probabilities, backward of the unroll, AdamW",
    "tflop": "10^12 operations by part, those of padding too, without attention",
    "share_of_peak": f"tflop of all parts a second, of {PEAK / 1e12:.0f}",
    "first_step_seconds": "of the first step, compilations included",
    "first_loss": "of the first step, from the same weights for all rows; texts of full and of ragged rows differ",
    "peak_memory_bytes": "the most held while a timed step runs",
}
ROWS = {"as is": False, "packed": True}
# The counter asserts that keys have as many heads as queries.
UNCOUNTED = [f"_scaled_dot_product_{one}" for one in ("flash_attention", "efficient_attention", "cudnn_attention",
                                                     "flash_attention_for_cpu")]  # fmt: skip


def texts(packed: bool, target: Target, args: argparse.Namespace) -> Batch:
    generator, quarter = torch.Generator().manual_seed(2), args.texts * args.length / 4
    lengths = [max(2, int(share * quarter)) for share in RAGGED] if packed else [args.length] * args.texts
    examples = []
    for number, length in enumerate(lengths):
        ids, prompt = torch.randint(2, target.vocab_size, (length,), generator=generator), min(PROMPT, length // 4)
        examples.append(Example(str(number), ids.tolist(), [False] * prompt + [True] * (length - prompt)))
    return collate(examples, pad_id=0, pack=packed)


class Training:
    """A head of `size` draft ids in training. `restart` gives it its first weights again."""

    def __init__(self, target: Target, size: int, args: argparse.Namespace) -> None:
        precision = "bf16" if target.dtype == torch.bfloat16 else "fp32"
        settings = TrainSettings(
            precision=precision,  # type: ignore[arg-type]
            head=HeadSettings(init="random"),
            unroll=UnrollSettings(ttt_steps=args.steps),
            optimizer=OptimizerSettings(name="adamw"),
        )
        ids = range(0, target.vocab_size, max(1, target.vocab_size // size))
        plan = plan_head(settings, target, TokenMap.from_ids(sorted({*ids, *target.stop_ids}), target.vocab_size))
        self.side = TargetSide(target, plan.token_map, plan.aux_layer_ids, precision)
        self.teacher, self.steps = self.side.teacher, args.steps
        torch.manual_seed(0)
        head = start_head(plan, settings, target, seed=0)
        self.model = trained_head(plan, settings, head, self.teacher).to(self.side.head_dtype)
        self.score = self.model.score
        self.first = [one.detach().clone() for one in self.model.parameters()]

    @torch.no_grad()
    def restart(self) -> None:
        for one, first in zip(self.model.parameters(), self.first, strict=True):
            one.copy_(first)
            one.grad = None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, batch: Batch, clock: StepClock) -> torch.Tensor:
        """Trains once and returns the loss; `clock` measures the parts."""
        self.side.teacher = clock.part("labels")(self.teacher)
        self.model.score = clock.part("loss")(self.score)  # type: ignore[method-assign]
        counts = supervised_counts(batch, self.steps).clamp(min=1)
        found = micro_step(self.model, self.side, batch, counts, self.steps, clock=clock).loss
        with clock.part("backward"):
            found.backward()
        with clock.part("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found.detach()


def operations(training: Training, batch: Batch) -> dict[str, float]:
    """10^12 operations of a step by part."""
    free = {getattr(torch.ops.aten, one): lambda *_given, **_settings: 0 for one in UNCOUNTED}
    counter, clock = FlopCounterMode(display=False, custom_mapping=free), StepClock(torch.device("cpu"))
    clock._mark = counter.get_total_flops  # type: ignore[method-assign]  # in place of the time
    with counter:
        training.step(batch, clock)
    counted = clock.read()
    return {name: counted[name] / 1e12 for name in PARTS}


def measured(name: str, training: Training, args: argparse.Namespace) -> Row:
    """The row of a kind of texts."""
    device, batch = training.side.target.device, texts(ROWS[name], training.side.target, args)
    clock, found, held = StepClock(device), [], []
    training.restart()
    began = time.perf_counter()
    first_loss = float(training.step(batch, clock))
    first = time.perf_counter() - began
    for _ in range(1 + args.repeats):
        clock.restart()
        training.step(batch, clock)
        found.append(clock.read())
        held.append(peak_memory_bytes(device))
    seconds, tokens = median(one["step"] for one in found[1:]), int(batch.lengths.sum())
    done = operations(training, batch)
    return {
        "row": name,
        "tokens": tokens,
        "positions": batch.input_ids.numel(),
        "ttt_steps": args.steps,
        "seconds_per_step": seconds,
        "parts": {part: median(one[part] for one in found[1:]) for part in PARTS},
        "tokens_per_s": tokens / seconds,
        "first_step_seconds": first,
        "first_loss": first_loss,
        "peak_memory_bytes": max(held[1:]),
        "tflop": done,
        "share_of_peak": sum(done.values()) * 1e12 / seconds / PEAK if device.type == "cuda" else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = gpu_parser(__doc__, 120, repeats=5)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row (default: 2048)")
    parser.add_argument("--texts", type=int, default=2, help="rows of a step (default: 2)")
    parser.add_argument("--steps", type=int, default=7, help="steps of the unroll (default: 7)")
    args = parser.parse_args(argv)
    bench = Bench.of(args)
    subject = Subject.of(args.target, bench.device, PROMPT)
    training = Training(subject.target, subject.draft.token_map.size, args)
    for name in ROWS:
        row = bench.attempt(name, partial(measured, name, training, args), ROW_SECONDS)
        if row is not None:
            bench.rows.append(row | {f"{part}_ms": 1e3 * row["parts"][part] for part in PARTS})
            print(f"{name}: {row['seconds_per_step']:.4g} s a step, first loss {row['first_loss']:.6g}", flush=True)
    show(bench.rows, COLUMNS, subject.name, bench.left_out)
    return bench.leave("training", f"training-gpu-{args.target}", DEFINITIONS)


if __name__ == "__main__":
    sys.exit(main())
