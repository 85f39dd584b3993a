"""The page of the report: one HTML file with embedded style and figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from toolkit.bench.report_style import STYLE
from toolkit.bench.rows import ALL, best_row
from toolkit.bench.run_folder import RunData
from toolkit.bench.table import decimal, equal_text, length_text, prompts_phrase, rates_text, shape_name, verdict_line

CAPTIONS = {
    "training": ("Training", "Loss of each optimizer step (thin) and smoothed (thick), and the accept_length of a "
                 "chain, forecast by a teacher-forced replay of held-out rollouts; dotted: measured by the engine."),
    "depth": ("Acceptance by depth", "How often the target accepts the draft at each depth. Solid: of the verify "
              "steps that reached this depth. Dashed: of all verify steps."),
    "coverage": ("Draft vocabulary", "Share of the target's response tokens that a draft vocabulary of each size "
                 "covers, for the counted text and for held-out text. Other tokens can never be drafted."),
    "speed": ("Plain and speculative decoding", "Tokens per second in the decode phase, on the same prompts, "
              "interleaved in one run. Prefill is excluded from both."),
}  # fmt: skip


def page(record: Mapping[str, Any], data: RunData, pictures: Mapping[str, str]) -> str:
    """Return the HTML of the page."""
    has_rows = any(row["task"] == ALL for row in record["rows"])
    title = f"{record['run']}: acceptance report"
    parts = [_head(record), _missing(record["missing"])]
    if has_rows:
        best = best_row(dict(record))
        parts += [_cards(best), f"<p class='lead'>{_summary(record, best)}</p>"]
    parts.append(_pictures(pictures))
    for measured in (record, *record["further_temperatures"]) if has_rows else ():
        parts += _measured(measured)
    parts += [_next(record, data), _provenance(record)]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _head(record: Mapping[str, Any]) -> str:
    target = (record.get("target") or {}).get("name")
    about = f"EAGLE-3 draft head for <b>{escape(str(target))}</b>" if target else "Draft head"
    name = escape(str(record["run"]))
    return f"<header><p class='kicker'>toolkit report</p><h1>{name}</h1><p class='sub'>{about}</p></header>"


def _missing(missing: Sequence[str]) -> str:
    if not missing:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in missing)
    return f"<section class='missing'><b>Not in this report</b><ul>{items}</ul></section>"


def _cards(best: Mapping[str, Any]) -> str:
    low, high = best["interval"]
    between = "an interval needs two prompts" if low is None else f"95 % interval {low:.2f} to {high:.2f}"
    speed = "not timed" if best["tokens_per_s"] is None else (
        f"{best['tokens_per_s']:.1f} against {best['plain_tokens_per_s']:.1f} tokens/s"
    )  # fmt: skip
    equal = {None: "not checked", True: "yes", False: "NO"}[best["tokens_equal"]]
    ties = "answers were not compared" if best["near_ties"] is None else (
        f"{best['answers']} answers, {best['near_ties']} near-ties, {best['unequal']} beyond rounding"
    )  # fmt: skip
    cards = (
        ("Tokens per verify step", decimal(best["accept_length"]), between, ""),
        ("Speedup over plain decoding", "-" if best["speedup"] is None else f"{best['speedup']:.2f}x", speed, ""),
        ("Same tokens as plain", equal, ties, "bad" if best["tokens_equal"] is False else ""),
        ("Best draft shape", shape_name(dict(best)), f"{best['num_draft_tokens']} nodes per verify step", ""),
    )
    divs = (
        f"<div class='card {tone}'><span>{name}</span>"
        f"<strong>{escape(value)}</strong><small>{escape(note)}</small></div>"
        for name, value, note, tone in cards
    )
    return f"<section class='cards'>{''.join(divs)}</section>"


def _summary(record: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    settings, target = record["settings"], record.get("target") or {}
    speed = ""
    if best["speedup"] is not None:
        speed = (
            f" and writes {best['tokens_per_s']:.1f} tokens/s where plain decoding writes "
            f"{best['plain_tokens_per_s']:.1f}, <b>{best['speedup']:.2f} times</b> as fast"
        )
    training = record["training"]
    predicted = ""
    if training and training["real_accept_length_best"]:
        real, step = training["real_accept_length_best"], training["real_best_step"]
        predicted = (
            f" Training measured {real:.2f} with this head (step {step}), the mean over its draft shapes and "
            "temperatures on held-out prompts."
        )
    elif training and training["forecast_accept_length_best"]:
        forecast, step = training["forecast_accept_length_best"], training["forecast_best_step"]
        predicted = f" Training forecast {forecast:.2f} for this head (step {step}), a chain on held-out rollouts."
    return (
        f"On {escape(prompts_phrase(dict(record)))} ({best['answers']} answers of at most "
        f"{settings['max_tokens']} tokens, temperature {settings['temperature']:g}, batch {settings['batch']}) "
        f"{escape(str(target.get('name', 'the target')))} with this head, {escape(shape_name(dict(best)))}, commits "
        f"<b>{decimal(best['accept_length'])} tokens per verify step</b> over {best['verify_steps']:,} steps{speed}. "
        f"{escape(verdict_line(dict(record)))}{predicted}"
    )


def _pictures(pictures: Mapping[str, str]) -> str:
    figures = "".join(
        f"<figure id='{name}'><h2>{title}</h2>{pictures[name]}<figcaption>{caption}</figcaption></figure>"
        for name, (title, caption) in CAPTIONS.items()
        if name in pictures
    )
    return f"<section class='figures'>{figures}</section>"


def _measured(record: Mapping[str, Any]) -> list[str]:
    """Return the tables of one temperature: all shapes, and the tasks of the best shape."""
    best, temperature = best_row(dict(record)), f"temperature {record['settings']['temperature']:g}"
    shapes = [(shape_name(row), row) for row in record["rows"] if row["task"] == ALL]
    name = shape_name(dict(best))
    tasks = [(row["task"], row) for row in record["rows"] if row["task"] != ALL and shape_name(row) == name]
    parts = [f"<h2>By draft shape, {temperature}</h2>", _table("draft", shapes, best)]
    return [*parts, f"<h2>By task, {temperature}, {escape(name)}</h2>", _table("task", tasks, None)] if tasks else parts


def _table(first: str, rows: Sequence[tuple[str, dict[str, Any]]], best: Mapping[str, Any] | None) -> str:
    names = (
        *(first, "prompts", "verify steps", "accept_length [95\u00a0%]", "accepted at depth 1, 2, .. (%)"),
        *("tokens/s", "plain tokens/s", "speedup", "tokens equal"),
    )
    lines = []
    for name, row in rows:
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        cells = (
            *(name, row["prompts"], f"{row['verify_steps']:,}", length_text(row), rates_text(row["accept_rate"])),
            *(decimal(row["tokens_per_s"], 1), decimal(row["plain_tokens_per_s"], 1), speedup, equal_text(row)),
        )
        tone = " class='best'" if row is best and len(rows) > 1 else ""
        lines.append(f"<tr{tone}>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _next(record: Mapping[str, Any], data: RunData) -> str:
    draft = escape(str((record.get("draft") or {}).get("path") or data.run_dir / "ckpt"))
    return (
        "<h2>Next commands</h2><pre>"
        f"toolkit serve --draft {draft}              # OpenAI-compatible server with this head\n"
        f"toolkit chat --draft {draft}               # chat; accepted draft tokens are highlighted\n"
        f"toolkit bench acceptance --draft {draft}   # measure again, or on your own prompts with --prompts FILE"
        "</pre>"
    )


def _provenance(record: Mapping[str, Any]) -> str:
    hardware, settings = record["hardware"] or {}, record["settings"]
    memory = hardware.get("memory_bytes")
    machine = ", ".join(filter(None, (
        hardware.get("cpu"),
        f"{hardware['cores']} cores" if hardware.get("cores") else None,
        f"{hardware['torch_threads']} torch threads" if hardware.get("torch_threads") else None,
        f"{memory / 2**30:.0f} GiB" if memory else None,
        *(hardware.get("gpus") or ()),
    )))  # fmt: skip
    facts: list[tuple[str, str]] = [
        ("measured", str(record["date"])),
        ("commit", str(record["commit"] or "not run from a git checkout")),
        ("machine", machine),
        ("versions", _pairs(record["versions"])),
        ("command", str(record["command"])),
    ]
    for name in ("target", "draft"):
        if record.get(name):
            facts.append((name, _pairs(record[name])))
    facts.append(("settings", _pairs(settings) or "no measurement"))
    if record["training"]:
        facts.append(("training", _pairs(record["training"])))
    if record["token_map"]:
        facts.append(("token map", _pairs({key: value for key, value in record["token_map"].items() if key != "rows"})))
    facts += [(f"stage {stage['stage']}", _stage(stage)) for stage in record["stages"]]
    facts += list((record.get("definitions") or {}).items())
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<h2>Settings and provenance</h2><table class='facts'><tbody>{lines}</tbody></table>"


def _stage(stage: Mapping[str, Any]) -> str:
    seconds = stage["seconds"]
    spent = "time not recorded" if seconds is None else f"{int(seconds) // 60} min {seconds % 60:.0f} s"
    sessions = stage["sessions"] or 1
    again = f" in the last of {sessions} sessions" if sessions > 1 else ""
    unfinished = "" if stage["status"] == "done" else f" ({stage['status']})"
    return f"{spent}{again}{unfinished}" + (f"; {stage['headline']}" if stage["headline"] else "")


def _pairs(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + _pairs(value) + "}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_value(entry) for entry in value)
    return str(value)
