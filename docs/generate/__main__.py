"""Write what the records in benchmarks/results/ say: docs/benchmarks.md, docs/acceptance.svg, the table in README.md.

What the source says (commands, recipe keys, the Python API, ..) is written when the site is built: site_pages.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import figure
import measurements

DOCS = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- generated: demo -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    readme = DOCS.parent / "README.md"
    text = TABLE.sub(lambda block: f"{block[1]}\n{figure.demo()}\n{block[2]}", readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")
    (DOCS / "benchmarks.md").write_text(measurements.page(), encoding="utf-8")
    (DOCS / "acceptance.svg").write_text(figure.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
