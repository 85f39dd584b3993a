"""The page of all measurements, written from the records in benchmarks/results. No figure is typed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record_tables as tables

from toolkit.bench.bootstrap import LEAST_GROUPS
from toolkit.bench.records import read_record

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Record = Mapping[str, Any]
HEAD = """# Benchmarks

`python docs/generate` writes this page from the newest record of each question in `benchmarks/results/`. 

## How to read the tables

- **accept_length** is the number of tokens committed per verify step, the target's own token included. Plain
  steps and steps cut off by the end of an answer (but not of vLLM and llama.cpp) are not counted.
- **A draft shape** is `num_steps,top_k,num_draft_tokens`: levels, branches of a node, and verified nodes, root
  included. A chain has one branch.
- **Intervals** in brackets are 95 % bootstrap intervals over prompts, or over groups of prompts that are timed
  together, where there are at least {least} of them.
- **Speed** is a ratio within one run, whose rows answer the same prompts in turns. Tokens per second of two records
  must not be compared.
- **Answers** are compared with plain decoding's. In float32 they are equal. In bfloat16 a verify step of several nodes
  rounds differently. *Near-tie* counts answers whose first different token rounding can explain: in one plain forward,
  both tokens' logits are within the rounding of the largest. *Unequal* counts the others. Sampled answers of bfloat16
  are *not judged*.
"""

TAIL = """
## Other records

