"""The memory that each process of a training needs, by part, from the recipe and the target's configuration alone.

Weights and the optimizer's states are counted on models without data. What a step adds follows from the shapes of what
it keeps, and one H100 held as much to 5 % (tests/train/test_needed_memory.py); the target's forward before it takes
less. Under ZeRO-3 a process holds a part of the head's parameters too, and gathers them to run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from toolkit.heads.draft_head import build_head
from toolkit.heads.head_config import HeadConfig
from toolkit.memory import usable_memory
from toolkit.plan.model_size import USUAL_VOCABULARY, count_parameters
from toolkit.recipe import Recipe, RecipeError
from toolkit.targets.cache import fastest_cpu_dtype
from toolkit.targets.facts import TargetFacts, target_facts
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.accelerator import training_device, training_precision
from toolkit.train.draft_head import plan_head
from toolkit.train.loss import LEAST_CHUNK, logits_at_once
from toolkit.train.optimizer import ADAMW_MATRICES
from toolkit.train_settings import OnPolicySettings, TrainSettings

GB = 1e9
USABLE = 0.92  # of the memory: the rest is for CUDA, NCCL and the allocator's gaps
MASTER, MOMENTS = 4, 8  # bytes of a weight's fp32 copy, and of AdamW's two moments
REUSED = 1e9  # DeepSpeed's stage3_max_reuse_distance: weights that so many next ones bring again stay gathered


class Need(NamedTuple):
    """Bytes of one process. always: held from the first step to the last. at_once: added by each phase of a step, and
    by a forecast."""

    always: dict[str, float]
    at_once: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.always.values()) + max(self.at_once.values())


@dataclass(frozen=True)
class TrainingMemory:
    """Trainings for one target. weight: bytes of one of its weights. ids: size of the token map, None: not known yet.
    memory: bytes that each process has, on a GPU or not. bits: of a weight of its layers, and of its experts if they
    differ, as of `weight_bits_of`; None: those of `weight`."""

    facts: TargetFacts
    weight: int
    ids: int | None
    memory: float
    on_gpu: bool = True
    bits: tuple[float, float | None] | None = None

    def needed(self, settings: TrainSettings, processes: int, zero_stage: int = 2) -> Need:
        """settings: with a resolved precision. Raises as `plan_head` does."""
        facts, width = self.facts, {"bf16": 2, "fp32": 4}[settings.precision]
        ids = min(self.ids or USUAL_VOCABULARY, facts.vocab_size)
        plan = plan_head(settings, facts, TokenMap.from_ids(range(ids), facts.vocab_size))
        with torch.device("meta"):
            head = build_head(plan.config)
        frozen = ("lm_head.weight",) if settings.head.lm_head == "frozen" else ()
        trained = {name: one for name, one in head.named_parameters() if name not in frozen}
        updated = sum(one.numel() for one in trained.values())
        by_muon = (one.numel() for name, one in trained.items() if one.dim() == 2 and name not in ADAMW_MATRICES)
        muon = sum(by_muon) if settings.optimizer.name == "muon" else 0
        counts, drafted = count_parameters(facts.config), plan.token_map.size
        bits, of_experts = self.bits or (8 * self.weight, None)
        layers = (counts["body"] * bits + counts["experts"] * (of_experts or bits)) / 8
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", processes))  # those of one machine, as in `frozen_target`
        parts = {"replicated": 1, "sharded": processes, "tensor": neighbours}[settings.target]
        sizes, divided = [one.numel() for one in head.parameters()], zero_stage == 3 and processes > 1
        always = {
            "target": layers / parts + self.weight * (counts["head"] + counts["embedding"]),
            "its draft rows": self.weight * facts.hidden_size * (drafted if drafted < facts.vocab_size else 0),
            "head": width * sum(sizes) / (processes if divided else 1),
            "its fp32 copy": MASTER * updated / processes,
            # Muon's momentum is in the dtype of the gradients, and there twice: DeepSpeed stages each step's.
            "optimizer": (MOMENTS * (updated - muon) + 2 * width * muon) / processes,
        }
        data = settings.data
        share = max(1, data.global_batch // max(1, processes // data.split_rows))
        rows, length = min(data.micro_batch, share), min(data.max_length, facts.max_context or data.max_length)
        # Forecasts read whole rows from all roots. (The regression for a new head holds as much, but no moments yet.)
        whole = [data.micro_batch * length] * settings.unroll.ttt_steps
        length = -(-length // data.split_rows)
        tokens, h = rows * length, plan.config.hidden_size
        later = rows * min(settings.unroll.anchors or length, length)
        full = 0 if plan.config.drafts_at_once else plan.config.mtp_layers
        positions = [tokens if step < full else later for step in range(settings.unroll.ttt_steps)]
        read = width * (plan.config.feature_size + h) + self.weight * facts.hidden_size
        gathered = width * min(sum(sizes), max(REUSED, *sizes)) * divided  # beside the part
        kept: float = tokens * read + gathered
        kept += kept_by_unroll(plan.config, positions, width, checkpointing=settings.unroll.checkpointing)
        kept += width * updated / processes * (share > data.micro_batch)  # gradients of the micro-batches before
        # The states of all steps: as they are cut out, joined, normed, and their gradients.
        states = 4 * width * h * sum(positions)
        matrix = trained["lm_head.weight"].numel() if "lm_head.weight" in trained else 0
        chunk = max(logits_at_once(int(self.memory) if self.on_gpu else 0) // drafted, LEAST_CHUNK)
        logits = min(chunk, sum(positions)) * (width * (drafted + h) + MASTER * drafted / len(positions))
        forecast = kept_by_unroll(plan.config, whole, width, checkpointing=True, gradients=False)
        joined = 3 * width * h * sum(whole)  # its states: as they are cut out, joined and normed
        at_once = {
            "unroll and loss": kept + states + (MASTER + width) * matrix + logits,
            "backward": kept + states + width * (2 * matrix + updated),
            "the optimizer's step": (2 * width + MASTER) * updated / processes,
            "a forecast": whole[0] * read + gathered + max(forecast, joined) + logits,
        }
        return Need(always, at_once)

    def told(self, settings: TrainSettings, processes: int, zero_stage: int = 2) -> str:
        """What a process needs, by part, of how much, and what some settings, each with those before it, make of it."""
        need = self.needed(settings, processes, zero_stage)
        held, added = (", ".join(f"{name} {size / GB:.1f}" for name, size in one.items()) for one in need)
        lines = [
            f"a head for {self.facts.name}, trained by {processes} process(es), needs {need.total / GB:.1f} GB "
            f"in each, and {USABLE:.0%} of {self.memory / GB:.1f} GB may be used",
            f"GB held: {held}",
            f"GB for a time, of which the largest counts: {added}",
        ]
        whole = replace(settings.evaluation, real_every=None)
        shorter = replace(settings.data, micro_batch=1, max_length=max(3, settings.data.max_length // 2))
        fresh = " train.on_policy={}" if settings.on_policy != OnPolicySettings() else ""  # all of its settings go
        changes: dict[str, dict[str, Any]] = {
            f"train.target=sharded train.evaluation.real_every=null{fresh}": {
                "target": "sharded", "evaluation": whole, "on_policy": OnPolicySettings(),
            },
            "train.unroll.checkpointing=true": {"unroll": replace(settings.unroll, checkpointing=True)},
            f"train.data.micro_batch=1 train.data.max_length={shorter.max_length}": {"data": shorter},
        }  # fmt: skip
        for text, change in changes.items():
            settings, before = replace(settings, **change), self.needed(settings, processes, zero_stage).total
            after = self.needed(settings, processes, zero_stage).total
            lines += [f"with {text}: {after / GB:.1f} GB"] if after < before else []
        before, after = (self.needed(settings, processes, stage).total for stage in (zero_stage, 3))
        zero3 = "`toolkit train --config-file recipes/accelerate/zero3.yaml`"  # `toolkit run` has no such option
        lines += [f"with {zero3}: {after / GB:.1f} GB"] if after < before else []
        return "\n  ".join([*lines, "with more processes less: they divide a sharded target and the optimizer"])


def kept_by_unroll(
    config: HeadConfig, positions: list[int], width: int, *, checkpointing: bool, gradients: bool = True
) -> float:
    """Bytes that an unroll keeps with so many positions at each step. width: bytes of a number. gradients: autograd
    keeps all layers of a pass, else it holds one at a time.

    Of a layer: the embedding read, its input (twice H), what attention and MLP add to and read (3 H), the output; query
    and result of the attention, keys and values; gate, up and their products.
    """
    keys = 2 * config.num_key_value_heads * config.head_dim
    of_layer = 6 * config.hidden_size + 2 * config.num_attention_heads * config.head_dim + keys
    each = width * (config.layers if gradients else 1) * (of_layer + 4 * config.intermediate_size)
    if not checkpointing:
        return each * sum(positions)
    at_once = sum(positions) if config.drafts_at_once else max(positions)  # a block drafter has one pass
    return each * at_once + width * (config.hidden_size + config.layers * keys) * sum(positions)


def check_memory(recipe: Recipe, processes: int, zero_stage: int) -> None:
    """Raise `RecipeError`, with the arithmetic, if training needs more memory than this machine has. Loads no weights.

    A checkpoint that is quantised is not checked: what its loader makes of it is unknown here."""
    target, gpu = recipe.target, torch.cuda.is_available()
    facts = target_facts(target.model, target.revision)
    if facts.quantization is not None:
        return
    narrow = facts.dtype == "bfloat16" or (gpu and facts.dtype == "float16")
    weight = {"auto": 2 if narrow else 4, "bfloat16": 2, "float32": 4}[target.dtype]
    if target.dtype == "auto" and narrow and not gpu:
        weight = fastest_cpu_dtype().itemsize
    memory = torch.cuda.get_device_properties(training_device()).total_memory if gpu else usable_memory()
    here = 1 if gpu else int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    settings = replace(recipe.train, precision=training_precision(recipe.train.precision))
    found = TrainingMemory(facts, 1 if target.quantization else weight, recipe.token_map.size, memory / here, gpu)
    if found.needed(settings, processes, zero_stage).total > USABLE * found.memory:
        raise RecipeError(found.told(settings, processes, zero_stage))
