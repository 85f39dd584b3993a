"""The page of measurements is what its records say, and nothing in it is typed by hand."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    return importlib.import_module


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the records that a test may change."""
    return Path(shutil.copytree(RESULTS, tmp_path / "results"))


def test_no_figure_is_typed_in_the_texts(generator) -> None:
    """Digits may be part of a name (AVX512, int8). 95 % and 1x are no measurements."""
    page = generator("measurements")
    texts = [page.HEAD, page.TAIL]
    texts += [text for section in page.SECTIONS for text in (section.title, section.question, section.text)]
    for text in texts:
        bare = re.sub(r"`[^`]*`|[A-Za-z][\w-]*|\b95 %|\b1x\b", "", text)
        assert not re.search(r"\d", bare), f"a figure is typed by hand: {bare!r}"


def rows_of(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("*.json")))
def test_figures_of_the_tables_come_from_records(generator, results, name) -> None:
    """Every shown value follows its record: with all numbers of the rows changed, no table line stays as it was.

    Each row has a factor of its own: the ratio of two rows must change, too. A figure of one digit needs a large one.
    """
    page = generator("measurements").page
    record = json.loads((results / name).read_text(encoding="utf-8"))
    record["rows"] = [changed(row, 3.37 + 0.31 * place) for place, row in enumerate(record["rows"])]
    (results / name).write_text(json.dumps(record), encoding="utf-8")
    before, after = (_figures(page(folder), name) for folder in (RESULTS, results))
    counts_alone = name.startswith("deterministic-rivals")  # answers that are alike, of so many
    assert (before or counts_alone) and len(before) == len(after)
    same = [figure for figure, other in zip(before, after, strict=True) if figure == other]
    assert not same, f"{name} was changed, and these figures were not: {same}"


def _figures(page: str, name: str) -> list[str]:
    """The decimals in the table of a record; those of versions, settings (code) and what a row is called are none."""
    table = re.sub(r"`[^`]*`", "", page.split(f"`benchmarks/results/{name}`")[1].split("\n\n")[1])
    cells = [cell for line in table.splitlines()[2:] for cell in line.split(" | ")]
    return [found for cell in cells for found in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\.\d)", cell)]


def changed(value, factor):
    """All numbers that are no counts, flags or versions, multiplied; the order and sign of intervals stay."""
    if isinstance(value, dict) and value.get("failed"):  # what `toolkit check` says of a head, in words with figures
        said = {check: re.sub(r"\d+\.\d+", lambda one: f"{float(one[0]) * factor:.4f}", text)
                for check, text in value["failed"].items()}  # fmt: skip
        return changed({**value, "failed": None}, factor) | {"failed": said}
    if isinstance(value, dict):
        return {key: entry if key == "temperature" else changed(entry, factor) for key, entry in value.items()}
    if isinstance(value, list):
        return [changed(entry, factor) for entry in value]
    return value * factor if isinstance(value, float) else value


def test_a_single_value_is_seen(generator, results) -> None:
    name = "acceptance-smollm2-135m-intel-xeon-amx.json"
    record = json.loads((results / name).read_text(encoding="utf-8"))
    record["rows"][0]["speedup"] = 7.89
    record |= {"stages": {"prompts": 66.0, "train": 132.0}, "features_bytes": 5.6e9}
    (results / name).write_text(json.dumps(record), encoding="utf-8")
    page = generator("measurements").page
    cost = "minutes: prompts 1.1, train 2.2, together 3.3; disk of the features: 5.6 GB"
    for text in ("7.89x", cost):
        assert text in page(results) and text not in page()