- Rounds, a training step and the demo on a GPU: [On a GPU](performance.md#on-a-gpu).
"""
# Records of this project's own questions, which other pages tell.
TOLD_ELSEWHERE = (
    "rounds-*.json", "cliffs-*.json", "gpu-demo-*.json", "training-gpu-*.json", "training-kinds-*.json",
    "kinds-*.json", "products-int8-*.json",
    "context-*.json", "start-*.json", "trees-*.json",
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """One question and the records that answer it.

    files: a glob in the results, of which `chosen` takes some. command: what writes the record that is still to be
    measured.
    """

    title: str
    question: str
    files: str
    table: Callable[[Record], str]
    chosen: Callable[[Record], bool] = lambda record: True
    text: str = ""
    command: str = ""


def _longer(record: Record) -> bool:
    return "-full" in record["draft"]["path"]


DEMO = "acceptance-smollm2-135m-*.json"
FIRST_COMMAND = Section(
    "The demo recipe",
    "What does `toolkit run recipes/smollm2-135m.yaml` get: acceptance, and speed over plain decoding, greedy?",
    DEMO,
    tables.acceptance,
    lambda record: not _longer(record),
)
SECTIONS = (
    FIRST_COMMAND,
    Section(
        "The longer recipe",
        "What does a longer training of the same target get on benchmarks' prompts, greedy?",
        DEMO,
        tables.acceptance,
        _longer,
    ),
    Section(
        "The engine beside others",
        "How fast does the engine decode beside what else could be picked on a CPU, on the same prompts in turns?",
        "engine-smollm2-135m-*.json",
        tables.engine,
        text="Rivals with `-eagle3` draft a chain by our exported head, those with `-ngram` by their own lookup. "
        "`ours-eagle3-adaptive` drafts by lookup, too, as `toolkit serve` does. "
        "`ours-null` is plain decoding beside a head that is never asked: where its interval lies beside 1x, all "
        "intervals of its batch are widened by as much. Ratios count all seconds, those of reading the prompt among "
        "them. A rival that drafts is compared with its own plain row, answers with those of our plain row of the "
        "same weights.",
        command="python benchmarks/engine_cpu.py --draft runs/smollm2-135m/ckpt --quantization int8 --torch-compile",
    ),
    Section(
        "A step and its products",
        "How much of a step on a CPU is matrix products?",
        "products-*.json",
        tables.products,
        lambda record: record["settings"]["quantization"] is None,
        command="python benchmarks/products_cpu.py",
    ),
    Section(
        "The engine on a GPU",
        "What does a round cost at the shape of a model of eight billion parameters, and where does its time go?",
        "engine-gpu-*.json",
        tables.engine_gpu,
        text="Weights are random, the head is one layer, and drafts are accepted by chance: only times mean anything. "
        "*eager*: each kernel is launched by the host; *graph*: rounds are recorded as CUDA graphs; *compiled*: "
        "recorded with compiled layers; `hf-generate-static`: transformers with a static cache, which it compiles. "
        "*Speed*: tokens a second over the plain row of the same kind. *Of the bandwidth*: bytes that a plain step "
        "must read, over its time and the larger rate below. These rounds are older than the fused layers, our "
        "products and the float8 head: the [newest ones](performance.md#on-a-gpu) take 5.73 (plain), 6.53 (chain) and "
        "8.09 ms (tree).",
        command="python benchmarks/engine_gpu.py",
    ),
    Section(
        "Servers under load",
        "How fast do servers answer one client and several at once, with a head and without?",
        "server-*.json",
        tables.servers,
        text="Greedy, in turns. *First text*: from sending a request to it. *A token*: mean time of a token "
        "after it, median over answers. *Other texts*: complete answers that are not those of `ours-plain`.",
        command="python benchmarks/serve.py --draft DIR",
    ),
    Section(
        "Heads of few tokens",
        "How good is a head beside one of the published EAGLE-3 recipe, trained on the same rollouts?",
        "training-few-tokens-*.json",
        tables.few_tokens,
        text="Target: the demo's; drafts: a chain as deep as the unroll. *published*: random weights, a trained output "
        "matrix, AdamW, answers alone. All others, but for the settings in the record: weights from the target, its "
        "output matrix frozen, Muon, prompts too; *batch_4* has four rollouts in a step. *Distinct*: a training that "
        "goes on beyond them repeats its rollouts. Rate and warm-up were chosen by the forecast on one half of the "
        "held-out rollouts, *of* so many *tries*; the other half judged the chosen alone. Intervals are over prompts "
        "and seeds; of one seed they are too narrow.",
        command="python benchmarks/few_tokens.py RUN",
    ),
    Section(
        "A training step",
        "What does a step take beside the published EAGLE-3 recipe's, and what do stored features save?",
        "training-recipes-step-*.json",
        tables.training_step,
        text="Medians. The published recipe is written anew here, with dense attention.",
        command="python benchmarks/training.py",
    ),
    Section(
        "Adaptive drafting, also with a useless head",
        "What does adaptive drafting cost where nothing that the head drafts is right, and what does it gain else?",
        "engine-never-slower-*.json",
        tables.never_slower,
        text="Ratios are seconds over plain decoding's: above 1x drafting loses.",
        command="python benchmarks/never_slower.py --draft runs/smollm2-135m/ckpt",
    ),
    Section(
        "The same bits",
        "How many answers are those of the same request alone, whatever runs beside it, and what does it cost?",
        "deterministic-*.json",
        tables.deterministic,
        text="*Same bits*: tokens and all log-probabilities are equal; *without* and *with* are `--deterministic` off "
        "and on. *Cost*: seconds with the option over seconds without.",
        command="python benchmarks/deterministic.py --draft DIR",
    ),
    Section(
        "Rollouts",
        "How fast does the engine write rollouts beside Hugging Face's `generate`, on the same prompts?",
        "rollouts-*.json",
        tables.rollouts,
        text="Above 1x the row takes longer than ours for as many tokens.",
        command="python benchmarks/rollouts.py",
    ),
)


def page() -> str:
    """The page. Raises ValueError for a record without a section."""
    shown = {path for files in TOLD_ELSEWHERE for path in RESULTS.glob(files)}
    parts, planned = [HEAD.format(least=LEAST_GROUPS)], []
    for section in SECTIONS:
        found = records_of(section)
        shown |= {path for path, _ in found}
        if found:
            parts.append(_section(section, *found[0]))
        else:
            planned.append(f"- {section.title}: still to be measured, by `{section.command}`.\n")
    left = sorted(path.name for path in RESULTS.glob("*.json") if path not in shown)
    if left:
        raise ValueError(f"no section shows {', '.join(left)}; add one to docs/generate/measurements.py or delete them")
    return "\n".join(parts) + TAIL + "".join(planned)


def records_of(section: Section) -> list[tuple[Path, Record]]:
    """The section's records, the latest first."""
    found = [(path, read_record(path)) for path in RESULTS.glob(section.files)]
    chosen = [(path, record) for path, record in found if section.chosen(record)]
    return sorted(chosen, key=lambda pair: pair[1]["date"], reverse=True)


def _section(section: Section, path: Path, record: Record) -> str:
    """A question, where its newest record comes from, what the run took, and its table."""
    machine, (digest, plus, changes) = record["hardware"], record["commit"].partition("+")
    names = ", ".join([*machine["gpus"], machine["cpu"]])
    facts = [
        f"- {record['date'][:10]}, {names} (`{' '.join(machine['cpu_flags'])}`), cores: {machine['cores']}, "
        f"torch threads: {machine['torch_threads']}, commit `{digest[:7]}{plus}{changes}`",
        f"- record `benchmarks/results/{path.name}`",
    ]
    if record.get("stages"):
        facts.append(f"- {tables.cost(record)}")
    intro = " ".join(filter(None, (section.question, section.text)))
    return f"## {section.title}\n\n{intro}\n\n" + "\n".join(facts) + f"\n\n{section.table(record)}"
