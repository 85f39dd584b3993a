"""SpecForge's and speculators' own EAGLE-3 training code on the rollouts of `few_tokens.py`: step time, memory, heads.

    python benchmarks/training_rivals.py few_tokens-sources/NAME [--rivals speculators specforge] [--tokens 50000]

Needs their packages beside ours, without what they pin (SpecForge: sglang and another torch):

    pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 yunchang loguru pydantic-settings

NAME is a source that few_tokens.py has prepared. Both read our stored features of its rollouts, in our order, one a
step, at their own defaults but for two: the rate, chosen among --rates by the forecast on the validation half, and the
steps of the unroll, the recipe's 4 as in few_tokens.py (SpecForge's default is 7, speculators' 3). Our importer reads
what they saved; the test half sees the chosen head alone. Seconds are those of steps. Heads are kept for another try.

Neither runs on a CPU as it is. Replaced, and nothing else: of SpecForge the Triton kernel of the loss, by the plain
definition in the same file, and its FSDP wrapper is left out (its own wrap=False); of speculators the device, which it
takes to be a number, and its fused loss, by --loss-implementation eager. Attention is SpecForge's own "sdpa" and
speculators' "eager": PyTorch's flex attention has no backward on a CPU. Nothing is compiled (TORCH_COMPILE_DISABLE=1):
both would compile parts anew for every length, minutes a step.
Writes benchmarks/results/training-rivals-<hardware>.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from draft_loss import peak, restart_peak
from results_folder import leave
from rich.console import Console
from rich.table import Table
from torch import Tensor
from training_cells import cell_of
from training_jobs import (
    DEFINITIONS,
    TEST,
    VALIDATION,
    Job,
    batches_until,
    benched,
    in_process_of_its_own,
    judged,
    keep_what_it_took,
    trainer_of,
    what_it_took,
)
from training_published import published_settings, shifted

from toolkit.bench.records import command_line, make_record
from toolkit.bench.table import decimal
from toolkit.checkpoint.open_head import open_head
from toolkit.recipe import DEMO_RECIPE, Recipe, load_recipe
from toolkit.targets.load import load_config
from toolkit.targets.target import Target
from toolkit.threads import users_threads


@dataclass(frozen=True)
class Training:
    """What a rival is given. ours: the product's trainer, whose target, data and features it reads; batches: indices of
    each step's rollouts; folder: where its checkpoint goes. took: appended to, seconds of each step."""

    ours: Any
    batches: list[list[int]]
    rate: float
    folder: Path
    took: list[float]

    @property
    def dtype(self) -> torch.dtype:
        return self.ours.side.head_dtype

    def inputs(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids and response [B, L], the features [B, L, 3H] and the last state after the final norm [B, L, H]."""
        batch = self.ours._collate(indices)
        with torch.no_grad():
            features = self.ours.side.features(batch)
        return batch.input_ids, batch.response, features.aux.to(self.dtype), features.last.to(self.dtype)


def specforge(training: Training) -> None:
    from specforge.optimizer import BF16Optimizer

    model = specforge_model(training.ours, training.dtype)
    optimizer = BF16Optimizer(model.draft_model, lr=training.rate, total_steps=len(training.batches))
    for indices in training.batches:
        given = training.inputs(indices)
        began = time.perf_counter()
        specforge_loss(model, training.ours.target, *given).backward()
        optimizer.step()
        training.took.append(time.perf_counter() - began)
    model.draft_model.save_pretrained(training.folder)


def specforge_model(ours: Any, dtype: torch.dtype) -> Any:
    """Its unroll and loss around its draft module, with random weights and the target's embedding. ours: as of
    `Training`."""
    from specforge.algorithms.eagle3 import model as theirs
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    theirs.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    draft = LlamaForCausalLMEagle3(LlamaConfig(**layer(ours), architectures=["LlamaForCausalLMEagle3"]))
    draft.embed_tokens.weight.data.copy_(ours.target.embed_tokens.weight)
    draft.embed_tokens.weight.requires_grad_(False)
    token_map = ours.plan.token_map
    draft.t2d.copy_(token_map.t2d)
    draft.d2t.copy_(token_map.ids - torch.arange(token_map.size))
    draft = draft.to(dtype)  # as it does itself; its optimizer keeps fp32 copies
    return theirs.OnlineEagle3Model(draft, length=ours.settings.unroll.ttt_steps, attention_backend="sdpa")


def specforge_loss(model: Any, target: Target, ids: Tensor, response: Tensor, aux: Tensor, last: Tensor) -> Tensor:
    """The loss of a batch of rows without padding; arguments as `Training.inputs` gives them. The mask is that of its
    data code, which leaves out the last id."""
    with torch.no_grad():
        scores = target.logits(last.to(target.dtype)).float()
    mask = response.long()
    mask[:, -1] = 0
    losses = model(
        input_ids=shifted(ids),
        attention_mask=torch.ones_like(mask),
        target=shifted(scores),
        loss_mask=mask[..., None],
        hidden_states=aux,
    )[0]
    return sum((0.8**step * loss for step, loss in enumerate(losses)), torch.zeros(()))


def speculators(training: Training) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import trainer as theirs
    from speculators.train.data import CollateFn
    from transformers import LlamaConfig

    theirs.get_local_rank = lambda: torch.device("cpu")
    ours, count = training.ours, len(training.batches)
    token_map = ours.plan.token_map
    of_loss = {"ttt_steps": ours.settings.unroll.ttt_steps, "ttt_step_loss_decay": 1.0}
    model = Eagle3DraftModel.from_training_args(
        LlamaConfig(**layer(ours)),
        t2d=token_map.t2d,
        d2t=token_map.ids - torch.arange(token_map.size),
        draft_vocab_size=token_map.size,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        draft_attn_impl="eager",
        target_layer_ids=list(ours.plan.aux_layer_ids),
        verifier_name_or_path=load_config(ours.target.name)[1],
        **of_loss,
    )
    model.verifier_norm = torch.nn.Identity()  # our last states are after it
    calls, _ = Eagle3DraftModel.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", **of_loss)

    class Loader:
        batch_sampler = None

        def __len__(self) -> int:
            return count

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for indices in training.batches:
                samples = [self.sample(index) for index in indices]
                together = CollateFn(
                    sum(len(one["input_ids"]) - 1 for one in samples), 0, 3, training.dtype, shift_batch
                )
                batch = together(samples)
                began = time.perf_counter()
                yield batch
                training.took.append(time.perf_counter() - began)

        def sample(self, index: int) -> dict[str, Any]:
            ids, response, aux, last = (one[0] for one in training.inputs([index]))
            sizes = {"lengths": torch.tensor([len(ids)]), "position_ids": torch.arange(len(ids))}
            states = {"hidden_states": aux, "verifier_last_hidden_states": last}
            return {"input_ids": ids, "loss_mask": response, **states, **sizes}

    config = theirs.TrainerConfig(
        lr=training.rate,
        muon_lr=training.rate,
        optimizer="muon",
        num_epochs=1,
        save_path=str(training.folder / "theirs"),
        train_call_kwargs=calls,
        hidden_states_dtype=training.dtype,
        log_freq=10**9,
    )
    trainer = theirs.Trainer(model, config, Loader())  # type: ignore[arg-type]
    trainer.device_type = "cpu"
    trainer.global_step = 1  # a step that it logs synchronises a GPU
    trainer.train_epoch(0)
    model.save_pretrained(training.folder)


def layer(ours: Any) -> dict[str, Any]:
    """Sizes of the head that both train, in transformers' names. ours: as of `Training`."""
    config = ours.plan.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(config, name) for name in (*names, "vocab_size", "rms_norm_eps", "rope_parameters")}
    return sizes | {
        "draft_vocab_size": ours.plan.token_map.size,
        "max_position_embeddings": ours.target.max_context,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }


