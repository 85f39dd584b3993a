"""Rows, targets and tables of benchmarks/engine_gpu.py. Nothing here reads a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from roofline_engines import SETTLING, Entrant, Sizes, Turn
from roofline_targets import Subject
from round_parts import NAMES

from toolkit.bench.bootstrap import ratio_interval
from toolkit.bench.table import decimal

DEFINITIONS = {
    "weight_bits": "bits per weight as the engine holds them, over all parameters of the target",
    "forced": "the accept_length that drafts were accepted to by chance, whatever the target said (the tokens mean "
    "nothing then); null: the target decided",
    "context": "tokens of a row in the middle of the measured rounds, mean over rows",
    "seconds": "of `rounds` rounds in each of `repeats` turns, without prefill; entrants take turns, rotating",
    "round_seconds": "seconds of one round, host included",
    "speedup": "tokens a second over those of `over`, for drafted rows of ours the plain one of the same settings; "
    "95 % bootstrap interval over turns, which are paired",
    "accept_length": "tokens committed per verify step and row, bonus included",
    "speedup_per_accept_length": "the share of what was accepted that became speed",
    "parts": "seconds of a round by part, of an engine that was measured part by part behind the turns (round_parts.py "
    "says what is in each); they add up to a round of that measurement",
    "parts_by": "graphs: a recorded graph for each part; stamps: of eager rounds",
    "overhead_of_verify": "all parts but verify, host included, over verify",
    "bytes_per_step": "weights that a plain step reads, output matrix included and embedding left out, and the keys "
    "and values of `context`",
    "share_of_bandwidth": "bytes_per_step / round_seconds / the larger of the card's bandwidths (`card`)",
    "peak_memory_bytes": "largest allocation of the process so far: all entrants of a batch size are loaded together",
}
# name, key of a row, at least or at most, by what is drafted
TARGETS: tuple[tuple[str, str, bool, dict[str, float]], ...] = (
    ("plain step, of the measured bandwidth", "share_of_bandwidth", True, {"plain": 0.85}),
    ("round without verify, of verify", "overhead_of_verify", False, {"chain 3/1/4": 0.15, "tree 7/8/32": 0.30}),
    ("speedup / accept_length", "speedup_per_accept_length", True, {"chain 3/1/4": 0.85, "tree 7/8/32": 0.75}),
)
# SGLang's documentation: Llama-3.1-8B-Instruct, MT-bench, one H100, tokens/s. It states no accept lengths.
PUBLISHED_PLAIN, PUBLISHED = 158.34, {"EAGLE-2": 244.10, "EAGLE-3": 373.25}


def shape_text(entrant: Entrant) -> str:
    shape = entrant.shape
    if shape is None:
        return "plain"
    kind = "chain" if shape.is_chain else "tree"
    return f"{kind} {shape.num_steps}/{shape.top_k}/{shape.num_draft_tokens}"


def weight_bytes(subject: Subject) -> int:
    """What a step of the target reads of its weights."""
    target = subject.target
    parts = [*target.layers, target.final_norm, target.lm_head]
    return sum(tensor.nbytes for part in parts for tensor in part.parameters())


def cache_bytes(subject: Subject) -> int:
    """Keys and values of one token."""
    config = subject.target.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = (subject.target.dtype or next(subject.target.model.parameters()).dtype).itemsize
    return 2 * subject.target.n_layers * config.num_key_value_heads * width * size


def rows_of(
    subject: Subject,
    sizes: Sizes,
    turns: Mapping[str, Sequence[Turn]],
    entrants: Sequence[Entrant],
    parts: Mapping[str, tuple[str, dict[str, float]]],
    bandwidth: float,
    peak: int | None,
) -> list[dict[str, Any]]:
    """One row an entrant. parts: by entrant, how they were measured and seconds of a round; absent: not measured."""
    rows = []
    for entrant in entrants:
        mine, plain = turns[entrant.name], turns.get(entrant.over, [])
        seconds, rounds = sum(one.seconds for one in mine), sum(one.rounds for one in mine)
        tokens = sum(one.tokens for one in mine)
        length = tokens / (rounds * sizes.batch)
        round_seconds = seconds / rounds
        context = _context(subject, sizes, len(mine), length, rounds / len(mine))
        how, by_part = parts.get(entrant.name, (None, {}))
        row = {
            "engine": entrant.name,
            "version": entrant.version,
            "weight_bits": subject.target.weight_bits,
            "target": subject.name,
            "head": None if entrant.shape is None else subject.head,
            "forced": None if entrant.shape is None or not _is_ours(entrant) else subject.forced_length,
            "shape": shape_text(entrant),
            "batch": sizes.batch,
            "context": context,
            "repeats": len(mine),
            "rounds": rounds,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "round_seconds": round_seconds,
            "accept_length": None if entrant.shape is None else length,
            "over": entrant.over,
            **_speedup(mine, plain, None if entrant.shape is None else length),
            "parts": by_part,
            "parts_by": how,
            "overhead_of_verify": sum(by_part.values()) / by_part["verify"] - 1 if by_part else None,
            **_roofline(subject, sizes.batch, entrant, context, round_seconds, bandwidth),
            "peak_memory_bytes": peak,
        }
        rows.append(row)
    return rows


def _is_ours(entrant: Entrant) -> bool:
    return entrant.name.startswith("ours")


def _context(subject: Subject, sizes: Sizes, repeats: int, length: float, rounds: float) -> float:
    prompts = [len(prompt) for repeat in range(repeats) for prompt in subject.group(sizes.batch, repeat)]
    return sum(prompts) / len(prompts) + (SETTLING + rounds / 2) * length


def _speedup(mine: Sequence[Turn], plain: Sequence[Turn], length: float | None) -> dict[str, Any]:
    """Paired: a turn of ours and the plain one beside it are one unit."""
    if len(plain) != len(mine):
        return {"speedup": None, "interval": [None, None], "speedup_per_accept_length": None}
    theirs, ours = ([one.seconds / one.tokens for one in turns] for turns in (plain, mine))
    speedup = sum(theirs) / sum(ours)
    interval = ratio_interval(theirs, ours)
    return {
        "speedup": speedup,
        "interval": [None, None] if interval is None else list(interval),
        "speedup_per_accept_length": None if length is None else speedup / length,
    }


def _roofline(
    subject: Subject, batch: int, entrant: Entrant, context: float, seconds: float, bandwidth: float
) -> dict[str, Any]:
    if entrant.shape is not None:
        return {"bytes_per_step": None, "share_of_bandwidth": None}
    moved = weight_bytes(subject) + batch * context * cache_bytes(subject)
    return {"bytes_per_step": int(moved), "share_of_bandwidth": moved / seconds / bandwidth}


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The house's targets beside what recorded rounds of one request measured."""
    found = []
    for row in rows:
        if row["batch"] != 1 or row["engine"].endswith("-eager") or not row["engine"].startswith("ours"):
            continue
        of = row["target"] + ("" if row["forced"] is None else f", forced accept_length {row['forced']:.2f}")
        for name, key, least, limits in TARGETS:
            wanted, measured = limits.get(row["shape"]), row[key]
            if wanted is None or measured is None:
                continue
            met = measured >= wanted if least else measured <= wanted
            one = {"target": of, "engine": row["engine"], "batch": row["batch"], "what": name, "at_least": least}
            found.append({**one, "wanted": wanted, "measured": measured, "met": met})
    return found


