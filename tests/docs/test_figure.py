"""The figure of the README shows its record's numbers."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from toolkit.bench.table import equal_text, length_text, outcome_line, shape_name

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def texts(svg: str) -> list[str]:
    return [part.text or "" for part in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def bars(svg: str) -> list[float]:
    parts = ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}rect")[1:]
    return [float(part.attrib["height"]) for part in parts]


def test_the_figure_is_drawn_from_the_newest_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A drawing that its record has left behind, or bars that are not to scale, would advertise what is not so."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    svg = importlib.import_module("figure").svg
    results = Path(shutil.copytree(RESULTS, tmp_path / "results"))
    for path in results.glob("acceptance-smollm2-135m-*.json"):
        if "full" not in path.name:
            newest = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
    newest["date"], newest["hardware"] = "2031-02-03T04:05:06+00:00", {**newest["hardware"], "cpu": "Abacus <1>"}
    whole = [row for row in newest["rows"] if row["task"] == "all"]
    whole.sort(key=lambda row: row["shape"] == "adaptive" and row.get("lookup") is not False)  # as they are drawn
    for place, row in enumerate(whole):
        row |= {"tokens_per_s": 33.3 * (place + 1), "plain_tokens_per_s": 66.6, "speedup": 0.5 * (place + 1)}
        row["accept_length"] = 1.23 + place
    (results / "acceptance-smollm2-135m-abacus.json").write_text(json.dumps(newest), encoding="utf-8")
    said = texts(svg(results))
    assert any("Abacus <1>" in text and "2031-02-03" in text for text in said)
    assert {"66.6", "33.3", "accept_length 1.23", "0.50x plain, slower"} <= set(said)
    heights = bars(svg(results))
    assert heights[:3] == pytest.approx([heights[0], heights[0] / 2, heights[0]], abs=0.2)
    assert len(heights) == 1 + len(whole)
    (results / "acceptance-smollm2-135m-abacus.json").unlink()
    with pytest.raises(FileNotFoundError, match="no record of the demo recipe"):
        svg(results)


def test_pages_print_what_the_newest_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output that README and quickstart show is that of the recorded run, in the words that are printed today."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    record = importlib.import_module("figure").newest_record()
    readme, quickstart = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/quickstart.md"))
    assert outcome_line(record) in readme and outcome_line(record) in quickstart
    for row in (row for row in record["rows"] if row["task"] == "all"):
        line = next(line for line in quickstart.splitlines() if line.startswith(f" {shape_name(row)}"))
        cells = (length_text(row), f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}x", equal_text(row))
        assert all(cell in line for cell in cells), line
