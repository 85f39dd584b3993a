"""A training step on a GPU, by Triton's kernels and by plain torch: seconds, memory, and that the losses agree.

    python benchmarks/training_gpu.py [--target llama] [--length 2048] [--rows 2] [--steps 4] [--device cpu]

The target has random weights (roofline_targets.py: `llama` has the shape of Llama-3.1-8B), and so has the head, over
random texts: seconds and memory are those of a real step, losses mean nothing but that both ways compute the same. No
DeepSpeed: forward of the target, K unrolled steps of the head, backward, fused AdamW. `pytest tests/train/test_loop.py`
runs the trainer itself. Writes benchmarks/results/training-gpu-<target>-<hardware>.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from draft_loss import peak, restart_peak
from results_folder import leave
from roofline_targets import FORCED
from round_parts import Clock

from toolkit.bench.records import make_record
from toolkit.data.batches import Batch, Example, collate
from toolkit.infer.verify.forced import ForcedAcceptance
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train import causal_attention, loss
from toolkit.train.draft_head import plan_head, start_head, trained_head
from toolkit.train.step import TargetSide, micro_step, supervised_counts
from toolkit.train_settings import HeadSettings, OptimizerSettings, TrainSettings, UnrollSettings

PROMPT = 16  # tokens at the start of a row that are not trained on
DEFINITIONS = {
    "by": "triton: the kernels of training, where they run; torch: their definitions in plain PyTorch",
    "seconds_per_step": "target's forward, unroll, backward and AdamW; mean of the steps behind the first",
    "first_step_seconds": "of the first step, compilations included",
    "first_loss": "of the first step, from the same weights and texts for both",
    "peak_memory_bytes": "the most held while the steps behind the first run",
}


@contextmanager
def kernels_off() -> Iterator[None]:
    """Plain torch in the place of Triton."""
    modules = (causal_attention, loss)
    owns = [module.gpu_kernels for module in modules]
    for module in modules:
        module.gpu_kernels = lambda device_type: None  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, own in zip(modules, owns, strict=True):
            module.gpu_kernels = own


def settings_of(args: argparse.Namespace, precision: str) -> TrainSettings:
    return TrainSettings(
        precision=precision,  # type: ignore[arg-type]
        head=HeadSettings(init="random"),
        unroll=UnrollSettings(ttt_steps=args.steps),
        optimizer=OptimizerSettings(name="adamw"),
    )


def texts(target: Target, args: argparse.Namespace) -> Batch:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, target.vocab_size, (args.rows, args.length), generator=generator)
    answered = [False] * PROMPT + [True] * (args.length - PROMPT)
    return collate([Example(str(row), one.tolist(), answered) for row, one in enumerate(ids)], pad_id=0)


def stepper(target: Target, size: int, batch: Batch, args: argparse.Namespace) -> Callable[[], float]:
    """A step of a new head over `size` ids; each call trains once and returns the loss."""
    precision = "bf16" if target.dtype == torch.bfloat16 else "fp32"
    settings = settings_of(args, precision)
    ids = range(0, target.vocab_size, max(1, target.vocab_size // size))
    plan = plan_head(settings, target, TokenMap.from_ids(sorted({*ids, *target.stop_ids}), target.vocab_size))
    side = TargetSide(target, plan.token_map, plan.aux_layer_ids, precision)
    torch.manual_seed(0)
    model = trained_head(plan, settings, start_head(plan, settings, target, seed=0), side.teacher).to(side.head_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    counts = supervised_counts(batch, args.steps, 0)

    def step() -> float:
        found = micro_step(model, side, batch, counts, args.steps, 0).loss
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(found.detach())

    return step


def row_of(by: str, step: Callable[[], float], args: argparse.Namespace, clock: Clock, device: Any) -> dict[str, Any]:
    began = time.perf_counter()
    first_loss = step()
    clock.wait()
    first, began = time.perf_counter() - began, time.perf_counter()
    restart_peak(device)
    for _ in range(args.repeats):
        step()
    clock.wait()
    seconds = (time.perf_counter() - began) / args.repeats
    tokens = args.rows * args.length
    row = {"by": by, "tokens": tokens, "ttt_steps": args.steps, "seconds_per_step": seconds}
    row |= {"tokens_per_s": tokens / seconds, "first_step_seconds": first}
    row |= {"first_loss": first_loss, "peak_memory_bytes": peak(device)}
    print(", ".join(f"{name} {value:.4g}" if value != by else by for name, value in row.items()), flush=True)
    return row


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=tuple(FORCED), default="llama")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row (default: 2048)")
    parser.add_argument("--rows", type=int, default=2, help="rows of a step (default: 2)")
    parser.add_argument("--steps", type=int, default=4, help="steps of the unroll (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps (default: 3)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("training_gpu.py: PyTorch sees no CUDA device here; to see that it runs: --device cpu --target tiny",
              file=sys.stderr)  # fmt: skip
        return 2
    torch.manual_seed(0)
    subject = FORCED[args.target](device, PROMPT, ForcedAcceptance(()))
    batch, size, clock = texts(subject.target, args), subject.draft.token_map.size, Clock(device)
    rows, left_out = [], {}
    for by in ("triton", "torch") if device.type == "cuda" else ("torch",):
        try:
            with kernels_off() if by == "torch" else nullcontext():
                rows.append(row_of(by, stepper(subject.target, size, batch, args), args, clock, device))
        except torch.OutOfMemoryError as error:
            left_out[by] = str(error)[:500]
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    settings["target"] = subject.name
    record = make_record("training", ["python", *sys.argv], settings, rows, left_out=left_out, definitions=DEFINITIONS)
    leave(record, f"training-gpu-{args.target}", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
