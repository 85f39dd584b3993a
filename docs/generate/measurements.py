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

`python docs/generate` writes this page from the records in `benchmarks/results/`: every figure below comes from one of
them. Rows that are slower than plain decoding are shown, too.

## How to read the tables

- **accept_length** is the number of tokens committed per verify step, the target's own token included, so it is at
  least one. The prompt's first token, steps cut off by the end of an answer, and plain steps are not counted. The
  exceptions are rows of vLLM and llama.cpp among the engines: both count cut-off steps too. The value means nothing
  without its draft shape, temperature and number of verify steps, so they stand beside it.
- **A draft shape** has the parameters `num_steps,top_k,num_draft_tokens`: levels, branches of a node, and verified
  nodes, root included. A chain has one branch.
- **Adaptive drafting** drafts in some steps and decodes plainly in others. Its accept_length counts drafted steps
  alone, so it is no measure of speed.
- **Intervals** in brackets are 95 % bootstrap intervals over prompts, or over groups of prompts that are timed
  together. They are shown only where they rest on at least {least} of them; with that few they are still too narrow.
- **Speed** is a ratio within one run, in which all rows answer the same prompts in turns. A draft whose speed over
  plain decoding is below 1x, as it is shown, is marked *slower*. Tokens per second of two records must not be
  compared: machines, and what runs beside a measurement, differ.
- **Answers** are compared with plain decoding's. A prompt with a second turn has two answers, so a table may count
  more answers than prompts. In float32 they are equal. In bfloat16 a verify step of several nodes rounds differently
  from a plain step, so an answer may part from plain decoding's. *Near-tie* counts answers whose first different
  token can be explained by rounding, *unequal* the others, *not judged* sampled ones of bfloat16.
- **Near-ties** are judged by one plain forward over the text before the first different token. Greedy: the logits of
  both tokens are within the rounding of the largest logit. Above temperature zero: the random number that drew the
  token lies in both tokens' intervals of the cumulative distribution, after each interval is widened by the rounding.
  In bfloat16 this widening is large, so an error could pass as a near-tie: sampled answers that differ are not judged
  there. Earlier records, without *not judged*, count them as near-ties, which says little.
- **Instruction flags** decide how much the verified nodes cost. Older records do not have them; the name of the file
  says what the machine had.
- A record of an earlier commit does not have later changes.
"""

TAIL = """
## What has no record