RIVALS: dict[str, Callable[[Training], None]] = {"speculators": speculators, "specforge": specforge}


def work(rival: str, job: Job, rate: float) -> dict[str, Any]:
    """The row of one training, judged by the validation half; the checkpoint is at job.head. Once that is there: by the
    test half."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.recipe.seed)
    assert job.head is not None, "it is read back"
    row: dict[str, Any] = {"rival": rival, "version": version(rival), "learning_rate": rate, "seed": job.recipe.seed}
    with tempfile.TemporaryDirectory() as name:
        ours = trainer_of("published", job.recipe, benched(job), job.run, Path(name))
        if (took := what_it_took(job.head)) is None:
            shutil.rmtree(job.head, ignore_errors=True)  # cut off while it was saved
            order, of_data = batches_until(ours, job.tokens)
            held = restart_peak(ours.target.device)
            training = Training(ours, order, rate, job.head, [])
            RIVALS[rival](training)
            took = of_data | {
                "steps": len(order),
                "seconds_per_step": sum(training.took) / len(order),
                "seconds": sum(training.took),
                "peak_memory_bytes": peak(ours.target.device),
                "held_before_bytes": held,
            }
            keep_what_it_took(job.head, took)
        row |= took
        draft = open_head(job.head, target=ours.target.name)
        device = ours.target.device
        return row | judged(job, ours, lambda dtype: draft.head.cast(device, dtype).eval().requires_grad_(False))


def best_of(rival: str, args: argparse.Namespace, recipe: Recipe) -> list[dict[str, Any]]:
    """The rows of all rates, and of the best one's test."""
    recipe = replace(recipe, train=published_settings(recipe.train))
    sizes = args.prompts, args.max_tokens, args.threads

    def row_at(rate: float, split: str) -> dict[str, Any]:
        job = Job(f"{rival}-{version(rival)}", recipe, args.source, args.tokens, split, *sizes)
        job = cell_of(rival, job, rate, recipe.train.optimizer.warmup_ratio).job
        assert job.head is not None, "cells keep theirs"
        row = {"source": args.source.name}
        row |= in_process_of_its_own(work, rival, replace(job, head=job.head.with_suffix("")), rate)
        print(f"{row}", file=sys.stderr, flush=True)
        return row

    rows = [row_at(rate, VALIDATION) for rate in args.rates]
    return [*rows, row_at(max(rows, key=lambda row: row["forecast"])["learning_rate"], TEST)]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line a training, and one for each test."""
    table = Table(title="heads of other trainers, greedy, a chain of 4", title_justify="left")
    for column in ("rival", "rate", "half", "accept_length", "forecast", "s/step", "of the step, MB"):
        table.add_column(column, justify="right")
    for row in rows:
        values = (decimal(row[name]) for name in ("accept_length", "forecast", "seconds_per_step"))
        memory = (row["peak_memory_bytes"] - row["held_before_bytes"]) / 1e6
        table.add_row(row["rival"], f"{row['learning_rate']:g}", row["split"], *values, f"{memory:.0f}")
    Console(width=110).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder that few_tokens.py prepared")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the recipe's")
    parser.add_argument(
        "--recipe", default=None, help="of target, data and train.unroll.ttt_steps (default: the demo's)"
    )
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--tokens", type=int, default=50_000, help="supervised, seen")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 2e-3, 5e-3], help="tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=64, help="of the test half that the engine answers, at most")
    parser.add_argument("--max-tokens", type=int, default=96, help="of the engine's answers")
    parser.add_argument("--note", help="what else the machine did, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    args.threads = int(users_threads() or 1)
    return args


def main() -> int:
    args = arguments()
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # before the processes of the trainings import PyTorch
    recipe = load_recipe(args.recipe or DEMO_RECIPE, ["train.data.features=offline", *args.overrides])
    if recipe.train.data.global_batch != 1:
        raise SystemExit(f"train.data.global_batch is {recipe.train.data.global_batch}; here a step has one rollout, 1")
    recipe = replace(recipe, seed=args.seed)
    rows = [row for rival in args.rivals for row in best_of(rival, args, recipe)]
    names = ("rivals", "tokens", "rates", "prompts", "max_tokens", "threads")
    settings = {name: getattr(args, name) for name in names} | {
        "source": args.source.name,
        "recipe": recipe.name,
        "target": recipe.target.model,
    }
    command = f"python benchmarks/{command_line()}"
    record = make_record("training", command, settings, rows, definitions=DEFINITIONS, note=args.note)
    show(rows)
    leave(record, "training-rivals", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
