"""Steps of training on a CUDA device that is not there."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from tests.conftest import build_target
from tests.pretend_cuda.device import pretended_cuda
from tests.pretend_cuda.kernels import training_on_references
from tests.pretend_cuda.seen import seen
from toolkit.data.batches import Batch, Example, collate
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train import loss
from toolkit.train.draft_head import anchors_of, plan_head, start_head, trained_head
from toolkit.train.optimizer import build_optimizer
from toolkit.train.step import micro_step, supervised_counts
from toolkit.train.target_side import TargetSide, TeacherRows
from toolkit.train_settings import HeadSettings, OptimizerSettings, TrainSettings, UnrollSettings

K, STEPS = 3, 2
KERNELS = ("_score_rows", "_forward", "_queries_part", "_keys_part", "_merge", "_merge_queries", "_merge_keys")
HEADS = {
    "eagle3": HeadSettings(),
    "eagle2": HeadSettings(kind="eagle2"),
    "mtp": HeadSettings(kind="mtp", layers=2),
}
UNROLLS = {
    "": UnrollSettings(ttt_steps=K),
    "pack": UnrollSettings(ttt_steps=K),
    "anchors": UnrollSettings(ttt_steps=K, anchors=4),
}


def batch_of(vocabulary: int, pack: bool) -> Batch:
    """Six ragged texts of random tokens."""
    generator, examples = torch.Generator().manual_seed(5), []
    for number, length in enumerate((9, 21, 6, 12, 5, 4)):
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        prompt = 1 + number % 2
        examples.append(Example(str(number), ids, [False] * prompt + [True] * (length - prompt)))
    return collate(examples, pad_id=0, pack=pack)


@dataclass(frozen=True)
class Trained:
    """losses: of each optimizer step, by unroll step. weights: all in a row. waits (reads, uploads), launches:
    of the last step."""

    losses: list[list[float]]
    weights: torch.Tensor
    waits: dict[str, int]
    launches: dict[str, int]


def train(case: str, precision: str, target: Target) -> Trained:
    """STEPS steps from random weights."""
    head_name, _, unroll_name = case.partition(",")
    settings = TrainSettings(
        head=HEADS[head_name], unroll=UNROLLS[unroll_name], optimizer=OptimizerSettings(name="adamw"),
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip
    plan = plan_head(settings, target, TokenMap.from_ids(range(0, target.vocab_size, 2), target.vocab_size))
    side = TargetSide(target, plan.token_map, plan.aux_layer_ids, precision)
    model = trained_head(plan, settings, start_head(plan, settings, target, seed=0), side.teacher)
    model = model.to(side.head_dtype)
    optimizer = build_optimizer(model.head, settings)
    batch = batch_of(target.vocab_size, unroll_name == "pack")
    counts, losses = supervised_counts(batch, K).clamp(min=1), []
    for step in range(STEPS):
        seen.clear()  # what is left in the end is the last step's
        loss, by_step, *_ = micro_step(model, side, batch, counts, K, anchors_of(plan, settings, 0, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(by_step)
    waits, launches = {**seen.reads, **seen.uploads}, dict(seen.launches)
    side.capture.remove()
    weights = torch.cat([one.detach().flatten().float() for one in model.head.parameters()])
    return Trained([one.tolist() for one in losses], weights.cpu(), waits, launches)


def compare_training(case: str) -> dict[str, dict[str, Any]]:
    """By precision, how far losses and trained weights are from the CPU's (relative), what the last step read and
    uploaded, how much it launched, and which of the package's kernels."""
    host, found = build_target(), {}
    wanted = {precision: train(case, precision, host) for precision in ("fp32", "bf16")}
    with pretended_cuda(), training_on_references():
        target = replace(host, model=copy.deepcopy(host.model).to("cuda"))
        for precision, theirs in wanted.items():
            ours = train(case, precision, target)
            mine, own = (torch.tensor(one.losses, dtype=torch.float64) for one in (ours, theirs))
            found[precision] = {
                "losses": ((mine - own).abs() / own.abs()).max().item(),
                "weights": ((ours.weights - theirs.weights).norm() / theirs.weights.norm()).item(),
                "waits": ours.waits,
                "launches": sum(ours.launches.values()),
                "kernels": [name for name in KERNELS if name in ours.launches],
            }
    return found


def loss_bytes() -> dict[str, float]:
    """Bytes that the loss of 4,096 tokens (K = 7, 32,000 draft ids, 4,096 wide, bf16) is given and makes, over those of
    its logits. By logits of a chunk: a CPU's, and those of a GPU of 80 GB. All sizes are an eighth of these."""
    rows, ids, width, scale = 4096 * 7 // 8, 32_000 // 8, 4096 // 8, 64
    generator, found = torch.Generator().manual_seed(3), {}
    states, matrix, teacher = (
        torch.randn(n, width, generator=generator).bfloat16() for n in (rows, ids, rows // 7)
    )  # fmt: skip
    with pretended_cuda(), training_on_references(), patch.object(loss, "LEAST_CHUNK", 8):
        states, matrix, teacher = (one.to("cuda").requires_grad_() for one in (states, matrix, teacher))
        there = TeacherRows(teacher.detach(), *[torch.zeros(len(teacher), device="cuda").long()] * 2,
                            lambda part: (part @ matrix.detach().T).softmax(-1, dtype=torch.float32))  # fmt: skip
        for memory in (0, 80 * 2**30):
            task = loss.DraftLoss("soft_cross_entropy", there, torch.arange(rows) // 7,
                                  torch.zeros(rows, device="cuda").long(), torch.ones(rows, device="cuda"))  # fmt: skip
            with patch.object(loss, "chunk_logits", lambda _, n=memory: loss.logits_at_once(n) // scale):
                seen.clear()
                task(states, matrix)[0].backward()
            found[str(loss.logits_at_once(memory))] = round(seen.bytes / (rows * ids * 2), 2)
    return found
