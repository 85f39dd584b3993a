"""Markdown tables of records, one function for each kind of measurement."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from tables import table

from toolkit.bench.bootstrap import LEAST_GROUPS
from toolkit.bench.rows import shape_text
from toolkit.bench.table import NONE, decimal, mode_name, share_text, speedup_text

Record = Mapping[str, Any]
Row = Mapping[str, Any]
ACCEPT_LENGTH = "accept_length (adaptive: of drafted steps alone)"
OF_RIVALS = re.compile(r"(?P<plain>(?!ours).+)-(ngram|eagle3|eagle3-sure)|hf-prompt-lookup(?P<suffix>.*)")


def lines(rows: Iterable[Row], cells: Mapping[str, Callable[[Row], str]]) -> str:
    """A table with a line for each row. cells: by the head of a column, what it says of a row."""
    return table(list(cells), [[cell(row) for cell in cells.values()] for row in rows])


def value(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def named(key: str) -> Callable[[Row], str]:
    return lambda row: f"`{row[key]}`"


def rounded(key: str, digits: int = 2, unit: str = "", scale: float = 1) -> Callable[[Row], str]:
    """A number, or that there is none."""
    return lambda row: decimal(None if row.get(key) is None else scale * row[key], digits) + unit


def with_interval(number: float | None, interval: Sequence[float | None] | None, units: int, unit: str = "") -> str:
    """The number; with its interval where that rests on enough prompts, or groups of prompts."""
    if number is None or interval is None or interval[0] is None or units < LEAST_GROUPS:
        return decimal(number) + (unit if number is not None else "")
    return f"{number:.2f}{unit} [{interval[0]:.2f}, {interval[1]:.2f}]"


def accept_length(row: Row) -> str:
    return with_interval(row["accept_length"], row["interval"], row["prompts"])


def acceptance(record: Record) -> str:
    """Rows over all prompts."""
    both = lambda row: f"{decimal(row['tokens_per_s'], 1)}, {decimal(row['plain_tokens_per_s'], 1)}"  # noqa: E731
    cells = {
        "draft": shape, "prompts": value("prompts"), ACCEPT_LENGTH: accept_length,
        "verify steps": value("verify_steps"),
        "tokens/s, plain": both, "speed": speedup_text, "answers": answers,
    }  # fmt: skip
    return lines((row for row in record["rows"] if row["task"] == "all"), cells)


def shape(row: Row) -> str:
    """The draft of a row with its three parameters."""
    most, kind = f"`{shape_text(row)}`", row["shape"]
    if kind == "adaptive":
        return f"{mode_name(row)}, at most {most}, drafts in {100 * row['drafted_share']:.0f} % of the steps"
    return f"{kind} {most}"


def answers(row: Row) -> str:
    """How many answers are plain decoding's, first part at a near-tie, or part elsewhere."""
    not_judged = row.get("not_judged", 0)
    equal = row["answers"] - row["near_ties"] - row["unequal"] - not_judged
    found = f"{equal} equal, {row['near_ties']} near-tie, {row['unequal']} unequal"
    return f"{found}, {not_judged} not judged" if not_judged else found


