"""Markdown tables of records, one function for each kind of measurement."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tables import table

from toolkit.bench.bootstrap import LEAST_GROUPS
from toolkit.bench.rows import shape_text
from toolkit.bench.table import NONE, decimal, mode_name, speedup_text

Record = Mapping[str, Any]
Row = Mapping[str, Any]
ACCEPT_LENGTH = "accept_length (adaptive: of drafted steps alone)"
OF_RIVALS = re.compile(r"(?P<plain>(?!ours).+)-(ngram|eagle3|eagle3-sure)|hf-prompt-lookup(?P<suffix>.*)")


def acceptance(record: Record) -> str:
    """Rows over all prompts."""
    rows = [row for row in record["rows"] if row["task"] == "all"]
    header = ("draft", "prompts", ACCEPT_LENGTH, "verify steps", "tokens/s, plain", "speed", "answers")
    return table(
        header,
        (
            (
                shape(row),
                str(row["prompts"]),
                with_interval(row["accept_length"], row["interval"], row["prompts"]),
                str(row["verify_steps"]),
                f"{decimal(row['tokens_per_s'], 1)}, {decimal(row['plain_tokens_per_s'], 1)}",
                speedup_text(row),
                answers(row),
            )
            for row in rows
        ),
    )


def engine(record: Record) -> str:
    """Rows of batch sizes that were timed on more than one group of prompts; on a CPU ours is never compiled."""
    over = ("over `ours-plain`", "over its own plain row")
    header = ("engine", "bits a weight", "tokens/s", *over, "accept_length")
    rows = [row for row in record["rows"] if row["prompts"] // row["batch"] > 1]
    rows = [row for row in rows if not re.fullmatch("ours.*-compiled", row["engine"])]  # no engine of today
    return table(
        (*header, "equal answers"),
        (
            (
                f"{row['engine']} {row['version']}" + (f", `{row['shape']}`" if row["shape"] else ""),
                decimal(row["weight_bits"], 1),
                decimal(row["tokens_per_s"], 1),
                with_interval(row["speedup"], row["interval"], row["prompts"] // row["batch"], "x"),
                NONE if row["over"] == row["engine"] else speedup_text({"speedup": _over_plain(row, rows)}),
                decimal(row["accept_length"]),
                NONE if row["near_ties"] is None else f"{row['identical']} of {row['prompts']}",
            )
            for row in rows
        ),
    )


def _over_plain(row: Row, rows: Sequence[Row]) -> float | None:
    """Speed over plain decoding with the same options, by all seconds: rivals do not tell prefill apart."""
    drafts = OF_RIVALS.fullmatch(row["engine"])
    name = row["over"] if row["engine"].startswith("ours") else None
    if drafts:
        name = drafts["plain"] or f"hf-generate{drafts['suffix']}"
    same = next((other for other in rows if (other["engine"], other["batch"]) == (name, row["batch"])), None)
    return None if same is None else row["tokens_per_s"] / same["tokens_per_s"]


def never_slower(record: Record) -> str:
    """Adaptive drafting's seconds over plain decoding's, per draft, shape and batch size."""
    header = ("draft", "at most", "batch", "seconds over plain decoding's", "drafted steps", ACCEPT_LENGTH)
    groups = record["settings"]["limit"] // record["settings"]["batch"]
    return table(
        header,
        (
            (
                row["draft"],
                f"`{row['shape']}`",
                str(row["batch"]),
                with_interval(row["ratio"], row["interval"], groups, "x"),
                f"{100 * row['drafted_steps']:.0f} %",
                decimal(row["accept_length"]),
            )
            for row in record["rows"]
            if row["draft"] != "none"
        ),
    )


def rollouts(record: Record) -> str:
    """Engines that write rollouts: their time over ours for as many tokens."""
    header = ("engine", "dtype", "batch", "tokens/s", "its time over ours", "answers equal to ours")
    return table(
        header,
        (
            (
                row["engine"],
                row["dtype"],
                str(row["batch"]),
                decimal(row["tokens_per_s"], 1),
                with_interval(row["ratio"], row["interval"], row["queues"], "x"),
                f"{row['equal']} of {row['answers']}",
            )
            for row in record["rows"]
        ),
    )


def products(record: Record) -> str:
    """A step beside its products, by rows."""
    lines = (
        (
            str(row["rows"]),
            decimal(row["products_ms"]),
            decimal(row["step_ms"]),
            f"{decimal(row['step_over_products'])}x",
        )
        for row in record["rows"]
    )
    return table(("rows", "products alone, ms", "a step, ms", "step over products"), lines)


def servers(record: Record) -> str:
    """Times, throughput and errors of every server at every number of clients."""
    header = ("server", "clients", "first text, p50 and p99, ms", "a token, ms", "tokens/s")
    return table(
        (*header, "accept_length", "errors", "other texts"),
        (
            (
                f"`{row['server']}`",
                str(row["clients"]),
                f"{milliseconds(row['ttft_p50'])}, {milliseconds(row['ttft_p99'])}",
                milliseconds(row["tpot_p50"]),
                decimal(row["tokens_per_s"], 1),
                decimal(row.get("accept_length")),
                str(row["errors"]),
                NONE if row.get("other_texts") is None else str(row["other_texts"]),
            )
            for row in record["rows"]
            if row["server"] != "ours-soak"  # of a measurement that is no more
        ),
    )


def milliseconds(seconds: float | None) -> str:
    return decimal(None if seconds is None else 1000 * seconds, 1)


def engine_gpu(record: Record) -> str:
    """Plain and drafted rounds on a GPU, and the parts of a round."""
    header = ("engine", "batch", "draft shape", "ms a round", "tokens/s", "accept_length", "speed", "of the bandwidth",
              "draft, ms", "verify, ms", "rest, ms")  # fmt: skip
    lines = []
    for row in record["rows"]:
        parts = row["parts"] if row["parts_by"] == "graphs" else {}
        rest = sum(seconds for part, seconds in parts.items() if part not in ("draft", "verify"))
        length, share = row["accept_length"], row["share_of_bandwidth"]
        itself = row["engine"] == row["over"]
        lines.append((
            f"`{row['engine']}`", str(row["batch"]), row["shape"].partition(" ")[2].replace("/", ",") or "plain",
            f"{1e3 * row['round_seconds']:.2f}", decimal(row["tokens_per_s"], 1),
            NONE if length is None else decimal(length),
            NONE if itself else with_interval(row["speedup"], row["interval"], row["repeats"], "x"),
            NONE if share is None else f"{100 * share:.0f} %",
            *(f"{1e3 * one:.2f}" if one else NONE for one in (parts.get("draft"), parts.get("verify"), rest)),
        ))  # fmt: skip
    found = ", ".join(f"{1e-12 * rate:.2f} TB/s by a {what}" for what, rate in record["card"]["bytes_per_s"].items())
    return f"{table(header, lines)}\nThe card moved {found}.\n"


def deterministic(record: Record) -> str:
    """How many answers are those of the request alone, by engine and schedule, without the option and with it."""
    header = ("engine", "weights", "schedule", "same tokens, without", "same bits, without", "same bits, with", "cost")
    pairs: dict[tuple[str, str, str], dict[bool, Row]] = {}
    for row in record["rows"]:
        name = row["engine"] if row["engine"] == "toolkit" else f"{row['engine']} {row['version']}"
        pairs.setdefault((name, row["dtype"], row["schedule"]), {})[row["deterministic"]] = row
    lines = []
    for (engine, dtype, schedule), pair in pairs.items():
        without, with_option = pair[False], pair.get(True)
        bits = NONE if without["engine"] != "toolkit" else _of(without, "equal")
        other = "refused" if with_option is None and bits != NONE else NONE
        cost = NONE
        if with_option is not None:
            other, cost = _of(with_option, "equal"), f"{decimal(with_option['cost'])}x"
        if record["settings"].get("tokens_only"):  # no log-probabilities were asked for
            bits, other = (cell if cell in (NONE, "refused") else f"{cell} (tokens)" for cell in (bits, other))
        tokens = f"{without['requests'] - without['tokens_unequal']} of {without['requests']}"
        lines.append((engine, dtype, schedule, tokens, bits, other, cost))
    return table(header, lines)


def _of(row: Row, key: str) -> str:
    return f"{row[key]} of {row['requests']}"


def few_tokens(record: Record) -> str:
    """Rows over all seeds: each recipe at its best rate and warm-up."""
    header = (
        "source",
        "tokens (distinct)",
        "recipe",
        "rate, warm-up (of tries)",
        "seeds",
        "accept_length",
        "its ratio to published",
    )
    distinct = {
        (row["source"], row["asked_tokens"], row["variant"]): row["unique_tokens"]
        for row in record["rows"]
        if row["seed"] is not None
    }
    return table(
        (*header, "minutes"),
        (
            (
                row["source"],
                f"{row['asked_tokens']:,} ({distinct[row['source'], row['asked_tokens'], row['variant']]:,})",
                row["variant"],
                f"{row['learning_rate']:g}, {row['warmup_ratio']:g} "
                f"({row['tries']}{', edge' if row['at_edge'] else ''})",
                str(len(row["seeds"])),
                with_interval(row["accept_length"], row["interval"], row["prompts"]),
                NONE if ratio is None else with_interval(ratio, row["accept_length_ratio_interval"], row["prompts"]),
                decimal(row["seconds"] / 60, 1),
            )
            for row in record["rows"]
            if row["seed"] is None
            for ratio in (row["accept_length_ratio"],)
        ),
    )


def training_step(record: Record) -> str:
    """Seconds and memory of a step, medians over its measurements."""
    header = ("step", "recipe", "precision", "ids in it", "features", "seconds", "memory beside what is held before")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in record["rows"]:
        groups.setdefault((row["layout"], row["variant"]), []).append(row)
    return table(
        header,
        (
            (
                layout,
                "published" if variant == "published" else "ours",
                rows[0]["precision"],
                f"{median(row['tokens'] for row in rows):.0f}",
                "stored" if "stored" in variant else "by the target in the step",
                decimal(median(row["seconds_per_step"] for row in rows)),
                megabytes(median(row["peak_memory_bytes"] - row["held_before_bytes"] for row in rows)),
            )
            for (layout, variant), rows in groups.items()
        ),
    )


def shape(row: Row) -> str:
    """The draft of a row with its three parameters."""
    if row.get("num_steps") is None:
        return str(row["shape"])
    most, kind = f"`{shape_text(row)}`", row.get("shape", "chain" if row["top_k"] == 1 else "tree")
    if kind == "adaptive":
        return f"{mode_name(row)}, at most {most}, drafts in {100 * row['drafted_share']:.0f} % of the steps"
    return f"{kind} {most}"


def cost(record: Record) -> str:
    """The minutes of each stage of a run, and the disk that its features took."""
    stages = {**record["stages"], "together": sum(record["stages"].values())}
    names = {"bench": "measure"}  # as the terminal calls it
    minutes = ", ".join(f"{names.get(stage, stage)} {decimal(seconds / 60, 1)}" for stage, seconds in stages.items())
    return f"minutes: {minutes}; disk of the features: {decimal(record['features_bytes'] / 1e9, 1)} GB"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB"


def with_interval(value: float | None, interval: Sequence[float | None] | None, units: int, unit: str = "") -> str:
    """The value; with its interval where that rests on enough prompts, or groups of prompts."""
    if value is None or interval is None or interval[0] is None or units < LEAST_GROUPS:
        return decimal(value) + (unit if value is not None else "")
    return f"{value:.2f}{unit} [{interval[0]:.2f}, {interval[1]:.2f}]"


def answers(row: Row) -> str:
    """How many answers are plain decoding's, first part at a near-tie, or part elsewhere."""
    if row["near_ties"] is None:
        return "not compared"
    not_judged = row.get("not_judged", 0)
    equal = row["answers"] - row["near_ties"] - row["unequal"] - not_judged
    found = f"{equal} equal, {row['near_ties']} near-tie, {row['unequal']} unequal"
    return f"{found}, {not_judged} not judged" if not_judged else found