- The speed of training on a GPU, and of real models: [what ran there](performance.md#on-a-gpu).
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


def _greedy(record: Record) -> bool:
    return record["settings"]["temperature"] == 0


DEMO = "acceptance-smollm2-135m-*.json"
FIRST_COMMAND = Section(
    "The demo recipe",
    "What does `toolkit run recipes/smollm2-135m.yaml` get: acceptance, and speed over plain decoding, greedy?",
    DEMO,
    tables.acceptance,
    lambda record: _greedy(record) and not _longer(record),
)
SECTIONS = (
    FIRST_COMMAND,
    Section(
        "The demo with other settings",
        "Do the settings that win at few tokens make a better head of the demo's rollouts?",
        "acceptance-demo-*.json",
        tables.acceptance,
        text="Rollouts, token map and prompts are those of the demo's latest record above. The head is trained by the "
        "settings of *all_tokens* among the heads of few tokens, for half as many epochs.",
    ),
    Section(
        "The longer recipe",
        "What does a longer training of the same target get on benchmarks' prompts, greedy?",
        DEMO,
        tables.acceptance,
        lambda record: _greedy(record) and _longer(record),
        text="The head is trained by the settings of *batch_4* among the heads of few tokens, with one step more "
        "of the unroll.",
    ),
    Section(
        "Sampled answers",
        "What is left of acceptance and speed above temperature zero?",
        DEMO,
        tables.acceptance,
        lambda record: not _greedy(record),
        text="Under `--verify target` the seed decides the answer, drafted or not, up to the first near-tie. Sampled "
        "answers of a tree usually part from plain decoding's in bfloat16: rounding moves the limits of the tokens' "
        "intervals at every token. Near-ties of earlier records are a weak test here, see above.",
    ),
    Section(
        "The engine beside others",
        "How fast does the engine decode beside what else could be picked on a CPU, on the same prompts in turns?",
        "engine-smollm2-135m-*.json",
        tables.engine,
        text="Each engine runs at the settings that its row names. Rivals with `-eagle3` draft a chain by our exported "
        "head, those with `-ngram` by their own lookup. Our own rows hold the head in int8 beside an int8 target, and "
        "wherever our own products multiply it, as users get it; vLLM holds it in bfloat16, llama.cpp in its file's "
        "type. `ours-eagle3-adaptive` drafts by lookup, too, as `toolkit serve` does. The lengths of all other drafts "
        "were set, and tuned for no engine. No prefix cache is used, neither in vLLM nor here. `ours-null` is plain "
        "decoding beside a head that is never asked: it has to come out at 1x, and where its interval lies beside 1x, "
        "all intervals of its batch are widened by as much. Prompts are answered one at a time unless the row names a "
        "larger batch. "
        "Ratios count all seconds, those of reading the prompt among them. A rival that drafts is compared with its "
        "own plain row. Answers are compared with those of our plain row of the same weights; the record "
        "names it. Rows of one group of prompts are left out.",
        command="python benchmarks/engine_cpu.py --draft runs/smollm2-135m/ckpt --torch-compile --quantization int8",
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
        "Beside other work",
        "What is left of decoding, rollouts and training while other processes use the CPUs?",
        "threads-beside-*.json",
        tables.threads,
        text="Tokens per second, of training steps. *all threads*: as many as cores, whatever else runs. *limited*: as "
        "the program runs, with fewer threads while others use the CPUs. *rollouts*: a batch of plain decoding.",
        command="python benchmarks/beside.py",
    ),
    Section(
        "Forecast and engine",
        "Does the accept_length that training forecasts agree with the engine's?",
        "training-forecast-*.json",
        tables.forecast,
        text="*Same answers*: of what the engine wrote, which answers a few prompts. Over the same texts both are "
        "equal in float32; in bfloat16 rounding may move a draft, so the last digit may differ. *Same prompts*: "
        "over the rollouts' answers to them. *All held-out*: of whole answers, to more "
        "prompts, of a chain as deep as the unroll.",
    ),
    Section(
        "Answers of the target or of a file",
        "Do a target's own answers train a better head than those of a file, at as many supervised tokens?",
        "training-on-policy-*.json",
        tables.on_policy,
        text="A step is one answer, so that shorter answers make more steps of as many tokens.",
    ),
    Section(
        "A head on a fine-tuned target",
        "What is a head worth on a fine-tuned copy of its target: as it is, trained further, beside a new head?",
        "adapt-*.json",
        tables.adapt,
        text="The target was fine-tuned on answers of GSM8K. All heads are measured on its answers to held-out "
        "questions of GSM8K. The trainings share rollouts, settings and number of steps.",
        command="python benchmarks/adapt.py DRAFT QUESTIONS --out DIR",
    ),
    Section(
        "Heads of few tokens",
        "How good is a head beside one of the published EAGLE-3 recipe, trained on the same rollouts?",
        "training-few-tokens-*.json",
        tables.few_tokens,
        text="Target: the demo's. A step has one rollout, of *batch_4* four. The drafts are a chain as deep as the "
        "unroll, which has as many steps for all. *published*: random weights, a trained output matrix, AdamW, "
        "answers alone. All others, unless a row's settings say otherwise: weights from the target, its output matrix "
        "frozen, Muon; they learn from prompts and system texts too, whose labels cost no answer. The table of tries "
        "has the further settings of a row. A record with that table alone is a screening: how *all_tokens* does at "
        "the least tokens without one of these stands there (*adamw*, *random_start*, *answers*, *trained_lm_head*). "
        "Tokens are those "
        "of answers, so heads that learn from prompts see more text and take longer at equally many. "
        "*Distinct*: a training that goes on beyond them repeats its rollouts. "
        "Source *self*: prompts that the target wrote (`toolkit run recipes/smollm2-135m.yaml --until token_map` with "
        "more `prompts.synthesize`). *gsm8k*: GSM8K's questions as `prompts.sources`. "
        "The held-out rollouts are cut in two halves. *forecast*: accept_length by replay of their answers, without "
        "the engine. A rate and a warm-up are chosen by it on one half, *of* so "
        "many *tries*; of one try, the rate is another table's choice and may not be the best. The other half is "
        "looked at for the chosen alone. "
        "speculators' own trainer, in the next section, was level with *all_tokens* at the least tokens; it was not "
        "measured at more. The rollouts on which a head's warm start is fitted are among those that it "
        "trains on, and its seconds count. Values are pooled over the verify steps of all seeds. Intervals are 95 % "
        "bootstrap intervals over prompts and seeds, both drawn with replacement; of one seed, over prompts alone, so "
        "they are too narrow. Ratios are paired: both heads have the same prompts and seeds in every draw. *Edge*: the "
        "best rate was the lowest or highest that was tried, so a better one may lie beyond. The rate is the matrices' "
        "(Muon's, or of *published* AdamW's). A command with `--show` puts rows of several days together; without it, "
        "it trains them, but where the note names other commands.",
        command="python benchmarks/few_tokens.py RUN",
    ),
    Section(
        "Heads by other trainers",
        "What do SpecForge's and speculators' own training code make of the same rollouts on a CPU?",
        "training-rivals-*.json",
        tables.training_rivals,
        text="Each at its own defaults, but for the steps of the unroll, those of the table above, and its rate, "
        "which the validation half chose. What keeps them from running on a CPU as they are was replaced; "
        "`benchmarks/training_rivals.py` says what.",
        command="python benchmarks/training_rivals.py SOURCE",
    ),
    Section(
        "A training step",
        "What does a step take beside the published EAGLE-3 recipe's, and what do stored features save?",
        "training-recipes-step-*.json",
        tables.training_step,
        text="Medians where a step was measured several times. The published recipe is written anew here, with dense "
        "attention; SpecForge's own code runs other kernels on a GPU. *ids in it*: a step here has several rollouts. "
        "The heads of few tokens above, *batch_4* apart, have one in a step. There Muon costs as much for a "
        "few ids, and *all_tokens* takes longer than *published*, as the minutes above say.",
    ),
    Section(
        "Memory of the draft loss",
        "Does the memory of the loss grow with tokens times vocabulary?",
        "training-draft-loss-*.json",
        tables.draft_loss,
        text="*naive* keeps all logits, *tiled* is what training runs.",
    ),
    Section(
        "Counting tokens",
        "How much of its tokenizer's own rate does counting the tokens of a text reach, and are the counts exact?",
        "token-map-*.json",
        tables.token_map,
        text="*tokenizer*: it encodes the same documents on as many cores, and counts nothing. *again*: the command "
        "typed a second time counts nothing, so its time is that of starting and of writing files. *resumed*: the "
        "command was killed in its middle and typed again. *weighted*: two corpora with weights beside the repeated "
        "text. *Share*: the tokenizer's seconds over the row's.",
        command="python benchmarks/token_map.py --text FILE",
    ),
    Section(
        "A head and lookup together",
        "What does lookup add to a head, by task, and is the composed drafter ever slower than the better of the two?",
        "composed-batch-*.json",
        tables.composed,
        text="Greedy, one answer a prompt, in turns. *head*, *lookup* and *composed* draft the shape of the command in "
        "every step. *Tokens a step* counts all steps, accept_length those that drafted.",
        command="python benchmarks/composed.py --draft DIR [--batch N]",
    ),
    Section(
        "Drafts under a grammar",
        "What is left of acceptance where answers must match a schema or an expression?",
        "grammar-*.json",
        tables.grammars,
        text="Greedy, float32; every prompt asks for a description as JSON. *accept_length* counts steps in which the "
        "target read drafts, *tokens a step* all steps. *drafts a step*: those that the grammar left.",
        command="python benchmarks/grammar.py --draft DIR",
    ),
    Section(
        "Servers under load",
        "How fast do servers answer one client and several at once, with a head and without, and what does load break?",
        "server-*.json",
        tables.servers,
        text="Greedy; every server answers the same prompts, in turns. *First text*: from sending a request to its "
        "first text; p99 of few requests is the largest. Prompts of several clients were asked before, so a prefix "
        "cache has them. *A token*: mean time of a token after it, median over answers. *Other texts*: complete "
        "answers that are not those of `ours-plain` (near-ties in bfloat16). `ours-soak` has many clients, of which "
        "some leave and some have deadlines, in the process of the clients; its errors are wrong answers.",
        command="python benchmarks/serve.py --draft DIR --soak",
    ),
    Section(
        "The host's share of a round",
        "What does the host do in a recorded round, and does it grow with the context?",
        "host-rounds-*.json",
        tables.host_rounds,
        text="The device's work is left out, so no GPU is needed. *All tables*: what a round would take more if it "
        "uploaded every page table, not the new pages alone.",
        command="python benchmarks/host_rounds.py",
    ),
    Section(
        "The engine on a GPU",
        "What does a round cost at the shape of a model of eight billion parameters, and where does its time go?",
        "engine-gpu-*.json",
        tables.engine_gpu,
        text="Weights are random, the head is one layer, and drafts are accepted by chance, to the accept_length that "
        "`--force-accept-length` says: only times mean anything. A draft shape is `num_steps,top_k,num_draft_tokens`. "
        "Entrants take turns: some rounds after the same prompts, without the reading of the prompts. *eager*: each "
        "kernel is launched by the host; *graph*: rounds are recorded as CUDA graphs; *compiled*: recorded with "
        "compiled layers; `hf-generate-static`: transformers with a static cache, which it compiles by itself; no "
        "other setting of it was tried. *Speed*: tokens a second over the plain row of the same kind; of plain rows, "
        "and of transformers, over `ours-plain-graph`. Few turns give no interval; eager rows vary by a third between "
        "turns. *Of the bandwidth*: bytes that a plain step must read, over its time and the larger rate below. "
        "*draft*, *verify*, *rest*: of a round that is recorded part by part in a second measurement, so that they do "
        "not add up to the first column of times; a row without them had no time left. *rest* is the tree, the choice "
        "of tokens, the moving of keys, the host, and the draws that accept by chance, which a real head does not "
        "need.",
        command="python benchmarks/engine_gpu.py --only llama",
    ),
    Section(
        "Kernels of a round on a GPU",
        "How many kernels does a recorded round launch at that shape, and which take the time?",
        "rounds-*.json",
        tables.rounds_gpu,
        text="*their ms*: the sum of the kernels' times; the rest of a round passes between them. Names that begin "
        "with `nvjet`, and `splitKreduce`, are cuBLAS's products; a name is cut, so it may stand for several kernels. "
        "*apart*: transformers' layers; *fused*: ours, with cuBLAS's products; *skinny*: with our products of few "
        "rows; *dependent*: also launched before the last kernel is over, so that the kernels' times contain waiting.",
        command="python benchmarks/rounds_gpu.py --kernels",
    ),
    Section(
        "Products of few rows on a GPU",
        "How fast does our kernel read the weights of a product of few rows, beside cuBLAS?",
        "products-*.json",
        tables.products_gpu,
        text="Shapes of `Llama-3.1-8B` and of its draft head, by the fastest tile of each; weights rotate through more "
        "than the card's caches hold, launches are recorded. *cublas*: the product alone; *cublas+*: with the "
        "operations that follow, one kernel each; *ours*: they are part of the product; *dependent*: also launched "
        "before the last kernel is over. A chain is the products of all layers, each with its own weights. One byte a"
        " weight: float8.",
        command="python benchmarks/products_gpu.py",
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
        command="bash benchmarks/first_gpu.sh 7",
    ),
    Section(
        "A training step on a GPU",
        "What does a step of training cost at the shape of a model of eight billion parameters, and where does it go?",
        "training-gpu-*.json",
        tables.training_gpu,
        text="Random weights, seven unrolled steps, fused AdamW, no DeepSpeed. *before*: pieces of `2^23` logits in "
        "the loss; *pieces*: larger ones; *automatic*: also the diagonals of the attention in one kernel each way; "
        "*padded*, *packed*: eight ragged texts, one or several a row; *compiled*: the head's layer; *torch*: plain "
        "torch in place of all kernels; *target compiled*: the target's layers too. *Of the peak*: of `989 TFLOP/s`.",
        command="python benchmarks/training_gpu.py",
    ),
    Section(
        "Operations of a round on a GPU",
        "What does each operation take that a recorded round is made of?",
        "gpu-probe-*.json",
        tables.gpu_probe,
        text="Rows and vocabulary stand behind an operation on logits. *graph*: recorded alone, one replay. *eager*: a "
        "call of its own, until the device is done.",
        command="python benchmarks/gpu_probe.py",
    ),
    Section(
        "A search against brute force",
        "Is a forecast the engine's accept_length, and how far from the best is a search's pick?",
        "search-brute-force-*.json",
        tables.brute_force,
        text="Every setting answers the same prompts in turns. In *float32* a forecast must be exact; in *bfloat16* "
        "answers part at near-ties.",
        command="python benchmarks/brute_force.py --draft DIR [--dtype float32]",
    ),
    Section(
        "The same bits",
        "How many answers are those of the same request alone, whatever runs beside it, and what does it cost?",
        "deterministic-*.json",
        tables.deterministic,
        text="*Same bits*: tokens and all log-probabilities are equal; *without* and *with* are `--deterministic` off "
        "and on. Every second request is sampled with a seed. *Cost*: seconds with the option over seconds without, in "
        "the median of `--repeats` turns; of one turn it says little. *refused*: the option does not take that "
        "schedule; `compiled` is compared with compiled answers of the request alone. Other engines answer all "
        "requests greedily, and their tokens alone are compared with their own for the prompt alone; `transformers` "
        "pads at the left.",
        command="python benchmarks/deterministic.py --draft DIR --variants auto int8 --engines toolkit transformers "
        "vllm --vllm-python PATH",
    ),
    Section(
        "Where bits come from",
        "Which operations round a token's numbers by what is computed beside it?",
        "bit-sources-*.json",
        tables.bit_sources,
        text="One prompt and its answer, under each schedule and alone. *parts of N*: the prompt is read N tokens at "
        "a time; *beside N*: in a batch with N other requests. An operation counts where it got a token's numbers with "
        "the same bits as alone and returned others; the share is of all tokens and layers, *first* the earliest. "
        "*none*: no operation of the target's layers did so for this prompt; the output matrix and the draw are not "
        "watched. Compiled schedules are compared with the request alone by the same compiled target.",
        command="python benchmarks/bit_sources.py --draft DIR --variants auto float32 int8",
    ),
    Section(
        "Auxiliary layers read one off",
        "What does it cost to read a head's layer ids in the convention of another project?",
        "acceptance-aux-shift-*.json",
        tables.aux_shift,
        text="Nothing fails with the wrong ids; only acceptance falls. The change is paired by prompt.",
    ),
    Section(
        "Exports read by other projects",
        "Do other projects compute the same from an exported head?",
        "judges-*.json",
        tables.judges,
        text="Modules of the other project read the export; logits, or tokens and accepted drafts, are compared.",
    ),
)


def page(results: Path = RESULTS) -> str:
    """The page. Raises FileNotFoundError for a section without a record, ValueError for a record without a section."""
    shown: set[Path] = set()
    parts, planned = [HEAD.format(least=LEAST_GROUPS)], []
    for section in SECTIONS:
        found = dict(records_of(section, results))
        shown |= found.keys()
        if found:
            parts.append(_section(section, found))
        elif section.command:
            planned.append(
                f"- {section.title}: the program of today is still to be measured, by `{section.command}`.\n"
            )
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


def _section(section: Section, records: Mapping[Path, Record]) -> str:
    intro = " ".join(filter(None, (section.question, section.text)))
    return f"## {section.title}\n\n{intro}\n\n" + "\n".join(
        _measurement(section, path, record) for path, record in records.items()
    )


def _measurement(section: Section, path: Path, record: Record) -> str:
    """One record: where it comes from, what the run took, and its table."""
    facts = [
        f"- {record['date'][:10]}, {_machine(record['hardware'])}, commit `{_commit(record['commit'])}`",
        f"- record `benchmarks/results/{path.name}`, by `{record['command']}`",
    ]
    if record.get("note"):
        facts.append(f"- note: {record['note']}")
    if record.get("stages"):
        facts.append(f"- {tables.cost(record)}")
    return "\n".join(facts) + f"\n\n{section.table(record)}"


def _machine(hardware: Record) -> str:
    flags = " ".join(hardware.get("cpu_flags") or ())
    names = [*hardware["gpus"], hardware["cpu"]]
    flags = f"`{flags}`" if flags else "flags not recorded"
    return f"{', '.join(names)} ({flags}), cores: {hardware['cores']}, torch threads: {hardware['torch_threads']}"


def _commit(commit: str) -> str:
    digest, plus, changes = commit.partition("+")
    return digest[:7] + plus + changes