def test_missing_and_unknown_records_are_errors(generator, results) -> None:
    page = generator("measurements").page
    (results / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no section shows other.json"):
        page(results)
    (results / "other.json").unlink()
    for path in results.glob("judges-*.json"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="no record judges-.*'Exports read by other projects'"):
        page(results)


def test_intervals_and_rows_of_few_groups_are_left_out(generator, results) -> None:
    """Batches of 16 were timed on one or two groups of prompts: "1.06 [1.06, 1.06]" was read as exact."""
    tables = generator("record_tables")
    row = {
        "engine": "ours-plain", "version": "1", "shape": None, "settings": "2 threads", "weight_bits": 16.0,
        "batch": 16, "prompts": 32, "tokens_per_s": 100.0, "speedup": 1.06, "interval": [1.06, 1.07],
        "accept_length": None, "near_ties": 0, "unequal": 0, "over": "ours-plain", "decode_speedup": 1.0,
    }  # fmt: skip
    two, one, many = {**row}, {**row, "prompts": 16}, {**row, "batch": 1, "prompts": 16, "settings": "HF, compiled"}
    lines = tables.engine({"rows": [two, one, many]}).splitlines()[2:]
    assert len(lines) == 2 and "1.06x |" in lines[0] and "1.06x [1.06, 1.07]" in lines[1]
    assert "2 threads" in lines[0] and "HF, compiled" in lines[1]
    never = {"draft": "random head", "shape": "4,1,5", "batch": 16, "ratio": 1.06, "interval": [1.06, 1.06]}
    never |= {"drafted_steps": 0.1, "accept_length": 1.3}
    record = {"settings": {"limit": 32, "batch": 16}, "rows": [never, {**never, "draft": "none"}]}
    (line,) = tables.never_slower(record).splitlines()[2:]
    assert "| 1.06x |" in line and "10 %" in line


def test_adaptive_rows_say_how_often_they_draft(generator) -> None:
    """An accept_length of drafted steps alone looks like that of all."""
    row = {"shape": "adaptive", "num_steps": 4, "top_k": 4, "num_draft_tokens": 16, "drafted_share": 0.25}
    named = generator("record_tables").shape
    assert named(row) == "adaptive, at most `4,4,16`, drafts in 25 % of the steps"
    assert named(row | {"lookup": False}).startswith("adaptive, no lookup, at most `4,4,16`, drafts in 25 %")


def test_what_loses_to_plain_decoding_is_marked(generator) -> None:
    """A row that is 1.4 times eager bfloat16 may be slower than plain decoding with its own options."""
    row = {"speedup": 1.39, "over": "ours-plain-int8", "decode_speedup": 1.1, "engine": "ours-tree-int8"}
    row |= {"version": "1", "shape": "4,4,16", "settings": "int8", "weight_bits": 11.4, "batch": 1, "prompts": 16}
    row |= {"tokens_per_s": 88.3, "interval": None, "accept_length": 1.7, "near_ties": 0, "unequal": 0}
    plain = {**row, "engine": row["over"], "tokens_per_s": 100.0}
    rows = [row, {**row, "tokens_per_s": 99.7}, {**row, "over": "not measured"}, plain]
    lines = generator("record_tables").engine({"rows": rows}).splitlines()[2:]
    assert [line.split(" | ")[6] for line in lines] == ["0.88x, slower", "1.00x", "-", "-"]


def test_a_rival_that_drafts_is_compared_with_its_own_plain_row(generator) -> None:
    """Its ratio to our plain decoding hides that its drafts lose to its own plain decoding."""
    row = {"over": "ours-plain", "decode_speedup": None, "version": "1", "shape": None, "settings": "its own"}
    row |= {"weight_bits": 16.0, "prompts": 16, "speedup": 1.1, "interval": None, "accept_length": None}
    row |= {"near_ties": 0, "unequal": 0}
    speeds = (("vllm-cpu", 1, 94.3), ("vllm-cpu", 4, 200.0), ("hf-generate", 1, 39.0))
    speeds += (("vllm-cpu-eagle3", 1, 90.6), ("vllm-cpu-eagle3", 4, 250.0), ("hf-prompt-lookup", 1, 38.9))
    speeds += (("llama.cpp-q4_0", 1, 50.0), ("llama.cpp-q4_0-ngram", 1, 60.0), ("llama.cpp-q4_0-eagle3-sure", 1, 75.0))
    speeds += (("hf-generate-fp32", 1, 80.0), ("hf-prompt-lookup-fp32", 1, 120.0), ("ours-ngram", 1, 130.0))
    rows = [{**row, "engine": name, "batch": batch, "tokens_per_s": speed} for name, batch, speed in speeds]
    lines = generator("record_tables").engine({"rows": [*rows, {**rows[-1], "batch": 2}]}).splitlines()[2:]
    expected = ["-", "-", "-", "0.96x, slower", "1.25x", "1.00x", "-", "1.20x", "1.50x", "-", "1.50x", "-", "-"]
    assert [line.split(" | ")[6] for line in lines] == expected


def test_servers_are_shown(generator, results) -> None:
    """A record of benchmarks/serve.py: times in milliseconds, what a soak left, and what has no row with its reason."""
    timed = {"ttft_p50": 0.0312, "ttft_p99": 0.4561, "tpot_p50": 0.0123, "tokens_per_s": 78.91, "errors": 0}
    row = {"server": "ours-eagle3", "settings": "defaults", "clients": 4, "requests": 32, **timed, "tokens": 99}
    row |= {"other_texts": 2, "accept_length": 1.934, "peak_memory_bytes": 1e9, "leaked_pages": None}
    soak = {"server": "ours-soak", "settings": "float32", "clients": 200, "requests": 800, **timed, "tpot_p50": None}
    soak |= {"leaked_pages": 0, "leaked_threads": 0, "memory_growth_bytes": 12_000_000}
    record = json.loads((RESULTS / "grammar-amd-epyc-avx512.json").read_text(encoding="utf-8"))
    record |= {"what": "server", "rows": [row, soak], "left_out": {"vllm": "no interpreter (--vllm-python)"}}
    (results / "server-some-cpu.json").write_text(json.dumps(record), encoding="utf-8")
    page = generator("measurements").page(results)
    text = page.split("## Servers under load")[1].split("\n## ")[0]
    assert "| `ours-eagle3` | defaults | 4 | 32 | 31.2, 456.1 | 12.3 | 78.9 | 1.93 | 0 | 2 | - |" in text
    assert "| 200 | 800 | 31.2, 456.1 | - | 78.9 | - | 0 | - | 0 pages, 0 threads, 12 MB of memory |" in text
    assert "No row of vllm: no interpreter (--vllm-python)." in text


def test_heads_of_few_tokens_are_shown_over_all_seeds(generator) -> None:
    """The row of a try that validation did not choose would look like a result, as would one of a single seed."""
    row = {"source": "talk", "asked_tokens": 50_000, "unique_tokens": 20_000, "variant": "ours"}
    row |= {"learning_rate": 0.02, "warmup_ratio": 0.1}
    row |= {"seed": None, "seeds": [0, 1, 2], "tries": 5, "at_edge": True, "prompts": 20, "seconds": 90.0}
    row |= {"start_seconds": 30.0, "accept_length": 1.5, "interval": [1.4, 1.6], "forecast": 1.45}
    row |= {"forecast_interval": [1.3, 1.7], "forecast_ratio": None, "forecast_ratio_interval": None}
    row |= {"accept_length_ratio": 1.2, "accept_length_ratio_interval": [1.1, 1.3]}
    table = generator("record_tables").few_tokens
    tried = {**row, "split": "validation", "seed": 0, "diverged": None}
    tries = [tried, {**tried, "learning_rate": 0.01, "forecast": 1.4}, {**tried, "seed": 1, "forecast": 1.9}]
    tries.append({**tried, "learning_rate": 0.05, "forecast": None, "diverged": "the loss is nan"})
    shown = table({"rows": [{**row, "split": "test"}, *tries], "settings": {"variants": {"ours": ["train.a=b"]}}})
    line, *_, screened = shown.splitlines()[2:]
    assert screened == (
        "| talk | 50,000 | ours | `train.a=b` | 0.01, 0.1: 1.400; 0.02, 0.1: 1.450; 0.05, 0.1: diverged |"
    ), "what lost stands there too"
    assert line.endswith(
        "| 0.02, 0.1 (5, edge) | 3 | 1.50 [1.40, 1.60] | 1.20 [1.10, 1.30] | 1.45 [1.30, 1.70] | - | 1.5 | 0.5 |"
    )


def test_equal_bits_are_shown(generator) -> None:
    """Rivals' tokens under a heading of bits would compare what they were not asked for."""
    row = {"engine": "toolkit", "dtype": "bfloat16", "schedule": "batch 4", "deterministic": False, "requests": 200}
    row |= {"equal": 12, "tokens_unequal": 30, "cost": None, "version": "1"}
    paired = {**row, "deterministic": True, "equal": 200, "tokens_unequal": 0, "cost": 1.234}
    compiled, rival = {**row, "schedule": "compiled"}, {**row, "engine": "vllm", "equal": 170}
    table, rows = generator("record_tables").deterministic, [row, paired, compiled, rival]
    lines = table({"settings": {}, "rows": rows}).splitlines()[2:]
    assert lines == [
        "| toolkit | bfloat16 | batch 4 | 170 of 200 | 12 of 200 | 200 of 200 | 1.23x |",
        "| toolkit | bfloat16 | compiled | 170 of 200 | 12 of 200 | refused | - |",
        "| vllm 1 | bfloat16 | batch 4 | 170 of 200 | - | - | - |",
    ]
    [tokens] = table({"settings": {"tokens_only": True}, "rows": [row, paired]}).splitlines()[2:]
    assert tokens.endswith("| 12 of 200 (tokens) | 200 of 200 (tokens) | 1.23x |")
