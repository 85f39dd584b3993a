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
LONGEST_KERNELS = 8  # of a round, named
TASK_PROMPTS = 20  # tasks of fewer prompts have no row of their own
OF_RIVALS = re.compile(r"(?P<plain>(?!ours).+)-(ngram|eagle3|eagle3-sure)|hf-prompt-lookup(?P<suffix>.*)")


def acceptance(record: Record) -> str:
    """Rows over all prompts, and those of tasks with enough prompts."""
    rows = [row for row in record["rows"] if row["task"] == "all" or row["prompts"] >= TASK_PROMPTS]
    header = ("draft", "prompts", "temperature", ACCEPT_LENGTH, "verify steps", "tokens/s, plain", "speed", "answers")
    return table(
        header,
        (
            (
                shape(row),
                f"{row['prompts']} ({row['task']})",
                f"{row['temperature']:g}",
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
    """Rows of batch sizes that were timed on more than one group of prompts."""
    over = ("over `ours-plain`", "over plain decoding with the same options")
    header = ("engine", "settings", "bits a weight", "batch", "tokens/s", *over, ACCEPT_LENGTH)
    rows = [row for row in record["rows"] if row["prompts"] // row["batch"] > 1]
    return table(
        (*header, "answers"),
        (
            (
                f"{row['engine']} {row['version']}" + (f", `{row['shape']}`" if row["shape"] else ""),
                row.get("settings", "not recorded"),
                decimal(row["weight_bits"], 1),
                str(row["batch"]),
                decimal(row["tokens_per_s"], 1),
                with_interval(row["speedup"], row["interval"], row["prompts"] // row["batch"], "x"),
                NONE if row["over"] == row["engine"] else speedup_text({"speedup": _over_plain(row, rows)}),
                decimal(row["accept_length"]),
                answers({"answers": row["prompts"], **row}),
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


def threads(record: Record) -> str:
    """Tokens or steps per second by what runs beside them: all threads, one, and as many as the limit allows."""
    header = ("work", "busy processes beside it", "all threads", "one thread", "limited", "limited over one")
    found = {(row["work"], row["beside"], row["threads"]): row["per_s"] for row in record["rows"]}
    places = dict.fromkeys((row["work"], row["beside"]) for row in record["rows"])
    lines = []
    for place in places:
        every, one, limited = (found[*place, mode] for mode in ("all", "one", "limited"))
        lines.append((*place, *(decimal(value, 1) for value in (every, one, limited)), f"{limited / one:.2f}x"))
    return table(header, lines)


def forecast(record: Record) -> str:
    """Forecasts of a chain beside the engine's value, by step of the training."""
    header = ("step", "draft", "the engine's accept_length", "verify steps")
    header += ("forecast, same answers", "same prompts", "all held-out")
    lines = []
    for row in record["rows"]:
        for real in row["real"]:
            if real["forecast_on_rollouts"] is not None:
                engines = with_interval(real["accept_length"], real["interval"], LEAST_GROUPS)
                whole = with_interval(row["forecast_all_held_out"], row["forecast_interval"], LEAST_GROUPS)
                steps, replays = str(real["verify_steps"]), ("forecast_on_answers", "forecast_on_rollouts")
                same = (decimal(real[name]) for name in replays)
                lines.append((str(row["step"]), real["name"], engines, steps, *same, whole))
    return table(header, lines)


def on_policy(record: Record) -> str:
    """accept_length and forecast of heads trained on each kind of answers."""
    return _heads(record, "answers", {"on-policy": "the target's", "off-policy": "the file's"})


def adapt(record: Record) -> str:
    """accept_length and forecast on a fine-tuned target: of the head as it is, trained further, and of a new head."""
    names = {"old": "the old head as it is", "adapted": "trained from the old head", "new": "a new head"}
    return _heads(record, "head", names)


def _heads(record: Record, what: str, names: Mapping[str, str]) -> str:
    """A row for each head; names: what a variant is called."""
    header = (what, "seed", "supervised tokens", "steps", "accept_length", "draft", "verify steps", "forecast")
    return table(
        header,
        (
            (
                names[row["variant"]],
                str(row["seed"]) if row["steps"] else "",
                str(row["tokens"]),
                str(row["steps"]),
                with_interval(row["accept_length"], row["interval"], row["prompts"]),
                f"{shape(row)}, temperature {row['temperature']:g}",
                str(row["verify_steps"]),
                with_interval(row["forecast"], row["forecast_interval"], row["prompts"]),
            )
            for row in record["rows"]
        ),
    )


def token_map(record: Record) -> str:
    """Seconds of counting beside those of the tokenizer, and whether counts are equal."""
    shares = ("share", "share of counting alone", "by processor time")
    header = ("what", "tokens", "seconds", "processor seconds", *shares, "counts")
    return table(
        header,
        (
            (
                row["variant"],
                str(row["tokens"]),
                decimal(row["seconds"], 1),
                decimal(row["processor_seconds"], 1),
                *(decimal(row.get(name)) for name in ("share", "share_of_counting", "share_of_processor")),
                {None: NONE, True: "equal", False: "not equal"}[row.get("equal")]
                + (f", {row['kept_shards']} of {row['shards']} shards kept" if "kept_shards" in row else ""),
            )
            for row in record["rows"]
        ),
    )


def map_sizes(record: Record) -> str:
    """Every size of a map: what it covers, drafting time, acceptance and speed, predicted and measured."""
    header = ("rows", "covers", "drafting, ms", "accept_length", "predicted", "over plain decoding", "predicted")
    return table(
        header,
        (
            (
                row["name"] + (" (chosen)" if row["name"] == record["auto"] else ""),
                NONE if row["coverage"] is None else f"{100 * row['coverage']:.1f} %",
                decimal(1000 * row["head_seconds"], 2),
                *(decimal(row[name]) for name in ("accept_length", "predicted_accept_length")),
                *(f"{decimal(row[name])}x" if row[name] else NONE for name in ("speedup", "predicted_speedup")),
            )
            for row in record["rows"]
            if row["predicted_speedup"] is not None
        ),
    )


def composed(record: Record) -> str:
    """A head, lookup and both, by task; and the composed drafter over the better of the two."""
    header = ("task", "drafter", "accept_length", "tokens a step", "over plain decoding", "answers equal")
    rows = (
        (
            row["task"],
            row["method"],
            NONE if row["accept_length"] is None else decimal(row["accept_length"]),
            decimal(row["tokens_per_step"]),
            with_interval(row["speedup"], row["interval"], LEAST_GROUPS, "x"),
            f"{row['answers_equal']} of {row['answers']}",
        )
        for row in record["rows"]
        if row["method"] != "plain"
    )
    ratios = (f"{task} {decimal(ratio)}" for task, ratio in record["never_slower"].items())
    return f"{table(header, rows)}\nAdaptive, composed over the better of head and lookup: {', '.join(ratios)}.\n"


def grammars(record: Record) -> str:
    """Acceptance under each grammar and without one, by shape."""
    header = (
        "draft shape",
        "grammar",
        "accept_length",
        "verify steps",
        "tokens a step",
        "drafts a step",
        "equal to plain",
    )
    rows = (
        (
            shape(row),
            row["grammar"],
            decimal(row["accept_length"]),
            str(row["verify_steps"]),
            decimal(row["tokens_per_step"]),
            decimal(row["offered"]),
            f"{row['equal']} of {row['prompts']}",
        )
        for row in record["rows"]
    )
    return table(header, rows)


def servers(record: Record) -> str:
    """Times, throughput and errors of every server at every number of clients, and what has no row."""
    header = ("server", "settings", "clients", "requests", "first text, p50 and p99, ms", "a token, ms", "tokens/s")
    rows = table(
        (*header, "accept_length", "errors", "other texts", "left"),
        (
            (
                f"`{row['server']}`",
                row["settings"],
                str(row["clients"]),
                str(row["requests"]),
                f"{milliseconds(row['ttft_p50'])}, {milliseconds(row['ttft_p99'])}",
                milliseconds(row["tpot_p50"]),
                decimal(row["tokens_per_s"], 1),
                decimal(row.get("accept_length")),
                str(row["errors"]),
                NONE if row.get("other_texts") is None else str(row["other_texts"]),
                _left(row),
            )
            for row in record["rows"]
        ),
    )
    missing = [f"No row of {name}: {why}." for name, why in (record.get("left_out") or {}).items()]
    return "\n\n".join([rows.rstrip(), *missing]) + "\n"


def _left(row: Row) -> str:
    """What a server holds after its last client."""
    if row["leaked_pages"] is None:
        return NONE
    growth = megabytes(row["memory_growth_bytes"])
    return f"{row['leaked_pages']} pages, {row['leaked_threads']} threads, {growth} of memory"


def milliseconds(seconds: float | None) -> str:
    return decimal(None if seconds is None else 1000 * seconds, 1)


def brute_force(record: Record) -> str:
    """The summary of a search beside brute force, and the fastest settings."""
    summary = record["summary"]
    facts = (
        f"{summary['settings']} settings: the search took {decimal(summary['search_s'], 0)} s and brute force "
        f"{decimal(summary['brute_force_s'], 0)} s. The pick, {summary['pick']}, reaches "
        f"{100 * summary['pick_of_best']:.1f} % of the best, {summary['best']}. {summary['exact_forecasts']} forecasts "
        "are exactly the engine's accept_length; the largest difference is "
        f"{decimal(summary['largest_difference'], 3)}."
    )
    if "rematch" in summary:
        low, high = summary["rematch_interval"]
        facts += (
            f" The best of so many noisy times is too good: side by side on all built-in prompts the pick has "
            f"{decimal(summary['rematch'])} [{decimal(low)}, {decimal(high)}] of its speed."
        )
    header = ("setting", "accept_length", "forecast", "tokens/s", "predicted")
    rows = (
        (
            row["setting"],
            *(decimal(row[name]) for name in ("accept_length", "forecast_accept_length")),
            *(decimal(row[name], 1) for name in ("measured_tokens_per_s", "predicted_tokens_per_s")),
        )
        for row in record["rows"][:10]
    )
    return f"{table(header, rows)}\n\n{facts}"


def host_rounds(record: Record) -> str:
    """The host's share of a recorded round, beside an upload of all page tables."""
    header = ("rows", "tokens a row", "draft shape", "overlap", "a round, ms", "numbers uploaded", "all tables, ms")
    rows = (
        (
            str(row["rows"]),
            f"{row['context']:,}",
            row["shape"],
            "yes" if row["how"] == "graph" else "no",
            f"{1e3 * row['step_seconds']:.3f}",
            f"{row['uploaded_numbers']:.1f}",
            f"{1e3 * row['whole_tables_seconds']:.2f}",
        )
        for row in record["rows"]
    )
    return table(header, rows)


def gpu_probe(record: Record) -> str:
    """What an operation of a round takes on a GPU, recorded alone."""
    timed = [row for row in record["rows"] if row["microseconds"] is not None]
    return table(("operation", "microseconds"), ((row["probe"], f"{row['microseconds']:.1f}") for row in timed))


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


def rounds_gpu(record: Record) -> str:
    """Kernels of a round: their number, their time, the longest of them."""
    header = ("rounds", "batch", "draft shape", "ms a round", "kernels", "their ms", "the longest kernels, ms a round")
    lines = []
    for row in record["rows"]:
        kernels, cells = row["kernels"], (NONE, NONE, NONE)
        if kernels is not None:  # measured with --kernels
            longest = ", ".join(
                f"{_short(name)} {1e3 * one['seconds']:.2f} ({one['count']:.0f}x)"
                for name, one in list(kernels["by_name"].items())[:LONGEST_KERNELS]
            )
            cells = (f"{kernels['count']:.0f}", f"{1e3 * kernels['seconds']:.2f}", longest)
        how = f"{row['variant']}, {row['how']}" if "variant" in row else row["how"]
        lines.append((how, str(row["batch"]), row["shape"], f"{1e3 * row['round_seconds']:.2f}", *cells))
    return table(header, lines)


def products_gpu(record: Record) -> str:
    """The fastest product of each shape and number of rows, beside cuBLAS."""
    ways = ("cublas", "cublas+", "ours", "dependent")
    header = ("product", "bytes a weight", "rows", *(f"`{way}`, us" for way in ways), "TB/s of the last")
    found: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in record["rows"]:
        found.setdefault((row["shape"], row["itemsize"], row["rows"]), {})[row["what"]] = row
    lines = []
    for (shape, size, rows), by_way in found.items():
        cells = (f"{1e6 * by_way[way]['seconds']:.1f}" if way in by_way else NONE for way in ways)
        last = by_way.get("dependent")
        share = NONE if last is None else decimal(1e-12 * last["bytes_per_s"])
        lines.append((shape, str(size), str(rows), *cells, share))
    return table(header, lines)


def training_gpu(record: Record) -> str:
    """A step of training by part, at a shape of eight billion parameters."""
    parts = ("target", "labels", "head", "loss", "backward", "optimizer")
    header = ("row", "ms a step", *(f"{part}, ms" for part in parts), "tokens/s", "of the peak", "GB")
    lines = (
        (
            row["row"],
            f"{1e3 * row['seconds_per_step']:.1f}",
            *(f"{1e3 * row['parts'][part]:.1f}" for part in parts),
            f"{row['tokens_per_s']:,.0f}",
            f"{100 * row['share_of_peak']:.0f} %",
            f"{1e-9 * row['peak_memory_bytes']:.0f}",
        )
        for row in record["rows"]
    )
    return table(header, lines)


def _short(kernel: str) -> str:
    """A kernel's name without types and arguments."""
    return f"`{kernel.removeprefix('void ').partition('<')[0].rpartition('::')[2]}`"


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


def bit_sources(record: Record) -> str:
    """The operations that round by what is computed beside a token, by schedule, and the first of them."""
    header = ("`deterministic`", "weights", "schedule", "operation", "its results that differ", "first")
    return table(
        header,
        (
            (
                "on" if row["deterministic"] else "off",
                row["dtype"] + (f", {row['quantization']}" if row["quantization"] else ""),
                row["schedule"],
                row["operation"] or "none",
                f"{100 * row['share']:.2f} %" if row["differs"] else "none",
                row["first"] or NONE,
            )
            for row in record["rows"]
        ),
    )


def checked_heads(record: Record) -> str:
    """A head and its spoilt copies, and the checks that fail."""
    header = ("head", "exit status", "what fails", "s")
    return table(
        header,
        (
            (
                row["head"],
                str(row["exit_status"]),
                "; ".join(f"{name}: {says}" for name, says in row["failed"].items()) or "nothing",
                decimal(row["seconds"], 0),
            )
            for row in record["rows"]
        ),
    )


def few_tokens(record: Record) -> str:
    """Rows over all seeds: each recipe at its best rate and warm-up. Below, all tries of the first seed."""
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
    tested = table(
        (*header, "forecast", "its ratio to published", "minutes", "of them the start's"),
        (
            (
                row["source"],
                f"{row['asked_tokens']:,} ({distinct[row['source'], row['asked_tokens'], row['variant']]:,})",
                row["variant"],
                f"{row['learning_rate']:g}, {row['warmup_ratio']:g} "
                f"({row['tries']}{', edge' if row['at_edge'] else ''})",
                str(len(row["seeds"])),
                with_interval(row["accept_length"], row["interval"], row["prompts"]),
                _over(row, "accept_length"),
                with_interval(row["forecast"], row["forecast_interval"], row["prompts"]),
                _over(row, "forecast"),
                decimal(row["seconds"] / 60, 1),
                decimal(row["start_seconds"] / 60, 1),
            )
            for row in record["rows"]
            if row["seed"] is None
        ),
    )
    known = any(row["seed"] is None for row in record["rows"])
    return f"{tested}\nAll tries, of the first seed:\n\n{_tries(record)}" if known else _tries(record)


def _tries(record: Record) -> str:
    """What the validation half said of every recipe: the forecast at each rate and warm-up."""
    tries: dict[tuple[str, int, str], list[Row]] = {}
    for row in record["rows"]:
        if row["split"] == "validation" and row["seed"] is not None:
            tries.setdefault((row["source"], row["asked_tokens"], row["variant"]), []).append(row)
    lines = []
    for (source, tokens, variant), rows in tries.items():
        first = [row for row in rows if row["seed"] == rows[0]["seed"]]
        first.sort(key=lambda row: (row["learning_rate"], row["warmup_ratio"]))
        told = (
            f"{row['learning_rate']:g}, {row['warmup_ratio']:g}: "
            + ("diverged" if row["diverged"] else f"{row['forecast']:.3f}")
            for row in first
        )
        settings = " ".join(record["settings"]["variants"].get(variant, ()))
        lines.append((source, f"{tokens:,}", variant, f"`{settings}`" if settings else NONE, "; ".join(told)))
    return table(("source", "tokens", "recipe", "settings", "rate, warm-up: forecast on the validation half"), lines)


def _over(row: Row, name: str) -> str:
    ratio = row[f"{name}_ratio"]
    return NONE if ratio is None else with_interval(ratio, row[f"{name}_ratio_interval"], row["prompts"])


def _tried(rate: float, rates: Sequence[float]) -> str:
    """How many rates were tried, and whether the chosen one is the lowest or highest of them."""
    return f"{len(rates)}, edge" if len(rates) > 1 and rate in (min(rates), max(rates)) else str(len(rates))


def training_rivals(record: Record) -> str:
    """Tests of the chosen rate of each trainer."""
    columns = ("accept_length", "verify steps", "forecast", "seconds a step", "memory")
    header = ("trainer", "tokens", "rate (of tries)", *columns)
    tries: dict[str, list[float]] = {}
    for row in record["rows"]:
        if row["split"] == "validation":
            tries.setdefault(row["rival"], []).append(row["learning_rate"])
    return table(
        header,
        (
            (
                f"{row['rival']} {row['version']}",
                f"{row['tokens']:,}",
                f"{row['learning_rate']:g} ({_tried(row['learning_rate'], tries[row['rival']])})",
                with_interval(row["accept_length"], row["interval"], row["prompts"]),
                str(row["verify_steps"]),
                with_interval(row["forecast"], row["forecast_interval"], row["prompts"]),
                decimal(row["seconds_per_step"]),
                megabytes(row["peak_memory_bytes"] - row["held_before_bytes"]),
            )
            for row in record["rows"]
            if row["split"] == "test"
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


def draft_loss(record: Record) -> str:
    """Memory and processor time of one loss."""
    header = ("vocabulary", "loss", "tokens", "processor seconds", "memory")
    return table(
        header,
        (
            (
                str(row["vocabulary"]),
                row["variant"],
                str(row["tokens"]),
                decimal(row["processor_seconds"], 1),
                megabytes(row["peak_memory_bytes"]),
            )
            for row in record["rows"]
        ),
    )


def aux_shift(record: Record) -> str:
    """accept_length with right and with shifted layer ids."""
    header = ("head", "ids", "draft", "temperature", "accept_length", "verify steps", "change")
    return table(
        header,
        (
            (
                row["method"],
                ", ".join(map(str, row["aux_layer_ids"])),
                shape(row),
                f"{row['temperature']:g}",
                with_interval(row["accept_length"], row["interval"], row["prompts"]),
                str(row["verify_steps"]),
                _change(row),
            )
            for row in record["rows"]
        ),
    )


def judges(record: Record) -> str:
    """What another project computes from an exported head, beside ours."""
    header = ("judge", "head", "compared", "result")
    return table(header, ((row["judge"], row["head"], row["compared"], _verdict(row)) for row in record["rows"]))


def _change(row: Row) -> str:
    low, high = row["change_interval"]
    return f"{100 * row['change']:+.1f} % [{100 * low:+.1f}, {100 * high:+.1f}]" if row["change"] else ""


def _verdict(row: Row) -> str:
    if "prompts" not in row:
        return f"largest difference {row['largest_difference']:.1e}, largest logit {row['largest_logit']:.1f}"
    equal = sum(one["tokens_equal"] and one["ours"] == one["theirs"] for one in row["prompts"])
    drafts = sum(one["ours"]["drafts"] for one in row["prompts"])
    return f"tokens, drafts and accepted drafts equal in {equal} of {len(row['prompts'])} prompts ({drafts} drafts)"


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
