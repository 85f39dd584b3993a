"""`build-token-map --size auto`: the size with which a head decodes fastest on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from toolkit.bench.acceptance import describe_draft, describe_target
from toolkit.bench.answers import Sampling
from toolkit.bench.engine_context import Trial
from toolkit.bench.map_size import SizeResult, best_size, measure_sizes, sizes_of
from toolkit.bench.prompts import builtin_prompts, limited
from toolkit.bench.records import command_line, make_record, write_record
from toolkit.checkpoint.open_head import open_head
from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_draft import measured_shape
from toolkit.pipeline.forecast import load_head
from toolkit.pipeline.token_map import write_map
from toolkit.targets.facts import target_facts
from toolkit.tokenmap.build import build_token_map
from toolkit.tokenmap.counts import Counts
from toolkit.tokenmap.token_map import TokenMapError

PROMPTS, TOKENS = 16, 48  # built-in prompts that are answered, and tokens of an answer
RECORD = "sizes.json"


def vocabulary_of(name: str, target_name: str | None) -> int:
    """Rows of the output matrix of the target of a head, or of a native module; no weights of the target are loaded."""
    if target_name is not None:
        return target_facts(target_name).vocab_size
    return open_head(name).head.config.vocab_size


def choose_size(counts: Counts, out: Path, name: str, target_name: str | None = None) -> Iterator[str]:
    """Write the map of the fastest size to `out`, and sizes.json with every size; yield lines for the user.

    name: a head, or native; target_name: the target of a native module. The engine runs the size of the best prediction
    and its neighbours, and the fastest of them is written. Nothing is written before it is known.
    Raises `TokenMapError` for counts of another vocabulary, and the errors of `load_head` and `measure_sizes`.
    """
    config = EngineConfig(draft=name, target=target_name, max_running_requests=1)
    target, draft = load_head(config)
    if counts.vocab_size != target.vocab_size:
        raise TokenMapError(
            f"the counts are of {counts.vocab_size} ids, and {target.name} has {target.vocab_size}; count with its "
            "tokenizer and --vocab-size"
        )
    total, forced = counts.total(), counts.forced_ids
    sizes = sizes_of(counts.vocab_size, len(forced))
    map_of = lambda size: build_token_map(total, size=size, forced_ids=forced)  # noqa: E731
    shape = measured_shape(draft, False, None, 1)
    # A head with its own matrix is read again for each size: packed weights cannot be changed.
    open_draft = (lambda: open_head(name)) if draft.head.config.own_vocabulary else (lambda: draft)
    trial = Trial(target, draft, limited(builtin_prompts(), PROMPTS), Sampling(TOKENS, 0.0, 0), config)
    yield f"choosing the size for {name}: {len(sizes)} sizes, shape {shape.as_text()}"
    results = measure_sizes(trial, open_draft, sizes, map_of, shape)
    chosen = best_size(results)
    write_map(counts, out, chosen.size, None)
    described = {"target": describe_target(target), "draft": describe_draft(draft)}
    settings = {"shape": shape.as_text(), "prompts": PROMPTS, "max_tokens": TOKENS, "chosen": chosen.size}
    rows = [{"corpus": out.name, **asdict(one)} for one in results]
    write_record(out / RECORD, make_record("token_map", command_line(), settings, rows, **described))
    yield from size_table(results, {chosen.name: "chosen"})
    yield f"one request, shape {shape.as_text()}; sizes with two numbers ran end to end, beside plain decoding\n"


def size_table(results: Sequence[SizeResult], marks: Mapping[str, str]) -> Iterator[str]:
    """Lines for the user, one for each size. marks: by name, what is written after its line."""
    yield f"  {'size':>14}  {'of answers':>10}  {'draft ms':>8}  {'accept_length':>22}  {'over plain decoding':>22}"
    for one in results:
        covers = "-" if one.coverage is None else f"{100 * one.coverage:.1f}%"
        length = _measured_and_predicted(one.accept_length, one.predicted_accept_length, "")
        speed = _measured_and_predicted(one.speedup, one.predicted_speedup, "x")
        mark = f"  <- {marks[one.name]}" if one.name in marks else ""
        yield f"  {one.name:>14}  {covers:>10}  {1000 * one.head_seconds:>8.2f}  {length:>22}  {speed:>22}{mark}"


def _measured_and_predicted(measured: float | None, predicted: float | None, unit: str) -> str:
    found = "" if measured is None else f"{measured:.2f}{unit}"
    if predicted is None:
        return found
    return f"{found} ({predicted:.2f}{unit} predicted)" if found else f"{predicted:.2f}{unit} predicted"
