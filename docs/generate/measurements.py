"""The page of all measurements, written from the records in benchmarks/results. No figure is typed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record_tables as tables

from toolkit.bench.bootstrap import LEAST_GROUPS
from toolkit.bench.records import read_record

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Record = Mapping[str, Any]

HEAD = """# Benchmarks

After this page you can look up a measurement, judge how far to trust it, and repeat it.

`python docs/generate` writes this page from the newest record of each question in `benchmarks/results/`. Rows that are
slower than plain decoding are shown, too. A record has its command, settings and definitions.

## How to read the tables

- **accept_length** is the number of tokens committed per verify step, the target's own token included. The prompt's
  first token, steps cut off by the end of an answer (but not of vLLM and llama.cpp), and plain steps are not counted.
  It means nothing without its draft shape, temperature and number of verify steps.
- **A draft shape** is `num_steps,top_k,num_draft_tokens`: levels, branches of a node, and verified nodes, root
  included. A chain has one branch. Of adaptive drafting, accept_length counts drafted steps alone.
- **Intervals** in brackets are 95 % bootstrap intervals over prompts, or over groups of prompts that are timed
  together, where there are at least {least} of them.
- **Speed** is a ratio within one run, in which all rows answer the same prompts in turns. Tokens per second of two
  records must not be compared: machines, and what runs beside a measurement, differ.
- **Answers** are compared with plain decoding's. In float32 they are equal. In bfloat16 a verify step of several nodes
  rounds differently from a plain step. *Near-tie* counts answers whose first different token can be explained by
  rounding: in one plain forward over the text before it, the logits of both tokens are within the rounding of the
  largest logit. *Unequal* counts the others. Sampled answers of bfloat16 are *not judged*: the random number that drew
  the token may lie in both tokens' intervals after rounding, but so may that of an error.
"""

TAIL = """
## What has no record

- The speed of real models on a GPU: [what ran there](performance.md#on-a-gpu).
"""


@dataclass(frozen=True)
class Section:
    """One question and the records that answer it.

    files: a glob in the results, of which `chosen` takes some. command: what writes the record that is still to be
    measured; a section without it must have a record.
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
        text="Rivals with `-eagle3` draft a chain by our exported head, those with `-ngram` by their own lookup; the "
        "record has the settings of each. `ours-eagle3-adaptive` drafts by lookup, too, as `toolkit serve` does. "
        "`ours-null` is plain decoding beside a head that is never asked: where its interval lies beside 1x, all "
        "intervals of its batch are widened by as much. Ratios count all seconds, those of reading the prompt among "
        "them. A rival that drafts is compared with its own plain row, answers with those of our plain row of the "
        "same weights. A record of before 2026-11-28 does not have the native layer; its rows `ours-*-compiled` used "
        "torch.compile, which a CPU had then.",
        command="python benchmarks/engine_cpu.py --draft runs/smollm2-135m/ckpt --quantization int8 --torch-compile",
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
        "must read, over its time and the larger rate below. Parts are of a second measurement, recorded part by part.",
        command="python benchmarks/engine_gpu.py --only llama",
    ),
    Section(
        "Kernels of a round on a GPU",
        "How many kernels does a recorded round launch at that shape, and which take the time?",
        "rounds-*.json",
        tables.rounds_gpu,
        text="*apart*: transformers' layers; *fused*: ours, with cuBLAS's products; *skinny*: with our products of few "
        "rows; *dependent*: also launched before the last kernel is over, so that kernels' times contain waiting.",
        command="python benchmarks/rounds_gpu.py --kernels",
    ),
    Section(
        "Batches and contexts on a GPU",
        "Where do rounds of that shape become slow, and how fast are prompts read?",
        "cliffs-*.json",
        tables.cliffs_gpu,
        text="One request among eight has log-probabilities or a penalty: such a batch runs eagerly today. A context "
        "has as many tokens as the prompts of the record's settings. *Prefill*: of the whole batch, without a prefix "
        "cache. *Predicted*: from bytes and operations, before the first run.",
        command="python benchmarks/cliffs_gpu.py",
    ),
    Section(
        "The demo's real weights on a GPU",
        "Is the acceptance on a GPU that of a CPU?",
        "gpu-demo-*.json",
        tables.acceptance,
        text="Float32, a weak head of few rollouts. Chain and tree take as many verify steps as on a CPU, and every "
        "answer is plain decoding's. Adaptive drafting chooses by measured time, and runs eagerly on a GPU today.",
        command="toolkit bench acceptance --dtype float32 --shape adaptive 4,1,5 4,4,16",
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
        "A training step on a GPU",
        "What does a step of training cost at the shape of a model of eight billion parameters, and where does it go?",
        "training-gpu-*.json",
        tables.training_gpu,
        text="Random weights, seven unrolled steps, fused AdamW. *before*: pieces of `2^23` logits in the loss; "
        "*automatic*: larger pieces, and the diagonals of the attention in one kernel each way; *padded*, *packed*: "
        "eight ragged texts, one or several a row; *torch*: plain torch. *Of the peak*: of `989 TFLOP/s`.",
        command="python benchmarks/training_gpu.py",
    ),
    Section(
        "Adaptive drafting with a useless head",
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
        "and on. *Cost*: seconds with the option over seconds without. *refused*: the option does not take that "
        "schedule.",
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


def page(results: Path = RESULTS) -> str:
    """The page. Raises FileNotFoundError for a section without a record, ValueError for a record without a section."""
    shown: set[Path] = set()
    parts, planned = [HEAD.format(least=LEAST_GROUPS)], []
    for section in SECTIONS:
        found = list(records_of(section, results))
        shown |= {path for path, _ in found}
        if found:
            parts.append(_section(section, *found[0]))
        elif section.command:
            planned.append(f"- {section.title}: still to be measured, by `{section.command}`.\n")
        else:
            raise FileNotFoundError(f"{results} has no record {section.files} for the section {section.title!r}")
    left = sorted(path.name for path in results.glob("*.json") if path not in shown)
    if left:
        raise ValueError(f"no section shows {', '.join(left)}; add one to docs/generate/measurements.py or delete them")
    return "\n".join(parts) + TAIL + "".join(planned)


def records_of(section: Section, results: Path) -> Iterator[tuple[Path, Record]]:
    """The section's records, the latest first."""
    found = [(path, read_record(path)) for path in results.glob(section.files)]
    chosen = [(path, record) for path, record in found if section.chosen(record)]
    yield from sorted(chosen, key=lambda pair: pair[1]["date"], reverse=True)


def _section(section: Section, path: Path, record: Record) -> str:
    """A question, where its newest record comes from, what the run took, and its table."""
    facts = [
        f"- {record['date'][:10]}, {_machine(record['hardware'])}, commit `{_commit(record['commit'])}`",
        f"- record `benchmarks/results/{path.name}`",
    ]
    if record.get("stages"):
        facts.append(f"- {tables.cost(record)}")
    intro = " ".join(filter(None, (section.question, section.text)))
    return f"## {section.title}\n\n{intro}\n\n" + "\n".join(facts) + f"\n\n{section.table(record)}"


def _machine(hardware: Record) -> str:
    flags = " ".join(hardware.get("cpu_flags") or ())
    names = [*hardware["gpus"], hardware["cpu"]]
    flags = f"`{flags}`" if flags else "flags not recorded"
    return f"{', '.join(names)} ({flags}), cores: {hardware['cores']}, torch threads: {hardware['torch_threads']}"


def _commit(commit: str) -> str:
    digest, plus, changes = commit.partition("+")
    return digest[:7] + plus + changes
