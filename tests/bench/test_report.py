import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from toolkit.bench.records import RECORD_KEYS
from toolkit.bench.report import write_report


class Balance(HTMLParser):
    """Counts elements and finds tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.broken = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.broken.append(tag)


def test_report_of_a_whole_run(run_folder):
    """Four pictures, the headline and the tables on one page that loads nothing from elsewhere."""
    json_path, html_path = write_report(run_folder)
    html = html_path.read_text()
    page = Balance(html)
    assert page.broken == page.open == []
    assert [a.get("id") for tag, a in page.seen if tag == "figure"] == ["training", "depth", "coverage", "speed"]
    assert sum(tag == "svg" for tag, _ in page.seen) == 4
    assert not [a for tag, a in page.seen if tag in ("script", "link", "img") or str(a.get("href", "#"))[0] != "#"]
    for text in (
        "2.21",
        "1.56x",
        "smollm2-135m",
        "rewriting",
        "2 min 41 s",
        f"toolkit serve --draft {run_folder}/ckpt",
    ):
        assert text in html
    assert "Not in this report" not in html and not re.search(r"\bnan\b", html)
    record = json.loads(json_path.read_text())
    assert set(RECORD_KEYS) <= set(record) and record["what"] == "acceptance" and len(record["rows"]) == 18
    assert record["training"]["steps"] == 300 and record["training"]["step_seconds"] == pytest.approx(450)
    assert record["training"]["forecast_accept_length_last"] == pytest.approx(1.976, abs=1e-3)
    assert record["token_map"]["size"] == 8192 and record["missing"] == []
    assert [stage["stage"] for stage in record["stages"]] == ["rollouts", "train"]


def test_a_missing_part_is_named_on_the_page(run_folder):
    """A figure that is missing without a note would look like a finished report."""
    shutil.rmtree(run_folder / "bench")
    json_path, html_path = write_report(run_folder)
    html = html_path.read_text()
    assert "Not in this report" in html and "no measurement" in html
    assert [a["id"] for tag, a in Balance(html).seen if tag == "figure"] == ["training", "coverage"]
    assert any("no measurement" in sentence for sentence in json.loads(json_path.read_text())["missing"])