def beside_published(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our recorded rounds of one request at the 8B shape beside SGLang's figures.

    needed: by the published method, the accept_length at which ours has its speedup, if rounds take as long then.
    """
    found = []
    for row in rows:
        if row["batch"] != 1 or not row["target"].startswith("llama-3.1-8b") or not row["engine"].startswith("ours"):
            continue
        gained = row["speedup_per_accept_length"]
        needed = {name: speed / PUBLISHED_PLAIN / gained if gained else None for name, speed in PUBLISHED.items()}
        kept = {key: row[key] for key in ("engine", "shape", "tokens_per_s", "accept_length", "speedup")}
        found.append({**kept, "published": {"plain": PUBLISHED_PLAIN, **PUBLISHED}, "needed": needed})
    return found


def published_table(found: Sequence[Mapping[str, Any]]) -> Table:
    told = ", ".join(f"{name} {speed:.2f}" for name, speed in {"plain": PUBLISHED_PLAIN, **PUBLISHED}.items())
    columns = ("shape", "tokens/s", "accept_length", "speedup", *(f"needed for {name}'s" for name in PUBLISHED))
    table = _table(f"beside SGLang's published tokens/s on an H100: {told}", columns)
    for row in found:
        needed = map(decimal, row["needed"].values())
        speed = (decimal(row["tokens_per_s"], 1), decimal(row["accept_length"]), decimal(row["speedup"]))
        table.add_row(row["engine"], row["shape"], *speed, *needed)
    return table


def speed_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    columns = (
        "batch",
        "shape",
        "ms/round",
        "tokens/s",
        "speedup [95 %]",
        "accept_length",
        "/ accept",
        "overhead",
        "bandw.",
    )
    table = _table(title, columns)
    for row in rows:
        low, high = row["interval"]
        table.add_row(
            row["engine"],
            str(row["batch"]),
            row["shape"],
            decimal(1e3 * row["round_seconds"]),
            decimal(row["tokens_per_s"], 1),
            decimal(row["speedup"]) + ("" if low is None else f" [{low:.2f}, {high:.2f}]"),
            decimal(row["accept_length"]),
            decimal(row["speedup_per_accept_length"]),
            _percent(row["overhead_of_verify"]),
            _percent(row["share_of_bandwidth"]),
        )
    return table


def parts_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = _table(title, ("batch", "shape", "by", *NAMES))
    for row in rows:
        if row["parts"]:
            milliseconds = [f"{1e3 * row['parts'][name]:.3f}" for name in NAMES]
            table.add_row(row["engine"], str(row["batch"]), row["shape"], row["parts_by"], *milliseconds)
    return table


def targets_table(found: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "targets, stated for an H200 and the 8B shape in bfloat16 at batch 1",
        ("batch", "what", "wanted", "measured", "met"),
    )
    for one in found:
        wanted = f"{'>=' if one['at_least'] else '<='} {one['wanted']:.2f}"
        met = "yes" if one["met"] else "no"
        table.add_row(
            f"{one['engine']}, {one['target']}", str(one["batch"]), one["what"], wanted, f"{one['measured']:.2f}", met
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