def engine(record: Record) -> str:
    """Rows of batch sizes that were timed on more than one group of prompts; on a CPU ours is never compiled."""
    rows = [row for row in record["rows"] if row["prompts"] // row["batch"] > 1]
    rows = [row for row in rows if not re.fullmatch("ours.*-compiled", row["engine"])]  # no engine of today

    def over_plain(row: Row) -> str:
        """Speed over plain decoding with the same options, by all seconds: rivals do not tell prefill apart."""
        drafts = OF_RIVALS.fullmatch(row["engine"])
        name = row["over"] if row["engine"].startswith("ours") else None
        if drafts:
            name = drafts["plain"] or f"hf-generate{drafts['suffix']}"
        same = next((other for other in rows if (other["engine"], other["batch"]) == (name, row["batch"])), None)
        speedup = None if same is None else row["tokens_per_s"] / same["tokens_per_s"]
        return NONE if row["over"] == row["engine"] else speedup_text({"speedup": speedup})

    def over_ours(row: Row) -> str:
        return with_interval(row["speedup"], row["interval"], row["prompts"] // row["batch"], "x")

    cells = {
        "engine": lambda row: f"{row['engine']} {row['version']}" + (f", `{row['shape']}`" if row["shape"] else ""),
        "bits a weight": rounded("weight_bits", 1), "tokens/s": rounded("tokens_per_s", 1),
        "over `ours-plain`": over_ours, "over its own plain row": over_plain, "accept_length": rounded("accept_length"),
        "equal answers": lambda row: NONE if row["near_ties"] is None else f"{row['identical']} of {row['prompts']}",
    }  # fmt: skip
    return lines(rows, cells)


def never_slower(record: Record) -> str:
    """Adaptive drafting's seconds over plain decoding's, per draft, shape and batch size."""
    cells = {
        "draft": value("draft"), "at most": named("shape"), "batch": value("batch"),
        "seconds over plain decoding's": lambda row: with_interval(
            row["ratio"], row["interval"], row["groups"], "x"
        ),
        "drafted steps": lambda row: share_text(row["drafted_steps"]), ACCEPT_LENGTH: rounded("accept_length"),
    }  # fmt: skip
    return lines(record["rows"], cells)


def rollouts(record: Record) -> str:
    """Engines that write rollouts: their time over ours for as many tokens."""
    cells = {
        "engine": value("engine"), "dtype": value("dtype"), "batch": value("batch"),
        "tokens/s": rounded("tokens_per_s", 1),
        "its time over ours": lambda row: with_interval(row["ratio"], row["interval"], row["queues"], "x"),
        "answers equal to ours": lambda row: f"{row['equal']} of {row['answers']}",
    }  # fmt: skip
    return lines(record["rows"], cells)


def products(record: Record) -> str:
    """A step beside its products, by rows."""
    cells = {
        "rows": value("rows"), "products alone, ms": rounded("products_ms"), "a step, ms": rounded("step_ms"),
        "step over products": rounded("step_over_products", unit="x"),
    }  # fmt: skip
    return lines(record["rows"], cells)


def servers(record: Record) -> str:
    """Times, throughput and errors of every server at every number of clients."""
    first, last = rounded("ttft_p50", 1, scale=1000), rounded("ttft_p99", 1, scale=1000)
    cells = {
        "server": named("server"), "clients": value("clients"),
        "first text, p50 and p99, ms": lambda row: f"{first(row)}, {last(row)}",
        "a token, ms": rounded("tpot_p50", 1, scale=1000), "tokens/s": rounded("tokens_per_s", 1),
        "accept_length": rounded("accept_length"), "errors": value("errors"),
        "other texts": rounded("other_texts", 0),
    }  # fmt: skip
    return lines((row for row in record["rows"] if row["server"] != "ours-soak"), cells)  # which is no more


def engine_gpu(record: Record) -> str:
    """Plain and drafted rounds on a GPU, and the parts of a round."""

    def part(*names: str) -> Callable[[Row], str]:
        def milliseconds(row: Row) -> str:
            parts = row["parts"] if row["parts_by"] == "graphs" else {}
            wanted = names or parts.keys() - {"draft", "verify"}
            found = sum(parts.get(name, 0) for name in wanted)
            return f"{1e3 * found:.2f}" if found else NONE

        return milliseconds

    def speed(row: Row) -> str:
        itself = row["engine"] == row["over"]
        return NONE if itself else with_interval(row["speedup"], row["interval"], row["repeats"], "x")

    cells = {
        "engine": named("engine"), "batch": value("batch"),
        "draft shape": lambda row: row["shape"].partition(" ")[2].replace("/", ",") or "plain",
        "ms a round": rounded("round_seconds", scale=1e3), "tokens/s": rounded("tokens_per_s", 1),
        "accept_length": rounded("accept_length"), "speed": speed,
        "of the bandwidth": lambda row: share_text(row["share_of_bandwidth"]),
        "draft, ms": part("draft"), "verify, ms": part("verify"), "rest, ms": part(),
    }  # fmt: skip
    found = ", ".join(f"{1e-12 * rate:.2f} TB/s by a {what}" for what, rate in record["card"]["bytes_per_s"].items())
    return f"{lines(record['rows'], cells)}\nThe card moved {found}.\n"


def deterministic(record: Record) -> str:
    """How many answers are those of the request alone, by schedule, without the option and with it."""
    pairs: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in record["rows"]:
        pairs.setdefault((row["dtype"], row["schedule"]), {})[row["deterministic"]] = row
    bits = " (tokens)" if record["settings"].get("tokens_only") else ""  # no log-probabilities were asked for
    cells = {
        "engine": lambda pair: pair[False]["engine"], "weights": lambda pair: pair[False]["dtype"],
        "schedule": lambda pair: pair[False]["schedule"],
        "same tokens, without": lambda pair: _of(pair[False], pair[False]["requests"] - pair[False]["tokens_unequal"]),
        "same bits, without": lambda pair: _of(pair[False], pair[False]["equal"]) + bits,
        "same bits, with": lambda pair: _of(pair[True], pair[True]["equal"]) + bits,
        "cost": lambda pair: rounded("cost", unit="x")(pair[True]),
    }  # fmt: skip
    return lines(pairs.values(), cells)


def _of(row: Row, count: int) -> str:
    return f"{count} of {row['requests']}"


def few_tokens(record: Record) -> str:
    """Rows over all seeds: each recipe at its best rate."""
    of = ("source", "asked_tokens", "variant")
    one_seed = (row for row in record["rows"] if row["seed"] is not None)
    distinct = {tuple(row[name] for name in of): row["unique_tokens"] for row in one_seed}

    def tried(row: Row) -> str:
        return f"{row['learning_rate']:g}, {row['warmup_ratio']:g} ({row['tries']}{', edge' if row['at_edge'] else ''})"

    def over_published(row: Row) -> str:
        return with_interval(row["accept_length_ratio"], row["accept_length_ratio_interval"], row["prompts"])

    cells = {
        "source": value("source"),
        "tokens (distinct)": lambda row: f"{row['asked_tokens']:,} ({distinct[tuple(row[name] for name in of)]:,})",
        "recipe": value("variant"), "rate, warm-up (of tries)": tried, "seeds": lambda row: str(len(row["seeds"])),
        "accept_length": accept_length, "its ratio to published": over_published,
        "minutes": rounded("seconds", 1, scale=1 / 60),
    }  # fmt: skip
    return lines((row for row in record["rows"] if row["seed"] is None), cells)


def training_step(record: Record) -> str:
    """Seconds and memory of a step, medians over its measurements."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in record["rows"]:
        held = row["peak_memory_bytes"] - row["held_before_bytes"]
        groups.setdefault((row["layout"], row["variant"]), []).append({**row, "held": held})
    of_all = ("tokens", "seconds_per_step", "held")
    rows = [{**some[0], **{name: median(row[name] for row in some) for name in of_all}} for some in groups.values()]
    cells = {
        "step": value("layout"), "recipe": lambda row: "published" if row["variant"] == "published" else "ours",
        "precision": value("precision"), "ids in it": rounded("tokens", 0),
        "features": lambda row: "stored" if "stored" in row["variant"] else "by the target in the step",
        "seconds": rounded("seconds_per_step"),
        "memory beside what is held before": rounded("held", 0, " MB", 1e-6),
    }  # fmt: skip
    return lines(rows, cells)


def cost(record: Record) -> str:
    """The minutes of each stage of a run, and the disk that its features took."""
    stages = {**record["stages"], "together": sum(record["stages"].values())}
    names = {"bench": "measure"}  # as the terminal calls it
    minutes = ", ".join(f"{names.get(stage, stage)} {decimal(seconds / 60, 1)}" for stage, seconds in stages.items())
    return f"minutes: {minutes}; disk of the features: {decimal(record['features_bytes'] / 1e9, 1)} GB"
